"""Print the counts that describe the state of the code base: files, lines, repeated base names, import circles, words.

``python validation/counts.py [ROOT]``; run it on two checkouts to compare them.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

import grimp
import networkx as nx
import word_list

ROOT = Path(__file__).resolve().parents[1]


def import_graph(root: Path) -> nx.DiGraph:
    """Imports between modules of the package at ``root``, those in functions and under ``TYPE_CHECKING`` included."""
    sys.path.insert(0, str(root))  # grimp reads the package that Python would import
    imports = grimp.build_graph("pipeproof", cache_dir=None)
    graph = nx.DiGraph()
    graph.add_nodes_from(imports.modules)
    for name in imports.modules:
        graph.add_edges_from((name, target) for target in imports.find_modules_directly_imported_by(name))
    return graph


def circles(graph: nx.DiGraph) -> list[list[str]]:
    """Groups of modules that import each other, in alphabetical order."""
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def repeated_base_names(root: Path) -> dict[str, list[Path]]:
    """Base names that several files have; files of one role in sibling folders (``torch``, ``paddle``) included."""
    names: dict[str, list[Path]] = defaultdict(list)
    for path in sorted((root / "pipeproof").rglob("*.py")):
        if path.name != "__init__.py":
            names[path.name].append(path.relative_to(root))
    return {name: paths for name, paths in sorted(names.items()) if len(paths) > 1}


def are_siblings(paths: list[Path]) -> bool:
    """True if the files are in different folders of one parent folder."""
    return len({path.parent.parent for path in paths}) == 1 and len({path.parent for path in paths}) == len(paths)


def main(arguments: list[str]) -> None:
    """Print the counts of the checkout at ``ROOT`` or at the argument."""
    root = Path(arguments[0]).resolve() if arguments else ROOT
    files = sorted((root / "pipeproof").rglob("*.py"))
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    code = [count for count in lines if count > 1]
    print(
        f"package files: {len(lines)}, lines: {sum(lines)}, median lines of a file with code: {statistics.median(code)}"
    )
    repeated = repeated_base_names(root)
    print(f"repeated base names: {len(repeated)}, in {sum(map(len, repeated.values()))} files")
    for name, paths in repeated.items():
        if not are_siblings(paths):
            print(f"  not siblings: {name}: {', '.join(map(str, paths))}")
    found = circles(import_graph(root))
    print(f"import circles: {len(found)}, modules in them: {sum(map(len, found))}")
    for group in found:
        print(f"  {' '.join(group)}")
    hits = [
        hit
        for path in word_list.searched_files(root)
        for hit in word_list.find((root / path).read_text(encoding="utf-8"), path)
    ]
    print(f"words of the list: {len(hits)}")


if __name__ == "__main__":
    main(sys.argv[1:])
