"""PyYAML's parser as a stream of typed events; all problems of the text are one kind of error.

Events are used because only they carry the mark of every alias.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import yaml
from yaml import events
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.scanner import Scanner

from pipeproof.diagnostics.finding import Finding, Location, Severity
from pipeproof.diagnostics.problems import describe_value
from pipeproof.diagnostics.source import LINE_BREAK


class TextError(Exception):
    """A problem, PP101, after which the text cannot be read further."""

    def __init__(self, location: Location, message: str, help: str | None = None) -> None:
        super().__init__(message)
        self.problem = Finding("PP101", Severity.ERROR, message, location, help)


class EventKind(Enum):
    """Kind of a part of a YAML text."""

    DOCUMENT = auto()
    STREAM_END = auto()
    MAPPING = auto()
    SEQUENCE = auto()
    END = auto()
    """The end of a mapping, a sequence or a document."""
    SCALAR = auto()
    ALIAS = auto()


@dataclass(frozen=True, slots=True)
class TextEvent:
    """One part of a YAML text.

    ``text`` is that of a scalar. ``plain`` is True for a scalar without quotes
    that is not a block, so that it may be a number or a boolean; ``brackets``
    for a collection in flow style; ``empty`` for a scalar without characters.
    """

    kind: EventKind
    location: Location
    text: str = ""
    plain: bool = False
    brackets: bool = False
    empty: bool = False
    anchor: str = ""
    tag: str | None = None


_KINDS: tuple[tuple[type[events.Event], EventKind], ...] = (
    (events.DocumentStartEvent, EventKind.DOCUMENT),
    (events.StreamEndEvent, EventKind.STREAM_END),
    (events.MappingStartEvent, EventKind.MAPPING),
    (events.SequenceStartEvent, EventKind.SEQUENCE),
    (events.CollectionEndEvent, EventKind.END),
    (events.DocumentEndEvent, EventKind.END),
    (events.ScalarEvent, EventKind.SCALAR),
    (events.AliasEvent, EventKind.ALIAS),
)


class EventStream:
    """The events of a text in order; every method raises ``TextError`` for invalid text."""

    def __init__(self, text: str, file: str) -> None:
        self._file = file
        try:
            self._parser: Any = _PyYamlParser(text)
        except ReaderError as error:
            raise _unprintable(text, error, file) from error
        self._ahead: TextEvent | None = None
        self._raw()  # the start of the stream carries no data

    def peek(self) -> TextEvent:
        """Return the next event without consuming it."""
        if self._ahead is None:
            self._ahead = _typed(self._raw(), self._file)
        return self._ahead

    def next(self) -> TextEvent:
        """Return and consume the next event."""
        event, self._ahead = self.peek(), None
        return event

    def _raw(self) -> Any:
        try:
            return self._parser.get_event()
        except yaml.MarkedYAMLError as error:
            raise _syntax_error(error, self._file) from error
        except (
            ValueError,
            OverflowError,
        ) as error:  # the scanner turns digits of escapes and versions into numbers unchecked
            mark = self._parser.get_mark()
            location = Location(self._file, mark.line + 1, mark.column + 1)
            raise TextError(location, "not valid YAML: an escape or a version number is out of range") from error


class _PyYamlParser(Reader, Scanner, Parser):
    """PyYAML's parser; between the tokens of a flow collection it accepts tabs, as JSON files have them."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)

    def scan_to_next_token(self) -> None:
        """Skip white space, comments and line breaks between two tokens."""
        super().scan_to_next_token()
        while self.flow_level and self.peek() == "\t":
            self.forward()
            super().scan_to_next_token()


def _typed(event: Any, file: str) -> TextEvent:
    kind = next(kind for event_type, kind in _KINDS if isinstance(event, event_type))
    start, end = event.start_mark, event.end_mark
    same_line = start.line == end.line and end.column > start.column
    location = Location(file, start.line + 1, start.column + 1, end.column if same_line else None)
    is_scalar = kind is EventKind.SCALAR
    return TextEvent(
        kind,
        location,
        text=_joined_surrogates(event.value, location) if is_scalar else "",
        plain=is_scalar and event.implicit[0],
        brackets=kind in (EventKind.MAPPING, EventKind.SEQUENCE) and bool(event.flow_style),
        empty=is_scalar and start.index == end.index,
        anchor=getattr(event, "anchor", None) or "",
        tag=getattr(event, "tag", None),
    )


def _joined_surrogates(text: str, location: Location) -> str:
    r"""``text`` with surrogate pairs joined: JSON has two escapes for a character beyond U+FFFF, PyYAML two halves."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        shown = describe_value(text.encode("ascii", "replace").decode())
        raise TextError(location, f"half of a character in the {shown}") from error


_HELP_BY_SIGN = (
    (r"'\t'", "write spaces: outside quotes and brackets a plan may have no tabs"),
    ("mapping values are not allowed here", "quote a text that has a colon in it, or check the indentation"),
    ("could not find expected ':'", "a key is followed by a colon and a space"),
    ("expected ',' or '}'", "close the brace, or put a comma between the entries"),
    ("expected ',' or ']'", "close the bracket, or put a comma between the entries"),
    ("while scanning a quoted scalar", "close the quote"),
)


def _syntax_error(error: yaml.MarkedYAMLError, file: str) -> TextError:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark is not None else (0, 0)
    message = ", ".join(part for part in (error.problem, error.context) if part) or "the text cannot be read"
    if error.context_mark is not None and error.context_mark.line != line:
        message += f" that begins on line {error.context_mark.line + 1}"
    fix = next((text for sign, text in _HELP_BY_SIGN if sign in message), None)
    return TextError(Location(file, line + 1, column + 1), f"not valid YAML: {message}", fix)


def _unprintable(text: str, error: ReaderError, file: str) -> TextError:
    before = LINE_BREAK.split(text[: error.position])
    return TextError(
        Location(file, len(before), len(before[-1]) + 1),
        f"the control character U+{ord(text[error.position]):04X} is not allowed in YAML",
        help="remove it, or write it as an escape inside double quotes",
    )
