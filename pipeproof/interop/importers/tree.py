"""Values in sections, each with its location: YAML, JSON and TOML files, and commands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath, shortened
from pipeproof.diagnostics.source import LINE_BREAK, SourceMap, read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.foreign_text import ForeignTextError, decode_toml
from pipeproof.interop.importers.import_codes import unreadable
from pipeproof.interop.importers.model_sizes import read_mapping


@dataclass(frozen=True, slots=True)
class Placed:
    """A value with its location in the file."""

    value: Any
    location: Location


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only a run determines; ``why`` completes "the value is ..."."""

    why: str
    location: Location


def is_known(value: object) -> bool:
    """Return True for a literal, or a list, tuple or mapping of literals."""
    if isinstance(value, list | tuple):
        return all(map(is_known, value))
    if isinstance(value, Mapping):
        return all(map(is_known, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


Node: TypeAlias = "Placed | dict[str, Node]"


class Tree:
    """Values by paths of keys, also dotted ones; ``source`` is the source map of the file."""

    def __init__(self, source: SourceMap, nodes: dict[str, Node]) -> None:
        self.source = source
        self._nodes = nodes

    def get(self, *path: str) -> Placed | None:
        """Return the value at a path; None if there is none, or a section. An interpolation is unknown."""
        node = self._node(_parts(path))
        if not isinstance(node, Placed):
            return None
        if isinstance(node.value, str) and "${" in node.value:
            why = f"`{shortened(node.value)}`, which only a run determines"
            return Placed(Unknown(why, node.location), node.location)
        return node

    def _node(self, path: tuple[str, ...]) -> Node | None:
        node: Node | None = self._nodes
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def value(self, *path: str) -> Any:
        """Return the value at a path without its location; None for one that only a run determines."""
        placed = self.get(*path)
        return None if placed is None or isinstance(placed.value, Unknown) else placed.value

    def section(self, *path: str) -> dict[str, Placed]:
        """Return the values of a section by name, without the sections below it."""
        values = {name: self.get(*path, name) for name in self.names(*path)}
        return {name: placed for name, placed in values.items() if placed is not None}

    def number(self, *path: str, default: int | None = None) -> int | None:
        """Return the integer at a path, or the default; None for one that only a run determines, or no integer."""
        placed = self.get(*path)
        value = default if placed is None or placed.value is None else placed.value
        return value if type(value) is int and value >= 0 else None

    def names(self, *path: str) -> tuple[str, ...]:
        """Return the keys of a section; none if it is not a section."""
        node = self._node(_parts(path))
        return tuple(node) if isinstance(node, dict) else ()

    def has(self, path: str) -> bool:
        """Return True for a value or a section at a path."""
        return self._node(_parts((path,))) is not None


def literal(text: str) -> Any:
    """Return a value in the text of an override or an operand: a number, a constant, or its text without quotes."""
    tree = parse_text(text, "")
    return text if tree.problems or isinstance(tree.data, dict | list) else tree.data


def _parts(path: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for name in path for part in name.split(".") if part)


def tree_of(values: Mapping[str, Placed], source: SourceMap) -> Tree:
    """Return a tree of values by dotted names."""
    nodes: dict[str, Node] = {}
    for name, placed in values.items():
        *above, last = _parts((name,)) or (name,)
        section = nodes
        for part in above:
            below = section.get(part)
            section[part] = section = below if isinstance(below, dict) else {}
        section[last] = placed
    return Tree(source, nodes)


def read_tree(path: Path) -> Tree:
    """Read a YAML or JSON file.

    Raises:
        PlanFileError: PP100 or PP170, a file cannot be read, is not a mapping, or has base files.
    """
    data, source = read_mapping(str(path))
    if "defaults" in data:
        message = "the base files of `defaults` are not read: give the configuration with all its values"
        raise unreadable(message, source.locate(("defaults",)), source=source)
    return tree_of_data(data, source)


def tree_of_data(data: Mapping[str, Any], source: SourceMap) -> Tree:
    """Return the values of a file alone, without its bases, from its data."""
    return Tree(source, _nodes(data, source, ()))


_SECTION: Final = re.compile(r"\s*\[\s*([\w.\-\" ]+?)\s*\]")
_KEY: Final = re.compile(r"\s*([\w\-]+)\s*=")
_AT: Final = re.compile(r"\(at line (\d+), column (\d+)\)")


def read_toml(path: Path) -> Tree:
    """Read a TOML file of plain keys in sections.

    Raises:
        PlanFileError: PP100 if it cannot be read, PP170 if it is not TOML.
    """
    name = str(path)
    text = read_text(name)
    lines = tuple(LINE_BREAK.split(text))
    try:
        data = decode_toml(text)
    except ForeignTextError as error:
        message, location = str(error), Location(name)
        if match := _AT.search(message):
            location = Location(name, int(match[1]), int(match[2]))
        elif "end of document" in message:
            location = Location(name, len(lines), 1)
        message = f"no valid TOML: {_AT.sub('', message).strip()}"
        raise unreadable(message, location, source=SourceMap(name, lines)) from error
    keys = dict(_locations(name, lines))
    return tree_of_data(data, SourceMap(name, lines, keys, keys))


def _locations(name: str, lines: tuple[str, ...]) -> Iterator[tuple[KeyPath, Location]]:
    section = ""
    for number, line in enumerate(lines, start=1):
        if match := _SECTION.match(line):
            section = match[1]
            yield (section,), Location(name, number).part(*match.span(1))
        elif match := _KEY.match(line):
            yield (section, match[1]), Location(name, number).part(*match.span(1))


def _nodes(data: Mapping[str, Any], source: SourceMap, below: tuple[str, ...]) -> dict[str, Node]:
    nodes: dict[str, Node] = {}
    for name, value in data.items():
        path = (*below, name)
        is_section = isinstance(value, dict)
        nodes[name] = _nodes(value, source, path) if is_section else Placed(value, source.locate(path, key=True))
    return nodes
