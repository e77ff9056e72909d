"""Values of Python code that is read and not run: literals, objects with their attributes, and unknown values."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeproof.diagnostics.finding import Location


@dataclass(slots=True)
class Record:
    """An object of a class that is not run: its attributes, and why the others are not known.

    ``name`` is the call that makes it. Reading an attribute that was never set
    gives a record of its own, so that recipes can set attributes below it.
    """

    name: str
    location: Location
    attributes: dict[str, Placed] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    is_unset: bool = False
    """True for an attribute that was read and that nothing has set."""

    def get(self, *path: str) -> Placed | None:
        """Return the value at a path of attributes, with its location; None if nothing has set it."""
        placed = self.attributes.get(path[0])
        if len(path) == 1 or placed is None:
            return placed
        return placed.value.get(*path[1:]) if isinstance(placed.value, Record) else None

    def below(self, name: str, location: Location) -> Any:
        """Return an attribute; one that nothing has set is a record."""
        if name not in self.attributes:
            self.attributes[name] = Placed(Record(f"{self.name}.{name}", location, is_unset=True), location)
        return self.attributes[name].value


@dataclass(frozen=True, slots=True)
class Placed:
    """A value, and the location of the expression that it comes from."""

    value: Any
    location: Location


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only a run determines; ``why`` completes "the value is ..."."""

    why: str
    location: Location


@dataclass(frozen=True, slots=True)
class Function:
    """A function or a class of a module."""

    node: ast.FunctionDef | ast.ClassDef
    module: str
    """The file of the module."""


@dataclass(frozen=True, slots=True)
class Method:
    """A function of a value, such as ``lower`` of a string."""

    owner: Any
    name: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A function or class of a module that is not found: it is named, and cannot be read."""

    name: str
    module: str


def is_known(value: object) -> bool:
    """Return True for a literal, or a list, tuple or mapping of literals."""
    if isinstance(value, list | tuple):
        return all(map(is_known, value))
    if isinstance(value, Mapping):
        return all(map(is_known, value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def records_in(values: object) -> Iterator[Record]:
    """Yield the records of arguments."""
    if isinstance(values, Record):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from records_in(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from records_in(value)
