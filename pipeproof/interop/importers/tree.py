"""Values in sections, each with its location: YAML and JSON files over their base files, TOML files, and commands.

``defaults`` and ``bases`` name base files, relative to the file, those of Hydra with their section; ``${a.b}`` is the
value at another key. Only a run determines ``${oc.env:NAME}``; the resolvers of numbers that NeMo-RL registers are
computed, and ``${NAME:value}``, as Primus writes it, is the value where the environment does not set the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeAlias

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath, describe_value, shortened
from pipeproof.diagnostics.source import LINE_BREAK, PlanFileError, SourceMap, read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.foreign_text import ForeignTextError, decode_toml
from pipeproof.interop.importers.import_codes import UNREADABLE
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

_BASES: Final = ("bases", "defaults")
_OVERRIDE, _MISSING, _SELF = "_override_", "???", "_self_"
_MAX_BASES, _MAX_STEPS = 8, 16
_PART: Final = re.compile(r"\$\{([^{}]*)\}")
_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]*", re.ASCII)
_OPERATIONS: Final[Mapping[str, Callable[[float, float], float]]] = MappingProxyType(
    {"add": lambda a, b: a + b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b, "max": max}
)


class Tree:
    """Values by paths of keys, also dotted ones; ``source`` is that of the file itself."""

    def __init__(self, source: SourceMap, nodes: dict[str, Node]) -> None:
        self.source = source
        self._nodes = nodes

    def get(self, *path: str) -> Placed | None:
        """Return the value at a path, interpolated; None if there is none, or a section."""
        path = _parts(path)
        node = self._node(path)
        return self._resolved(node, path, 0) if isinstance(node, Placed) else None

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

    def leaves(self, *path: str) -> dict[str, Placed]:
        """Return the values of a section and of those below it, each by its last name."""
        found = self.section(*path)
        for name in self.names(*path):
            found.update(self.leaves(*path, name))
        return found

    def number(self, *path: str, default: int | None = None) -> int | None:
        """Return the integer at a path, or the default; None for one that only a run determines, or no integer."""
        placed = self.get(*path)
        value = default if placed is None or placed.value is None else placed.value
        return value if type(value) is int and value >= 0 else None

    def names(self, *path: str) -> tuple[str, ...]:
        """Return the keys of a section; none if it is no section."""
        node = self._node(_parts(path))
        return tuple(node) if isinstance(node, dict) else ()

    def has(self, path: str) -> bool:
        """Return True for a value or a section at a path."""
        return self._node(_parts((path,))) is not None

    def _resolved(self, placed: Placed, path: tuple[str, ...], step: int) -> Placed:
        """Return a value with its interpolations replaced; the location stays that of the text."""
        text = placed.value
        if not isinstance(text, str) or "${" not in text:
            return placed
        for _ in range(_MAX_STEPS):
            match = _PART.search(text)
            if match is None:
                return Placed(text, placed.location)
            value = self._interpolated(match[1], path, step, placed.location)
            if isinstance(value, Unknown) or match[0] == text:
                return Placed(value, placed.location)
            text = f"{text[: match.start()]}{value}{text[match.end() :]}"
        return Placed(Unknown("an interpolation of many parts", placed.location), placed.location)

    def _interpolated(self, text: str, path: tuple[str, ...], step: int, location: Location) -> Any:
        """Return the value of the text between ``${`` and ``}``."""
        unknown = Unknown(f"`${{{shortened(text)}}}`, which only a run determines", location)
        resolver, colon, rest = text.partition(":")
        if not colon:
            depth = len(text) - len(text.lstrip("."))
            above = path[: len(path) - depth] if depth else ()
            found = self._at((*above, *text.lstrip(".").split(".")), step)
            return unknown if found is None else found.value
        operands = [literal(part.strip()) for part in rest.split(",")]
        if resolver == "oc.select":
            found = self._at(tuple(str(operands[0]).split(".")), step)
            return found.value if found is not None else operands[1] if operands[1:] else None
        if resolver == "oc.env" and operands[1:]:
            return operands[1]
        if _VARIABLE.fullmatch(resolver):
            return literal(rest)
        if resolver in _OPERATIONS and len(operands) == 2 and all(isinstance(value, int | float) for value in operands):
            try:
                return _OPERATIONS[resolver](*operands)
            except (ZeroDivisionError, OverflowError):
                return unknown
        return unknown

    def _at(self, path: tuple[str, ...], step: int) -> Placed | None:
        node = self._node(path)
        if not isinstance(node, Placed) or step >= _MAX_STEPS:
            return None
        return self._resolved(node, path, step + 1)


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
    """Read a YAML or JSON file over its bases.

    Raises:
        PlanFileError: PP100 or PP170, a file cannot be read, is no mapping, or includes itself.
    """
    source, nodes = _read(path, ())
    return Tree(source, nodes)


def tree_of_data(data: Mapping[str, Any], source: SourceMap) -> Tree:
    """Return the values of a file alone, without its bases, from its data."""
    return Tree(source, _nodes(data, source, ()))


_SECTION: Final = re.compile(r"\s*\[\s*([\w.\-\" ]+?)\s*\]")
_KEY: Final = re.compile(r"\s*([\w\-]+)\s*=")
_AT: Final = re.compile(r"\(at line (\d+), column (\d+)\)")


def read_toml(path: Path) -> Tree:
    """Read a TOML file of plain keys in sections.

    Raises:
        PlanFileError: PP100 if it cannot be read, PP170 if it is no TOML.
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
        finding = UNREADABLE.finding(f"no valid TOML: {_AT.sub('', message).strip()}", location)
        raise PlanFileError(finding, source=SourceMap(name, lines)) from error
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


def _read(path: Path, above: tuple[Path, ...]) -> tuple[SourceMap, dict[str, Node]]:
    data, source = read_mapping(str(path))
    nodes: dict[str, Node] = {}
    for key in _BASES:
        bases = data.pop(key, None)
        for base in bases if isinstance(bases, list) else [] if bases is None else [bases]:
            nodes = _merged(nodes, _base(base, path, above, source, source.locate((key,))))
    return source, _merged(nodes, _nodes(data, source, ()))


def _base(
    base: Any, path: Path, above: tuple[Path, ...], source: SourceMap, location: Location
) -> dict[str, Node]:  # fmt: skip
    """Return the values of a base file: one by its name, or of Hydra by its group and name."""
    if base == _SELF:
        return {}
    if (
        isinstance(base, dict)
        and len(base) == 1
        and all(isinstance(part, str) for item in base.items() for part in item)
    ):
        ((group, name),) = base.items()
        return {group: _base(f"{group}/{name.removesuffix('.yaml')}.yaml", path, above, source, location)}
    if not isinstance(base, str):
        _refuse(f"base files must be names, found {describe_value(base)}", location, source)
    file = path.parent / base
    if len(above) >= _MAX_BASES or file.resolve() in (path.resolve(), *(one.resolve() for one in above)):
        _refuse(f"the base file {shortened(base)} leads back to this file, or is nested too deeply", location, source)
    if not file.is_file():
        _refuse(f"the base file {shortened(base)} is no file below {path.parent}", location, source)
    return _read(file, (*above, path))[1]


def _nodes(data: Mapping[str, Any], source: SourceMap, below: tuple[str, ...]) -> dict[str, Node]:
    nodes: dict[str, Node] = {}
    for name, value in data.items():
        path = (*below, name)
        is_section = isinstance(value, dict)
        nodes[name] = _nodes(value, source, path) if is_section else Placed(value, source.locate(path, key=True))
    return nodes


def _merged(base: dict[str, Node], over: dict[str, Node]) -> dict[str, Node]:
    """Return the values of both, those of ``over`` first; a section with ``_override_: true`` replaces the base's."""
    merged = dict(base)
    for name, node in over.items():
        old = merged.get(name)
        if isinstance(node, Placed):
            if node.value != _MISSING or old is None:
                merged[name] = node
            continue
        flag = node.get(_OVERRIDE)
        inner = {key: value for key, value in node.items() if key != _OVERRIDE}
        replaces = isinstance(flag, Placed) and flag.value is True
        merged[name] = inner if replaces or not isinstance(old, dict) else _merged(old, inner)
    return merged


def _refuse(message: str, location: Location, source: SourceMap) -> NoReturn:
    raise PlanFileError(UNREADABLE.finding(message, location), source=source)
