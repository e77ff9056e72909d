"""From the text of a plan to plain data, with the place of everything.

YAML by PyYAML's event stream (it carries the mark of every event, also of
aliases), scalars by the YAML 1.2 core schema: ``yes`` and ``on`` are strings,
``010`` is ten, ``1e-3`` is a number. JSON is YAML and goes the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import yaml
from yaml.events import AliasEvent, Event, MappingEndEvent, MappingStartEvent, ScalarEvent, SequenceEndEvent
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.scanner import Scanner

from pipeproof.specs.problems import KeyPath, describe_value, shortened
from pipeproof.specs.source import LINE_BREAK, SourceMap, Span

MAX_DEPTH: Final = 32
"""Deepest nesting; a plan needs four levels."""

MAX_NODES: Final = 200_000
"""Most values in a plan, with every alias counted as what it stands for."""

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_MAX_DIGITS: Final = 1000


@dataclass(frozen=True, slots=True)
class TextProblem:
    """Something wrong with the text itself: PP101 (syntax), PP103 (a key twice) or PP106 (an endless number)."""

    code: str
    span: Span
    message: str
    help: str | None = None


class _TextError(Exception):
    def __init__(self, problem: TextProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Tree:
    """The data of a text (None for an empty one) with its places, or the problems found in it.

    After a syntax error ``data`` is None and ``complete`` False; a duplicate
    key leaves the first value in place.
    """

    data: object
    source: SourceMap
    problems: tuple[TextProblem, ...]
    complete: bool


def parse_text(text: str, file: str) -> Tree:
    """Read a YAML or JSON text. Never raises: whatever is wrong is in ``problems``."""
    source = SourceMap(file, tuple(LINE_BREAK.split(text)))
    builder: _Builder | None = None
    last: TextProblem
    try:
        builder = _Builder(_Events(text), source)
        data = builder.document()
    except _TextError as error:
        last = error.problem
    except ReaderError as error:
        last = _unprintable(text, error)
    except yaml.MarkedYAMLError as error:
        last = _syntax_problem(error)
    except ValueError:  # PyYAML's scanner turns the digits of escapes and versions into numbers unchecked
        last = _number_problem(builder)
    else:
        return Tree(data, source, tuple(builder.problems), complete=True)
    earlier = builder.problems if builder is not None else []
    return Tree(None, source, (*earlier, last), complete=False)


class _Events(Reader, Scanner, Parser):
    """PyYAML's event stream, with tabs accepted between the tokens of a flow collection, as JSON files have them."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)

    def scan_to_next_token(self) -> None:
        """Skip what may stand between two tokens."""
        super().scan_to_next_token()
        while self.flow_level and self.peek() == "\t":
            self.forward()
            super().scan_to_next_token()


@dataclass(frozen=True, slots=True)
class _Anchored:
    data: object
    num_nodes: int


class _Builder:
    """Builds data from events, and notes the span of every key and value on the way."""

    def __init__(self, events: _Events, source: SourceMap) -> None:
        self._events = events
        self._source = source
        self._anchors: dict[str, _Anchored | None] = {}
        self._num_nodes = 0
        self.problems: list[TextProblem] = []

    def document(self) -> object:
        """The data of the only document; None for a text without one."""
        self._next()  # stream start
        if isinstance(self._events.peek_event(), yaml.StreamEndEvent):
            return None
        self._next()  # document start
        data = self._node((), depth=0, key_span=None)
        self._next()  # document end
        event = self._next()
        if not isinstance(event, yaml.StreamEndEvent):
            raise _refusal(
                _span(event),
                "a second document begins here, and a plan is one",
                help="remove the line `---`, or keep each plan in a file of its own",
            )
        return data

    @property
    def place(self) -> Span:
        """Where reading has come to."""
        mark = self._events.get_mark()
        return Span(mark.line + 1, mark.column + 1, None)

    def _next(self) -> Event:
        event = self._events.get_event()
        assert event is not None
        return event

    def _node(self, path: KeyPath, *, depth: int, key_span: Span | None) -> object:
        event = self._next()
        if depth > MAX_DEPTH:
            raise _refusal(_span(event), f"more than {MAX_DEPTH} levels of nesting; a plan has four")
        self._count(1, event)
        if isinstance(event, AliasEvent):
            self._source.values[path] = _span(event)
            return self._alias(event)
        if event.tag is not None:
            raise _refusal(_span(event), f"the tag `{shortened(event.tag)}` has no meaning in a plan", help="remove it")
        first = self._num_nodes
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        data = self._value(event, path, depth, key_span)
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(data, self._num_nodes - first + 1)
        return data

    def _value(self, event: Event, path: KeyPath, depth: int, key_span: Span | None) -> object:
        if isinstance(event, ScalarEvent):
            span = _span(event)
            empty = event.start_mark.index == event.end_mark.index and key_span is not None
            self._source.values[path] = key_span if empty and key_span else span
            return self._scalar(event)
        self._source.values[path] = _span(event)
        if isinstance(event, MappingStartEvent):
            return self._mapping(event, path, depth)
        return self._sequence(event, path, depth)

    def _mapping(self, start: Event, path: KeyPath, depth: int) -> dict[str, object]:
        data: dict[str, object] = {}
        while not isinstance(self._events.peek_event(), MappingEndEvent):
            key, span = self._key()
            inner = (*path, key)
            if key in data:
                first = self._source.keys[inner]
                self.problems.append(
                    TextProblem(
                        "PP103",
                        span,
                        f"the key `{shortened(key)}` stands here again; it is on line {first.line} already",
                        help="remove one of the two",
                    )
                )
                self._forgotten_value(inner, depth)
            else:
                self._source.keys[inner] = span
                data[key] = self._node(inner, depth=depth + 1, key_span=span)
        self._close(start, self._next(), path)
        return data

    def _forgotten_value(self, path: KeyPath, depth: int) -> None:
        """Read past the value of a duplicate key; the places of the first one stay."""
        kept, self._source = self._source, SourceMap(self._source.file, ())
        self._node(path, depth=depth + 1, key_span=None)
        self._source = kept

    def _sequence(self, start: Event, path: KeyPath, depth: int) -> list[object]:
        data: list[object] = []
        while not isinstance(self._events.peek_event(), SequenceEndEvent):
            data.append(self._node((*path, len(data)), depth=depth + 1, key_span=None))
        self._close(start, self._next(), path)
        return data

    def _close(self, start: Event, end: Event, path: KeyPath) -> None:
        """Give a collection that is written in brackets on one line its end."""
        if start.flow_style and start.start_mark.line == end.end_mark.line:
            opening = _span(start)
            self._source.values[path] = Span(opening.line, opening.column, end.end_mark.column)

    def _key(self) -> tuple[str, Span]:
        event = self._next()
        if isinstance(event, AliasEvent):
            target = self._alias(event)
            if isinstance(target, str):
                return target, _span(event)
        if not isinstance(event, ScalarEvent):
            raise _refusal(_span(event), "a key must be a name", help="remove the `?`, or quote the key")
        if event.tag is not None:
            raise _refusal(_span(event), f"the tag `{shortened(event.tag)}` has no meaning in a plan", help="remove it")
        key = _joined_surrogates(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = _Anchored(key, 1)
        return key, _span(event)

    def _alias(self, event: AliasEvent) -> object:
        if event.anchor not in self._anchors:
            raise _refusal(
                _span(event),
                f"the alias `*{shortened(event.anchor)}` has no anchor before it",
                help=f"mark the value to repeat with `&{shortened(event.anchor)}`, or quote the text",
            )
        anchored = self._anchors[event.anchor]
        if anchored is None:
            raise _refusal(_span(event), f"the alias `*{shortened(event.anchor)}` stands inside its own value")
        self._count(anchored.num_nodes - 1, event)
        return anchored.data

    def _count(self, num_nodes: int, event: Event) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            raise _refusal(_span(event), f"more than {MAX_NODES} values, with aliases counted as what they stand for")

    def _scalar(self, event: ScalarEvent) -> object:
        """A scalar by the core schema of YAML 1.2 (chapter 10.3.2); quoted ones are strings."""
        text = _joined_surrogates(event)
        if not event.implicit[0]:
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text):
            if len(text) > _MAX_DIGITS:
                self.problems.append(TextProblem("PP106", _span(event), f"a number of {len(text)} digits"))
                return 0
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if _FLOAT.fullmatch(text) or _SPECIAL_FLOAT.fullmatch(text):
            return float(re.sub(r"\.(?=[inIN])", "", text))
        return text


def _joined_surrogates(event: ScalarEvent) -> str:
    r"""The text of a scalar; JSON writes characters beyond U+FFFF as two escapes, which PyYAML leaves apart."""
    text: str = event.value
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        shown = describe_value(text.encode("ascii", "replace").decode())
        raise _refusal(_span(event), f"half of a character in the {shown}") from None


def _span(event: Event) -> Span:
    start, end = event.start_mark, event.end_mark
    same_line = end is not None and start.line == end.line and end.column > start.column
    return Span(start.line + 1, start.column + 1, end.column if same_line else None)


def _refusal(span: Span, message: str, *, help: str | None = None) -> _TextError:
    return _TextError(TextProblem("PP101", span, message, help))


_HELP_BY_SIGN = (
    (r"'\t'", "write spaces: outside quotes and brackets a plan may have no tabs"),
    ("mapping values are not allowed here", "quote a text that has a colon in it, or check the indentation"),
    ("could not find expected ':'", "a key is followed by a colon and a space"),
    ("expected ',' or '}'", "close the brace, or put a comma between the entries"),
    ("expected ',' or ']'", "close the bracket, or put a comma between the entries"),
    ("while scanning a quoted scalar", "close the quote"),
)


def _syntax_problem(error: yaml.MarkedYAMLError) -> TextProblem:
    mark = error.problem_mark or error.context_mark
    parts = [part for part in (error.problem, error.context) if part]
    message = ", ".join(parts) or "the text cannot be read"
    if error.context_mark is not None and error.context_mark.line != mark.line:
        message += f" that begins on line {error.context_mark.line + 1}"
    help = next((text for sign, text in _HELP_BY_SIGN if sign in message), None)
    return TextProblem("PP101", Span(mark.line + 1, mark.column + 1, None), f"not valid YAML: {message}", help)


def _number_problem(builder: _Builder | None) -> TextProblem:
    span = builder.place if builder is not None else Span(1, 1, None)
    return TextProblem("PP101", span, "not valid YAML: an escape or a version number is out of range")


def _unprintable(text: str, error: ReaderError) -> TextProblem:
    before = LINE_BREAK.split(text[: error.position])
    return TextProblem(
        "PP101",
        Span(len(before), len(before[-1]) + 1, None),
        f"the control character U+{ord(text[error.position]):04X} may not stand in YAML",
        help="remove it, or write it as an escape inside double quotes",
    )
