"""Training files of PaddleFormers, PaddleNLP and ERNIE as one table of settings: YAML or JSON, nested, on a base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeproof.interop.codes import UNREADABLE
from pipeproof.interop.paddle.job import Given
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.load import PlanFileError, read_text
from pipeproof.specs.problems import KeyPath, describe_value, shortened
from pipeproof.specs.source import SourceMap
from pipeproof.specs.yaml_tree import parse_text

BASE = "_base_"
"""The key that names the files a file builds on, relative to it."""

_MAX_BASES = 8
_TRUE = ("true", "1", "yes", "on", "y", "t")
_FALSE = ("false", "0", "no", "off", "n", "f")
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Settings by name, each with its value and place; ``first`` is the text of the file that was named first."""

    values: Mapping[str, tuple[Any, Location]]
    first: SourceMap

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def place(self, name: str) -> Location | None:
        """Where a setting stands."""
        return self.values[name][1] if name in self.values else None

    def integer(self, default: T, *names: str) -> Given[int | T]:
        """A whole number by the first of its names that is there; ``-1`` and null mean what is left out."""
        for name in names:
            value, place = self.values.get(name, (None, None))
            if value is None or value == -1:
                continue
            if isinstance(value, str) and value.strip().removeprefix("-").isdecimal():
                value = int(value)
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise unreadable(f"`{name}` must be a whole number, found {describe_value(value)}", place)
            return Given(value, name, place)
        return Given(default, names[0], by_default=True)

    def flag(self, name: str, *, default: bool) -> Given[bool]:
        """A switch as the trainers read one: true, ``True``, 1, ``"1"``, ``yes``, and their opposites."""
        value, place = self.values.get(name, (None, None))
        if value is None:
            return Given(default, name, by_default=True)
        word = str(value).strip().lower()
        if isinstance(value, bool | int | str) and word in (*_TRUE, *_FALSE):
            return Given(word in _TRUE, name, place)
        raise unreadable(f"`{name}` must be true or false, found {describe_value(value)}", place)

    def text(self, name: str) -> Given[str] | None:
        """A string; None where it is left out, null or empty."""
        value, place = self.values.get(name, (None, None))
        if value is None or value == "":
            return None
        return Given(value if isinstance(value, str) else str(value), name, place)

    def tokens(self, name: str) -> tuple[str, ...]:
        """Words in one string, divided by spaces or commas, or in a list."""
        value, place = self.values.get(name, (None, None))
        if value is None:
            return ()
        words = value if isinstance(value, list) else [value]
        if not all(isinstance(word, str) for word in words):
            raise unreadable(f"`{name}` must be words, or a list of them, found {describe_value(value)}", place)
        return tuple(token for word in words for token in word.replace(",", " ").split())


def read_settings(files: Sequence[Path]) -> Settings:
    """All settings of the files: a later file wins over an earlier one, and a file over what it builds on.

    Sections are only for the eye: a setting has the same meaning at any depth.

    Raises:
        PlanFileError: PP100 or PP101 for a file that cannot be read, PP103 for a key that stands twice, PP170 for
            one that is no mapping, for a base that builds on itself, and for a setting with two values.
    """
    values: dict[str, tuple[Any, Location]] = {}
    first = None
    for file in files:
        found, source = _read(file, ())
        values |= found
        first = first or source
    assert first is not None, "at least one file is imported"
    return Settings(values, first)


def _read(file: Path, above: tuple[Path, ...]) -> tuple[dict[str, tuple[Any, Location]], SourceMap]:
    name = str(file)
    tree = parse_text(read_text(name), name)
    if tree.problems:
        findings = [Finding(p.code, Severity.ERROR, p.message, tree.source.at(p.span), p.help) for p in tree.problems]
        raise PlanFileError(*findings, source=tree.source)
    if not isinstance(tree.data, dict):
        found = "nothing" if tree.data is None else describe_value(tree.data)
        raise unreadable(f"training arguments are a mapping of keys, found {found}", Location(name, 1, 1))
    values: dict[str, tuple[Any, Location]] = {}
    for base, place in _bases(tree.data, tree.source):
        path = file.parent / base
        if path.resolve() in (file.resolve(), *(other.resolve() for other in above)) or len(above) >= _MAX_BASES:
            raise unreadable(f"`{BASE}: {shortened(base)}` leads back to this file, or too far", place)
        if not path.is_file():
            raise unreadable(f"`{BASE}` names {shortened(str(path))}, which is no file", place)
        values |= _read(path, (*above, file))[0]
    own: dict[str, tuple[Any, Location]] = {}
    for setting, value, place in _walk(tree.data, tree.source, ()):
        if setting in own and own[setting][0] != value:
            raise unreadable(
                f"`{setting}` has two values: {describe_value(own[setting][0])} in line {own[setting][1].line}, "
                f"{describe_value(value)} here",
                place,
            )
        own[setting] = (value, place)
    return values | own, tree.source


def _bases(data: Mapping[str, Any], source: SourceMap) -> Iterator[tuple[str, Location]]:
    bases = data.get(BASE)
    if bases is None:
        return
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise unreadable(f"`{BASE}` must be a path or a list of paths, found {describe_value(base)}",
                             source.locate((BASE,)))  # fmt: skip
        yield base, source.locate((BASE,))


def _walk(data: Mapping[str, Any], source: SourceMap, below: KeyPath) -> Iterator[tuple[str, Any, Location]]:
    for name, value in data.items():
        path = (*below, name)
        if isinstance(value, dict):
            yield from _walk(value, source, path)
        elif path != (BASE,):
            yield name, value, source.locate(path)


def unreadable(message: str, place: Location | None, help: str | None = None) -> PlanFileError:
    """PP170, to be raised."""
    return PlanFileError(Finding(UNREADABLE.code, Severity.ERROR, message, place, help))
