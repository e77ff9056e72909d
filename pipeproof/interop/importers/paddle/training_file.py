"""Training files of PaddleFormers, PaddleNLP and ERNIE as one table of settings: YAML or JSON, nested, with bases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath, describe_value, shortened
from pipeproof.diagnostics.source import PlanFileError, SourceMap, read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.interop.importers.import_codes import unreadable
from pipeproof.interop.importers.paddle.fleet_job import SourcedValue

BASE = "_base_"
"""Key of the base files of a file, relative to it."""

_MAX_BASES = 8
_TRUE = ("true", "1", "yes", "on", "y", "t")
_FALSE = ("false", "0", "no", "off", "n", "f")
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Settings by name, each with its value and location; ``first`` is the source of the first file."""

    values: Mapping[str, tuple[Any, Location]]
    first: SourceMap

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def location(self, name: str) -> Location | None:
        """Return the location of a setting."""
        return self.values[name][1] if name in self.values else None

    def integer(self, default: T, *names: str) -> SourcedValue[int | T]:
        """Return an integer by the first of its names that is set; ``-1`` and null mean not set."""
        for name in names:
            value, location = self.values.get(name, (None, None))
            if value is None or value == -1:
                continue
            if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
                value = int(value)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise unreadable(f"`{name}` must be a whole number, found {describe_value(value)}", location)
            return SourcedValue(value, name, location)
        return SourcedValue(default, names[0], by_default=True)

    def flag(self, name: str, *, default: bool) -> SourcedValue[bool]:
        """Return a switch, parsed like the trainers: true, ``True``, 1, ``"1"``, ``yes``, and their opposites."""
        value, location = self.values.get(name, (None, None))
        if value is None:
            return SourcedValue(default, name, by_default=True)
        word = str(value).strip().lower()
        if isinstance(value, bool | int | str) and word in (*_TRUE, *_FALSE):
            return SourcedValue(word in _TRUE, name, location)
        raise unreadable(f"`{name}` must be true or false, found {describe_value(value)}", location)

    def text(self, name: str) -> SourcedValue[str] | None:
        """Return a string; None if it is missing, null or empty."""
        value, location = self.values.get(name, (None, None))
        if value is None or value == "":
            return None
        return SourcedValue(value if isinstance(value, str) else str(value), name, location)

    def tokens(self, name: str) -> tuple[str, ...]:
        """Return tokens in one string, separated by spaces or commas, or in a list."""
        value, location = self.values.get(name, (None, None))
        if value is None:
            return ()
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            actual = describe_value(value)
            raise unreadable(f"`{name}` must be a string of tokens, or a list of them, found {actual}", location)
        return tuple(token for text in texts for token in text.replace(",", " ").split())


def read_settings(files: Sequence[Path]) -> Settings:
    """Read all settings: a later file overrides an earlier one, and a file its bases.

    Sections do not matter: a setting has the same meaning at any depth.

    Raises:
        PlanFileError: PP100 or PP101 for a file that cannot be read, PP103 for a repeated key, PP170 for
            one that is not a mapping, for a base that includes itself, and for a setting with two values.
    """
    values: dict[str, tuple[Any, Location]] = {}
    first = None
    for file in files:
        file_values, source = _read(file, ())
        values |= file_values
        first = first or source
    assert first is not None, "at least one file is imported"
    return Settings(values, first)


def _read(file: Path, above: tuple[Path, ...]) -> tuple[dict[str, tuple[Any, Location]], SourceMap]:
    name = str(file)
    tree = parse_text(read_text(name), name)
    if tree.problems:
        raise PlanFileError(*tree.problems, source=tree.source)
    if not isinstance(tree.data, dict):
        kind = "nothing" if tree.data is None else describe_value(tree.data)
        raise unreadable(f"training arguments are a mapping of keys, found {kind}", Location(name))
    values: dict[str, tuple[Any, Location]] = {}
    for base, location in _bases(tree.data, tree.source):
        path = file.parent / base
        if path.resolve() in (file.resolve(), *(ancestor.resolve() for ancestor in above)) or len(above) >= _MAX_BASES:
            raise unreadable(f"`{BASE}: {shortened(base)}` leads back to this file, or is nested too deeply", location)
        if not path.is_file():
            raise unreadable(f"`{BASE}` names {shortened(str(path))}, which is not a file", location)
        values |= _read(path, (*above, file))[0]
    own_values: dict[str, tuple[Any, Location]] = {}
    for setting, value, location in _walk(tree.data, tree.source, ()):
        if setting in own_values and own_values[setting][0] != value:
            first, where = own_values[setting]
            values_text = f"{describe_value(first)} in line {where.line}, {describe_value(value)} here"
            raise unreadable(f"`{setting}` has two values: {values_text}", location)
        own_values[setting] = (value, location)
    return values | own_values, tree.source


def _bases(data: Mapping[str, Any], source: SourceMap) -> Iterator[tuple[str, Location]]:
    bases = data.get(BASE)
    if bases is None:
        return
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            message = f"`{BASE}` must be a path or a list of paths, found {describe_value(base)}"
            raise unreadable(message, source.locate((BASE,)))
        yield base, source.locate((BASE,))


def _walk(data: Mapping[str, Any], source: SourceMap, below: KeyPath) -> Iterator[tuple[str, Any, Location]]:
    for name, value in data.items():
        path = (*below, name)
        if isinstance(value, dict):
            yield from _walk(value, source, path)
        elif path != (BASE,):
            yield name, value, source.locate(path)
