"""Writes the sizes of pipeproof's dependencies into docs/installation.md, from a fresh environment that pip makes.

``python validation/pages/measure_sizes.py`` takes a minute and needs a package index. The environment is temporary.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from pages import DOCS, ROOT, fill

PAGE = DOCS / "installation.md"
NEEDED_FOR = {
    "annotated-types": "part of pydantic",
    "click": "the command line",
    "filelock": "locks of results files, reshards and saved states",
    "markdown-it-py": "part of rich",
    "mdurl": "part of rich",
    "networkx": "witnesses: cycles of a deadlock, the readable definition of the order rules",
    "numpy": "the op table: every operation is a row of arrays",
    "pydantic": "plans and other files: typed keys",
    "pydantic-core": "part of pydantic",
    "pygments": "part of rich",
    "pyyaml": "plans, with line and column of each key",
    "rich": "text output: tables, colours, progress",
    "simpy": "the reference model of the simulator",
    "typing-extensions": "part of pydantic",
    "typing-inspection": "part of pydantic",
}
"""Use of each distribution, by its name in lower case with hyphens."""
LARGE = ("numpy",)
"""Distributions that the limit does not count."""
LIMIT_MB = 60
"""Most megabytes (10^6 bytes) of all others together."""


def sizes_in(packages: Path) -> dict[str, tuple[str, float]]:
    """Version and megabytes on the disk of each distribution of a directory, with the bytecode that pip compiles."""
    found = {}
    for distribution in distributions(path=[str(packages)]):
        name = distribution.metadata["Name"].lower().replace("_", "-")
        found[name] = (distribution.version, bytes_of(distribution) / 1e6)
    return found


def bytes_of(distribution: Distribution) -> int:
    """Bytes on the disk of the files of a distribution."""
    files = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
    return sum(file.stat().st_size for file in files if file.is_file())


def table(sizes: Mapping[str, tuple[str, float]]) -> list[str]:
    """Lines of the table, largest first, and of the sums."""
    small = sum(size for name, (_, size) in sizes.items() if name not in LARGE)
    assert small < LIMIT_MB, f"{small:.1f} MB of dependencies beyond {' and '.join(LARGE)}"
    rows = [
        f"| {name} {version} | {size:.1f} | {NEEDED_FOR[name]} |"
        for name, (version, size) in sorted(sizes.items(), key=lambda item: -item[1][1])
    ]
    large = sum(sizes[name][1] for name in LARGE)
    return [
        "| package | MB | needed for |",
        "| --- | ---: | --- |",
        *rows,
        f"| **all but numpy** | **{small:.1f}** | |",
        f"| **all** | **{small + large:.1f}** | |",
    ]


def main() -> None:
    """Install the checkout into a new environment, measure, write."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
        python = Path(directory) / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*pip, str(ROOT)], check=True)
        (packages,) = Path(directory).glob("lib/python*/site-packages")
        sizes = sizes_in(packages)
    sizes.pop("pipeproof")
    PAGE.write_text(fill(PAGE, {"sizes": "\n".join(table(sizes))}), encoding="utf-8")


if __name__ == "__main__":
    main()
