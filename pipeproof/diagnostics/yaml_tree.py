"""Parser of a plan's text to plain data, with the position of every key and value.

Scalars follow the core schema of YAML 1.2: ``yes`` and ``on`` are strings,
``010`` is ten, ``1e-3`` is a number. JSON is YAML and goes the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from yaml import events
from yaml.parser import Parser
from yaml.reader import Reader, ReaderError
from yaml.scanner import Scanner, ScannerError

from pipeproof.diagnostics.finding import Finding, Location, Severity
from pipeproof.diagnostics.problems import KeyPath, describe_value, dotted, shortened
from pipeproof.diagnostics.source import LINE_BREAK, SourceMap


class _TextError(Exception):
    """A problem, PP101, after which the text cannot be read further."""

    def __init__(self, location: Location, message: str, help: str | None = None) -> None:
        super().__init__(message)
        self.problem = _problem(location, message, help)


def _problem(location: Location, message: str, help: str | None) -> Finding:
    return Finding("PP101", Severity.ERROR, message, location, help)


class _PyYamlParser(Reader, Scanner, Parser):
    """PyYAML's parser of a text to events, because only they carry the mark of every alias.

    Between the tokens of a flow collection it accepts tabs, as JSON files have them.
    """

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

    def fetch_more_tokens(self) -> None:
        """Read the next tokens; digits of escapes and versions become numbers unchecked."""
        try:
            super().fetch_more_tokens()
        except (ValueError, OverflowError) as error:
            problem = "an escape or a version number is out of range"
            raise ScannerError(problem=problem, problem_mark=self.get_mark()) from error


_HELP_BY_SIGN = (
    (r"'\t'", "write spaces: outside quotes and brackets a plan may have no tabs"),
    ("mapping values are not allowed here", "quote a text that has a colon in it, or check the indentation"),
    ("could not find expected ':'", "a key is followed by a colon and a space"),
    ("expected ',' or '}'", "close the brace, or put a comma between the entries"),
    ("expected ',' or ']'", "close the bracket, or put a comma between the entries"),
    ("while scanning a quoted scalar", "close the quote"),
)


def _syntax_error(error: yaml.MarkedYAMLError, file: str) -> Finding:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark is not None else (0, 0)
    message = ", ".join(part for part in (error.problem, error.context) if part) or "the text cannot be read"
    if error.context_mark is not None and error.context_mark.line != line:
        message += f" that begins on line {error.context_mark.line + 1}"
    fix = next((text for sign, text in _HELP_BY_SIGN if sign in message), None)
    return _problem(Location(file, line + 1, column + 1), f"not valid YAML: {message}", fix)


def _unprintable(text: str, error: ReaderError, file: str) -> Finding:
    before = LINE_BREAK.split(text[: error.position])
    location = Location(file, len(before), len(before[-1]) + 1)
    message = f"the control character U+{ord(text[error.position]):04X} is not allowed in YAML"
    return _problem(location, message, "remove it, or write it as an escape inside double quotes")


MAX_DEPTH: Final = 32
"""Deepest nesting; a plan needs four levels."""

MAX_NODES: Final = 50_000
"""Most values in a plan; an alias counts as many as its anchor has."""

_MAX_DIGITS: Final = 1000
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_CONSTANTS: Final = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


@dataclass(frozen=True, slots=True)
class Tree:
    """The data of a text (None for an empty one) with positions and problems.

    Problems are of the text itself: PP101 (syntax), PP103 (a key twice), PP106
    (a number with too many digits). ``complete`` is False after a syntax error,
    and ``data`` then None; a duplicate key leaves the first value in place.
    """

    data: object
    source: SourceMap
    problems: tuple[Finding, ...]
    complete: bool


def parse_text(text: str, file: str) -> Tree:
    """Parse a YAML or JSON text. It never raises: all problems are in ``problems``."""
    source = SourceMap(file, tuple(LINE_BREAK.split(text)))
    problems: list[Finding] = []
    try:
        data = _Builder(_PyYamlParser(text), source, problems).document()
        return Tree(data, source, tuple(problems), complete=True)
    except ReaderError as error:
        problem = _unprintable(text, error, file)
    except yaml.MarkedYAMLError as error:
        problem = _syntax_error(error, file)
    except _TextError as error:
        problem = error.problem
    return Tree(None, source, (*problems, problem), complete=False)


_MOST_PROBLEMS = 5
_Model = TypeVar("_Model", bound=BaseModel)


def read_model(
    tree: Tree, model: type[_Model], kind: str, finding: Callable[[str, Location | None], Finding]
) -> _Model | list[Finding]:
    """Return the content of a file that is a mapping of keys, or its problems; ``kind``, such as ``a profile``."""
    if tree.problems:
        return [finding(problem.message, problem.location) for problem in tree.problems]
    source = tree.source
    if not isinstance(tree.data, dict):
        value = "nothing" if tree.data is None else describe_value(tree.data)
        return [finding(f"{kind} is a mapping of keys, found {value}", source.locate(()))]
    try:
        return model.model_validate(tree.data)
    except ValidationError as error:
        details = error.errors(include_url=False)
    findings = []
    for detail in details[:_MOST_PROBLEMS]:
        path, message = detail["loc"], detail["msg"]
        name = dotted(path) if path else source.file
        findings.append(finding(f"`{name}`: {message[:1].lower()}{message[1:]}", source.locate(path)))
    if len(details) > len(findings):
        findings.append(finding(f"{len(details) - len(findings)} more problems of this kind", source.locate(())))
    return findings


@dataclass(frozen=True, slots=True)
class _Anchored:
    data: object
    num_nodes: int


class _Builder:
    """Builder of data from events that also records locations and problems."""

    def __init__(self, parser: Any, source: SourceMap, problems: list[Finding]) -> None:
        self._parser = parser
        self._file = source.file
        self._source = source
        self._problems = problems
        self._anchors: dict[str, _Anchored | None] = {}
        self._num_nodes = 0

    def document(self) -> object:
        """Return the data of the only document; None for a text without one."""
        self._parser.get_event()  # the start of the stream
        if isinstance(self._parser.get_event(), events.StreamEndEvent):
            return None
        data = self._node((), depth=0, key_location=None)
        self._parser.get_event()  # the end of the document
        event = self._parser.get_event()
        if not isinstance(event, events.StreamEndEvent):
            fix = "remove the line `---`, or keep each plan in a file of its own"
            raise _TextError(self._location(event), "a second document begins here, and a plan is one", fix)
        return data

    def _node(self, path: KeyPath, *, depth: int, key_location: Location | None) -> object:
        event = self._parser.get_event()
        location = self._location(event)
        if depth > MAX_DEPTH:
            raise _TextError(location, f"more than {MAX_DEPTH} levels of nesting; a plan has four")
        self._count(1, event)
        # An empty value has no characters: findings point at its key.
        is_empty = event.start_mark.index == event.end_mark.index and isinstance(event, events.ScalarEvent)
        self._source.values[path] = key_location if is_empty and key_location is not None else location
        if isinstance(event, events.AliasEvent):
            return self._alias(event)
        self._refuse_tag(event)
        first = self._num_nodes
        if event.anchor:
            self._anchors[event.anchor] = None  # until its value is complete
        data = self._value(event, path, depth)
        if event.anchor:
            self._anchors[event.anchor] = _Anchored(data, self._num_nodes - first + 1)
        return data

    def _value(self, event: Any, path: KeyPath, depth: int) -> object:
        if isinstance(event, events.MappingStartEvent):
            return self._mapping(event, path, depth)
        if isinstance(event, events.SequenceStartEvent):
            return self._sequence(event, path, depth)
        return self._scalar(event)

    def _mapping(self, start: Any, path: KeyPath, depth: int) -> dict[str, object]:
        data: dict[str, object] = {}
        while not isinstance(self._parser.peek_event(), events.CollectionEndEvent):
            key, location = self._key()
            inner = (*path, key)
            if key in data:
                self._repeated_key(inner, location, depth)
            else:
                self._source.keys[inner] = location
                data[key] = self._node(inner, depth=depth + 1, key_location=location)
        self._close(start, self._parser.get_event(), path)
        return data

    def _repeated_key(self, path: KeyPath, location: Location, depth: int) -> None:
        """Report the key and skip its value; the positions of the first one stay."""
        first = self._source.keys[path]
        message = f"the key `{shortened(str(path[-1]))}` is repeated here; line {first.line} has it already"
        self._problems.append(Finding("PP103", Severity.ERROR, message, location, "remove one of the two"))
        source, self._source = self._source, SourceMap(self._source.file, ())
        self._node(path, depth=depth + 1, key_location=None)
        self._source = source

    def _sequence(self, start: Any, path: KeyPath, depth: int) -> list[object]:
        data: list[object] = []
        while not isinstance(self._parser.peek_event(), events.CollectionEndEvent):
            data.append(self._node((*path, len(data)), depth=depth + 1, key_location=None))
        self._close(start, self._parser.get_event(), path)
        return data

    def _close(self, start: Any, end: Any, path: KeyPath) -> None:
        """Set the end of a collection in brackets on one line."""
        first, last = self._location(start), self._location(end)
        if start.flow_style and first.line == last.line:
            self._source.values[path] = replace(first, end_column=last.end_column)

    def _key(self) -> tuple[str, Location]:
        event, key = self._parser.get_event(), ""
        self._count(1, event)
        if isinstance(event, events.AliasEvent):
            target = self._alias(event)
            key = target if isinstance(target, str) else ""
        elif isinstance(event, events.ScalarEvent):
            key = self._text(event)
            self._refuse_tag(event)
            if event.anchor:
                self._anchors[event.anchor] = _Anchored(key, 1)
        location = self._location(event)
        if not key:
            raise _TextError(location, "a key must be a name")
        return key, location

    def _alias(self, event: Any) -> object:
        name = shortened(event.anchor)
        if event.anchor not in self._anchors:
            fix = f"mark the value to repeat with `&{name}`, or quote the text"
            raise _TextError(self._location(event), f"the alias `*{name}` has no anchor before it", fix)
        anchored = self._anchors[event.anchor]
        if anchored is None:
            raise _TextError(self._location(event), f"the alias `*{name}` is inside its own value")
        self._count(anchored.num_nodes - 1, event)
        return anchored.data

    def _count(self, num_nodes: int, event: Any) -> None:
        self._num_nodes += num_nodes
        if self._num_nodes > MAX_NODES:
            raise _TextError(self._location(event), f"more than {MAX_NODES} values, with aliases expanded")

    def _scalar(self, event: Any) -> object:
        """Return the value of a scalar by the core schema (YAML 1.2, chapter 10.3.2)."""
        text = self._text(event)
        if not event.implicit[0]:  # in quotes, or a block
            return text
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INT.fullmatch(text):
            if len(text) > _MAX_DIGITS:
                message = f"a number of {len(text)} digits"
                self._problems.append(Finding("PP106", Severity.ERROR, message, self._location(event)))
                return 0
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if _FLOAT.fullmatch(text):
            return float(text)
        if _SPECIAL_FLOAT.fullmatch(text):
            return float(text.replace(".", "", 1))
        return text

    def _location(self, event: Any) -> Location:
        """Return the location of an event: its first line, up to its end if that is on the same one."""
        start, end = event.start_mark, event.end_mark
        same_line = start.line == end.line and end.column > start.column
        return Location(self._file, start.line + 1, start.column + 1, end.column if same_line else None)

    def _text(self, scalar: Any) -> str:
        r"""Return the text with surrogate pairs joined: JSON has two escapes for a character beyond U+FFFF."""
        text: str = scalar.value
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError as error:
            shown = describe_value(text.encode("ascii", "replace").decode())
            raise _TextError(self._location(scalar), f"half of a character in the {shown}") from error

    def _refuse_tag(self, event: Any) -> None:
        if event.tag is not None:
            shown = shortened(event.tag.replace("tag:yaml.org,2002:", "!!"))
            message = f"the tag `{shown}` has no meaning in a plan"
            raise _TextError(self._location(event), message, help="remove it")
