"""The source lines that a finding is about: found, cut to a width, with what stands below the marks."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from pathlib import Path

from pipeproof.specs.finding import Location
from pipeproof.specs.source import LINE_BREAK, SourceMap

MAX_WIDTH = 160
"""Widest line that is shown whole, in characters; of a longer one, the part around the place."""

_MARGIN = 40
"""Characters that are kept before the place in a line that is cut."""

_CUT = "..."
_MAX_BYTES = 2**26
"""Largest file that is opened to show a line of it."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of a file with their numbers, the last one the place's, and what is marked in that.

    ``indent`` and ``marked`` are terminal columns before and of the marked
    characters in the last line as it is shown.
    """

    lines: tuple[tuple[int, str], ...]
    indent: int
    marked: int


class Sources:
    """Texts by file name: the plan's, which is at hand, and others, read when a line of them is asked for."""

    def __init__(self, source: SourceMap | None) -> None:
        self._lines: dict[str, tuple[str, ...]] = {} if source is None else {source.file: source.lines}

    def excerpt(self, location: Location) -> Excerpt | None:
        """The place's line and the one before it; None if the file cannot be shown or has no such line."""
        lines = self._lines_of(location.file)
        if not 1 <= location.line <= len(lines):
            return None
        line = lines[location.line - 1]
        start, text = _window(line, location.column - 1)
        cut = len(_CUT) if start else 0
        first = location.column - 1 - start + cut
        last = (location.end_column or location.column) - start + cut
        shown = [(location.line, text)]
        before = lines[location.line - 2] if location.line > 1 else None
        if before is not None and text == line and len(before) <= MAX_WIDTH:
            shown.insert(0, (location.line - 1, before))
        return Excerpt(tuple(shown), _width(text[:first].ljust(first)), max(1, _width(text[first:last])))

    def _lines_of(self, file: str) -> tuple[str, ...]:
        if file not in self._lines:
            self._lines[file] = _read_lines(file)
        return self._lines[file]


def shown_path(file: str) -> str:
    """A path as it is shown: from the working directory, where the file lies in it."""
    path = Path(file)
    if not path.is_absolute():
        return file
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the working directory is gone
        return file


def _read_lines(file: str) -> tuple[str, ...]:
    """The lines of a file; none if it cannot be read as text: its findings are shown without."""
    path = Path(file)
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return ()
        return tuple(LINE_BREAK.split(path.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError):
        return ()


def _window(line: str, place: int) -> tuple[int, str]:
    """Where the shown part of a line begins, and its text, with dots where the line goes on."""
    if len(line) <= MAX_WIDTH:
        return 0, line
    start = max(0, min(place - _MARGIN, len(line) - MAX_WIDTH))
    stop = start + MAX_WIDTH
    return start, (_CUT if start else "") + line[start:stop] + (_CUT if stop < len(line) else "")


def _width(text: str) -> int:
    """Terminal columns that ``text`` takes once printed."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)
