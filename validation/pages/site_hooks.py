"""Hooks that turn the pages into a site: they are written for the repository, and link to files outside ``docs/``."""

from __future__ import annotations

import importlib
import json
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

LISTS = ("codes", "schedules")
"""Pages with a table whose entries have pages of their own on the site, in a folder of the same name."""

RESULTS = "validation/results/"
"""Folder of measurements and the tables made of them: ``results/`` on the site."""

OF_THE_ROOT = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages of the repository's root, and their paths on the site."""

PUBLIC = ("pipeproof", "pipeproof.testing", "pipeproof.interop", "pipeproof.interop.traces")
"""Packages whose public names must all be on the page of the Python interface."""

PLAY = "pipeproof-play.html"
"""The page that ``pipeproof play`` writes, on the site."""

_PLAY_TEXT = f'<a class="play" href="{PLAY}"><strong>Play with a schedule in your browser</strong>'
PLAY_LINKS = {
    "index.md": f'{_PLAY_TEXT}<br><img src="images/play-1024.png" alt="The page: a form with the schedule, its sizes '
    'and times; next to it the verdict, the bubble and the timeline" loading="lazy"></a>',
    "play.md": f"{_PLAY_TEXT}</a>",
}
"""By page, the link to it, in HTML: no file of the repository is its target."""

SITE_ONLY = {"a page of all keys": "keys.md", "a page of all options": "options.md"}
"""Words that are links on the site, to pages that the repository does not have."""

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[#)])")
_TO_ENTRY = re.compile(rf"\]\((?P<folder>[\w./]*?)(?P<list>{'|'.join(LISTS)})\.md#(?P<name>\w+)\)")
_ENTRY = re.compile(r'(<a id="\w+"></a>)(`?\w+`?)')
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]+`")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace directories in the navigation by their pages."""
    config.nav = expanded(config.nav or [], list(generated_pages()))
    return config


@cache
def generated_pages() -> Mapping[str, str]:
    """Return the files made with the site, by path: pages of codes and of schedule kinds, and pictures."""
    sys.path.append(str(Path(__file__).parent))
    from make_options import page as options_page
    from make_rules import code_pages
    from make_schedules import schedule_pages
    from make_tables import keys_page

    pages, pictures = schedule_pages()
    return {
        "keys.md": keys_page(),
        "options.md": options_page(),
        **{f"codes/{name}.md": text for name, text in code_pages().items()},
        **{f"schedules/{name}.md": text for name, text in pages.items()},
        **{f"images/schedules/{name}.svg": text for name, text in pictures.items()},
        **{place_of(path): (ROOT / path).read_text(encoding="utf-8") for path in result_pages()},
    }


def result_pages() -> list[str]:
    """Return the paths of the pages with measurements in the repository."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / RESULTS).glob("*.md"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of ``docs/``: generated pages, pages of the root and of notebooks, linked files."""
    from mkdocs.structure.files import File

    from pipeproof.views.play.play_page import play_html

    files.append(File.generated(config, PLAY, content=play_html()))
    for place, content in generated_pages().items():
        files.append(File.generated(config, place, content=content))
    for name, place in OF_THE_ROOT.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        content = notebook_markdown(json.loads(notebook.read_text(encoding="utf-8")), notebook.name)
        files.append(File.generated(config, place_of(notebook.relative_to(ROOT).as_posix()), content=content))
    linked = {
        path
        for page in files.documentation_pages()
        for path in linked_paths(with_pages(page.content_string, page.src_uri), page.src_uri)
    }
    for path in sorted(linked):
        place = place_of(path)
        # the strict build reports missing files, with the page and its link
        if files.get_file_from_path(place) is None and (ROOT / path).is_file():
            files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the page in the form that the site needs."""
    src_uri = page.file.src_uri
    up = "../" * src_uri.count("/")
    for words, place in SITE_ONLY.items():
        markdown = markdown.replace(words, f"[{words}]({up}{place})")
    return for_the_site(with_pages(with_play(markdown, src_uri), src_uri), src_uri)


def with_pages(markdown: str, src_uri: str) -> str:
    """Return the page with links to the generated pages, where it links to their rows in a list, or is a list."""

    def to_page(match: re.Match[str]) -> str:
        name = match["name"].upper() if match["list"] == "codes" else match["name"]
        place = f"{match['list']}/{name}.md"
        return f"]({match['folder']}{place})" if place in generated_pages() else match[0]

    folder = src_uri.removesuffix(".md")
    if folder in LISTS:
        markdown = _ENTRY.sub(lambda match: f"{match[1]}[{match[2]}]({folder}/{match[2].strip('`')}.md)", markdown)
    return _TO_ENTRY.sub(to_page, markdown)


def with_play(markdown: str, src_uri: str) -> str:
    """Return the page with its link to the page for a browser, if it has one, below the first heading."""
    if src_uri not in PLAY_LINKS:
        return markdown
    heading, _, rest = markdown.partition("\n")
    return f"{heading}\n\n{PLAY_LINKS[src_uri]}\n{rest}"


def notebook_markdown(notebook: Mapping[str, Any], file: str) -> str:
    """Return the page of a notebook with its stored outputs, and with a link to its ``file`` below the heading."""
    heading, _, rest = "\n\n".join(_cells(notebook)).partition("\n")
    return f'{heading}\n\n<a href="{file}" download>This page as a notebook</a>\n{rest}\n'


def _cells(notebook: Mapping[str, Any]) -> Iterator[str]:
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "text/html" in data:
                yield f'<div class="notebook-output">{"".join(data["text/html"])}</div>'
            else:
                yield f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Require the page of the Python interface to be complete.

    Raises:
        PluginError: a public name is not on it.
    """
    from mkdocs.exceptions import PluginError

    if page.file.src_uri == "api.md":
        missing = [name for name in public_names() if f'id="{name}"' not in html]
        if missing:
            raise PluginError(f"api.md does not show {', '.join(missing)}")
    return html


def public_names() -> list[str]:
    """Return every name that a public package exports, except modules."""
    return [
        f"{package}.{name}"
        for package in PUBLIC
        for name in importlib.import_module(package).__all__
        if not name.startswith("__")
    ]


def expanded(nav: list[Any], pages: list[str]) -> list[Any]:
    """Return the navigation with each path that ends with a slash replaced by the pages in that directory."""
    items: list[Any] = []
    for item in nav:
        if isinstance(item, str):
            items += [page for page in pages if page.startswith(item)]
        else:
            ((title, value),) = item.items()
            items.append({title: expanded(value, pages) if isinstance(value, list) else value})
    return items


def linked_paths(markdown: str, src_uri: str) -> set[str]:
    """Return the paths in the repository that a page of the site links to."""
    prose = _FENCED.sub("", markdown)
    return {_target(link, src_uri) for link in _LINK.findall(prose)}


def for_the_site(markdown: str, src_uri: str) -> str:
    """Return the page with the links of the site, and without escapes inside code in tables.

    Code hosts need a bar inside code in a table escaped; the site would show the backslash.
    """

    def link(match: re.Match[str]) -> str:
        place = place_of(_target(match[1], src_uri))
        return posixpath.relpath(place, posixpath.dirname(src_uri) or ".")

    def row(match: re.Match[str]) -> str:
        return _CODE.sub(lambda code: code[0].replace(r"\|", "|"), match[0])

    parts = _FENCED.split(markdown)
    parts[::2] = [_ROW.sub(row, _LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)


def place_of(path: str) -> str:
    """Return the path of a repository file on the site; sources end with .txt, which browsers show."""
    if path in OF_THE_ROOT:
        return OF_THE_ROOT[path]
    if path.endswith(".ipynb"):
        path = f"{path.removesuffix('.ipynb')}.md"
    if path.startswith(RESULTS) and path.endswith(".md"):
        return path.removeprefix("validation/")
    inside = path.removeprefix("docs/")
    return inside if inside != path and not inside.endswith(".py") else f"source/{path}.txt"


def _target(link: str, src_uri: str) -> str:
    """Return the path in the repository of a link on a page of the site."""
    folder = "validation/" if src_uri.startswith("results/") else "docs/"
    in_repository = next((name for name, place in OF_THE_ROOT.items() if place == src_uri), f"{folder}{src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), link))
