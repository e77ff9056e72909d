"""The text of an input file: reading it, the position of every key and value, and the lines that a finding shows."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from pipeproof.diagnostics.finding import BadPlanError, Finding, Location, Severity
from pipeproof.diagnostics.problems import KeyPath, nearest_name
from pipeproof.foreign_text import open_foreign, read_foreign

LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Line breaks as PyYAML counts them: line numbers agree with its marks."""

MAX_BYTES = 2**20
"""Largest plan file."""

MAX_WIDTH = 160
"""Longest line that is shown whole, in characters. Of a longer line, a part around the location is shown."""

_MARGIN = 40
"""Characters that are kept before the location in a shortened line."""

_ELLIPSIS = "..."
_MAX_EXCERPT_BYTES = 2**26
"""Largest file that is opened to show a line of it."""


@dataclass(frozen=True)
class SourceMap:
    """A file name as it was given, the lines of the text, and locations by key path.

    ``values`` has every value, list items included; ``keys`` every key of a
    mapping. Values below an alias have no location of their own: the alias has.
    """

    file: str
    lines: tuple[str, ...]
    values: dict[KeyPath, Location] = field(default_factory=dict)
    keys: dict[KeyPath, Location] = field(default_factory=dict)

    def locate(self, path: KeyPath, *, key: bool = False) -> Location:
        """Return the location of the value at ``path``, or with ``key`` of the key itself.

        A path that is not in the file (a missing key, a default) has the
        location of its nearest parent in the file.
        """
        location = (self.keys if key else self.values).get(path) or self.values.get(path)
        if location is not None:
            return location
        return self.locate(path[:-1], key=key) if path else Location(self.file)


class PlanFileError(BadPlanError):
    """An input file that cannot be loaded, with its text for the findings to show (None if there is none)."""

    def __init__(self, *findings: Finding, source: SourceMap | None = None) -> None:
        super().__init__(*findings)
        self.source = source


class UnreadableTextError(Exception):
    """A file that cannot be read as UTF-8 text: message, location in the file if there is one, and suggested fix."""

    def __init__(self, message: str, location: Location | None = None, help: str | None = None) -> None:
        super().__init__(message)
        self.message, self.location, self.help = message, location, help


def read_text(name: str) -> str:
    """Return the text of a plan file, or of a similar file, without its byte order mark.

    Raises:
        PlanFileError: PP100.
    """
    try:
        return read_utf8(name, MAX_BYTES, "plan")
    except UnreadableTextError as error:
        raise PlanFileError(Finding("PP100", Severity.ERROR, error.message, error.location, error.help)) from None


def read_utf8(name: str, max_bytes: int, kind: str) -> str:
    """Return the text of a file of at most ``max_bytes`` without its byte order mark; ``kind`` is for the message.

    Raises:
        UnreadableTextError: the file cannot be opened, is too large or is not UTF-8.
    """
    try:
        with open_foreign(Path(name)) as stream:
            content = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"cannot read `{name}`: {reason[:1].lower()}{reason[1:]}"
        raise UnreadableTextError(message, help=_help_for(Path(name), error)) from error
    if len(content) > max_bytes:
        raise UnreadableTextError(f"`{name}` has more than {max_bytes} bytes, which no {kind} needs")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = LINE_BREAK.split(content[: error.start].decode("utf-8-sig"))
        raise UnreadableTextError(
            f"byte 0x{content[error.start]:02x} is not UTF-8 text",
            Location(name, len(before), len(before[-1]) + 1),
            help="save the file as UTF-8",
        ) from error


def _help_for(path: Path, error: Exception) -> str | None:
    if isinstance(error, IsADirectoryError):
        return "name a file in it"
    if isinstance(error, PermissionError):
        return "give this user permission to read it"
    if not isinstance(error, FileNotFoundError):
        return None
    try:
        near = nearest_name(path.name, sorted(entry.name for entry in path.parent.iterdir() if entry.is_file()))
    except OSError:
        near = None
    return f"did you mean `{path.with_name(near)}`?" if near else "name an existing file, relative to this directory"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of a file with their numbers; the last one has the location, and a range of it is marked.

    ``indent`` and ``marked`` are terminal columns: before the marked range of
    the last shown line, and of the range.
    """

    lines: tuple[tuple[int, str], ...]
    indent: int
    marked: int


class Sources:
    """Texts by file name: the plan's, if there is one, and others, which are read on demand."""

    def __init__(self, source: SourceMap | None) -> None:
        self._lines: dict[str, tuple[str, ...]] = {} if source is None else {source.file: source.lines}

    def excerpt(self, location: Location) -> Excerpt | None:
        """Return the line of the location and the one before it; None if the file cannot be shown or is shorter."""
        lines = self._lines_of(location.file)
        if not 1 <= location.line <= len(lines):
            return None
        line = lines[location.line - 1]
        start, text = _window(line, location.column - 1)
        cut = len(_ELLIPSIS) if start else 0
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


def _read_lines(file: str) -> tuple[str, ...]:
    """The lines of a file; none if it cannot be read as text: its findings are shown without an excerpt."""
    try:
        return tuple(LINE_BREAK.split(read_foreign(Path(file), _MAX_EXCERPT_BYTES).decode("utf-8-sig")))
    except (OSError, ValueError):
        return ()


def _window(line: str, column: int) -> tuple[int, str]:
    """The start of the shown part of a line, and its text, with dots where the line continues."""
    if len(line) <= MAX_WIDTH:
        return 0, line
    start = max(0, min(column - _MARGIN, len(line) - MAX_WIDTH))
    stop = start + MAX_WIDTH
    return start, (_ELLIPSIS if start else "") + line[start:stop] + (_ELLIPSIS if stop < len(line) else "")


def _width(text: str) -> int:
    """Terminal columns of a printed text."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)
