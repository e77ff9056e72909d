"""Settings in sections with plain keys, each with its location: TOML files, and the same sections from Python code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeproof.diagnostics.finding import Location, RuleDoc
from pipeproof.diagnostics.source import LINE_BREAK, PlanFileError, SourceMap, read_text
from pipeproof.foreign_text import ForeignTextError, decode_toml
from pipeproof.interop.importers.import_codes import UNREADABLE

_SECTION = re.compile(r"\s*\[\s*([\w.\-\" ]+?)\s*\]")
_KEY = re.compile(r"\s*([\w\-]+)\s*=")
_AT = re.compile(r"\(at line (\d+), column (\d+)\)")


class SectionedFile:
    """Sections with plain keys, with locations; nested tables are values."""

    def __init__(
        self,
        name: str,
        lines: tuple[str, ...],
        data: Mapping[str, Any],
        locations: Mapping[tuple[str, str], Location],
    ) -> None:
        self.name = name
        self.lines = lines
        self._data = data
        self._locations = locations

    def has(self, section: str, key: str) -> bool:
        """Return True if the key is in the file."""
        table = self._data.get(section)
        return isinstance(table, dict) and key in table

    def get(self, section: str, key: str, default: Any) -> Any:
        """Return the value of a key, or ``default``."""
        table = self._data.get(section)
        return table.get(key, default) if isinstance(table, dict) else default

    def names(self, section: str) -> tuple[str, ...]:
        """Return the keys of a section."""
        table = self._data.get(section)
        return tuple(table) if isinstance(table, dict) else ()

    def key_location(self, section: str, key: str) -> Location | None:
        """Return the location of a key; None if it is left out."""
        return self._locations.get((section, key))

    def location(self, section: str, key: str) -> Location:
        """Return the location of a key, else of its section, else the top of the file."""
        top = Location(self.name)
        return self._locations.get((section, key)) or self._locations.get((section, "")) or top

    @property
    def sections(self) -> tuple[str, ...]:
        """Names of the sections."""
        return tuple(self._data)

    def refused(
        self, message: str, section: str, key: str, *, help: str | None = None, code: RuleDoc = UNREADABLE
    ) -> PlanFileError:
        """Return the error for a value."""
        finding = code.finding(message, self.location(section, key), help)
        return PlanFileError(finding, source=SourceMap(self.name, self.lines))


def read_toml(path: Path) -> SectionedFile:
    """Read a TOML file.

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
    return SectionedFile(name, lines, data, dict(_locations(name, lines)))


def _locations(name: str, lines: tuple[str, ...]) -> Iterator[tuple[tuple[str, str], Location]]:
    section = ""
    for number, line in enumerate(lines, start=1):
        if match := _SECTION.match(line):
            section = match[1]
            yield (section, ""), Location(name, number).part(*match.span(1))
        elif match := _KEY.match(line):
            yield (section, match[1]), Location(name, number).part(*match.span(1))
