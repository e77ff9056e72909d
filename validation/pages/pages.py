"""Shared functions of the page generators: write pages or their generated parts, and check that they are current."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EVIDENCE = ROOT / "validation" / "results"
"""Folder of measurements and the pages made of them."""
sys.path.append(str(ROOT))  # for the other packages of `validation`


def main(script: str, pages: Mapping[Path, str], stray: frozenset[Path] = frozenset()) -> int:
    """Write the pages, or with ``--check`` only report which are not current.

    Args:
        script: the path of the calling script from the root, for the message.
        pages: the text of each page.
        stray: files that no generator writes any more; they are removed.

    Returns:
        The exit status: 1 if ``--check`` found a page that is not current, 2 for other arguments.
    """
    match sys.argv[1:]:
        case []:
            for path, text in pages.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            for path in stray:
                path.unlink()
            return 0
        case ["--check"]:
            stale = [path for path, text in pages.items() if not _holds(path, text)]
            for path in sorted({*stale, *stray}):
                sys.stderr.write(f"{path.relative_to(ROOT)} is stale; run `python {script}`\n")
            return 1 if stale or stray else 0
        case _:
            sys.stderr.write(f"usage: python {script} [--check]\n")
            return 2


def _holds(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text


def fill(page: Path, parts: Mapping[str, str]) -> str:
    """Return the page with new text between ``<!-- generated: NAME -->`` and ``<!-- end -->`` for each name.

    Raises:
        ValueError: the page does not have each name of ``parts`` once.
    """
    text = page.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
    names = [name for _, name, _ in marked.findall(text)]
    if any(names.count(name) != 1 for name in parts):
        raise ValueError(f"{page.name} has parts {names}, the script makes {sorted(parts)}")
    return marked.sub(
        lambda match: f"{match[1]}\n{parts[match[2]].strip()}\n\n{match[3]}" if match[2] in parts else match[0], text
    )


def listed(name: str, text: str = "") -> str:
    """Return the cell of a list whose entries have pages on the site: an anchor, and the name or ``text``.

    In the repository, links lead to the anchor; ``site_hooks`` turns them and the cell into links to the page.
    """
    return f'<a id="{name.lower()}"></a>{text or name}'


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table; bars inside cells are escaped."""
    lines = [_row(header), _row(tuple("---" for _ in header)), *map(_row, rows)]
    return "\n".join(lines) + "\n"


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
