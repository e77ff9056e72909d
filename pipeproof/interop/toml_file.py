"""A TOML file with the places of its keys, which Python's reader does not give."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeproof.interop.codes import UNREADABLE
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.load import PlanFileError, read_text
from pipeproof.specs.source import LINE_BREAK, SourceMap

_SECTION = re.compile(r"\s*\[\s*([\w.\-\" ]+?)\s*\]")
_KEY = re.compile(r"\s*([\w\-]+)\s*=")
_AT = re.compile(r"\(at line (\d+), column (\d+)\)")


class TomlFile:
    """Sections with plain keys, which is what training configurations are; nested tables are left in their values."""

    def __init__(self, name: str, lines: tuple[str, ...], data: dict[str, Any]) -> None:
        self.name = name
        self.lines = lines
        self._data = data
        self._places = dict(_places(name, lines))

    def has(self, section: str, key: str) -> bool:
        """Whether the key is given."""
        table = self._data.get(section)
        return isinstance(table, dict) and key in table

    def get(self, section: str, key: str, default: Any) -> Any:
        """The value of a key, or ``default``."""
        table = self._data.get(section)
        return table.get(key, default) if isinstance(table, dict) else default

    def names(self, section: str) -> tuple[str, ...]:
        """The keys of a section."""
        table = self._data.get(section)
        return tuple(table) if isinstance(table, dict) else ()

    def given(self, section: str, key: str) -> Location | None:
        """Where a key stands; None where it is left out."""
        return self._places.get((section, key))

    def place(self, section: str, key: str) -> Location:
        """Where a key stands, else its section, else the top of the file."""
        top = Location(self.name, 1, 1)
        return self._places.get((section, key)) or self._places.get((section, "")) or top

    def refused(
        self, message: str, section: str, key: str, *, help: str | None = None, code: str = UNREADABLE.code
    ) -> PlanFileError:
        """The error for a value."""
        finding = Finding(code, Severity.ERROR, message, self.place(section, key), help)
        return PlanFileError(finding, source=SourceMap(self.name, self.lines))


def read_toml(path: Path) -> TomlFile:
    """Read a TOML file.

    Raises:
        PlanFileError: PP100 where it cannot be read, PP170 where it is no TOML.
    """
    name = str(path)
    text = read_text(name)
    lines = tuple(LINE_BREAK.split(text))
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _AT.search(str(error))
        line, column = (int(match[1]), int(match[2])) if match else (len(lines), 1)
        message = f"no valid TOML: {_AT.sub('', str(error)).strip()}"
        finding = Finding(UNREADABLE.code, Severity.ERROR, message, Location(name, line, column))
        raise PlanFileError(finding, source=SourceMap(name, lines)) from error
    return TomlFile(name, lines, data)


def _places(name: str, lines: tuple[str, ...]) -> Iterator[tuple[tuple[str, str], Location]]:
    section = ""
    for number, line in enumerate(lines, start=1):
        if match := _SECTION.match(line):
            section = match[1]
            yield (section, ""), Location(name, number, match.start(1) + 1, match.end(1))
        elif match := _KEY.match(line):
            yield (section, match[1]), Location(name, number, match.start(1) + 1, match.end(1))
