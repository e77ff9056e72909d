"""Files of statements: one per line, or YAML or JSON with the list ``aoa_statements``, as Paddle's ``aoa_config``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeproof.diagnostics.finding import Finding, Location
from pipeproof.diagnostics.problems import describe_value, listed, nearest_name
from pipeproof.diagnostics.source import LINE_BREAK, SourceMap
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.foreign_text import read_foreign
from pipeproof.state.aoa.statements import (
    CAST_TYPES,
    FUSED_KINDS,
    IDS,
    Cast,
    Fused,
    Name,
    Program,
    Statement,
    form_faults,
)
from pipeproof.state.state_codes import UNREADABLE, AoaError

# --- Strict parser for one statement: names, an arrow, names, attributes; see docs/aoa.md for the grammar ---


Locator = Callable[[int, int], Location]
"""Function from a range of characters in a statement to its location in the file."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+)|(?P<arrow>->)|(?P<comma>,)|(?P<equal>=)|(?P<open>\[)|(?P<close>\])|(?P<colon>:)
    |(?P<transpose>\^T(?![A-Za-z0-9._*$^]))|(?P<number>-?[0-9]+(?![A-Za-z0-9._]))|(?P<string>"[^"]*"|'[^']*')
    |(?P<name>[A-Za-z_][A-Za-z0-9._*$]*)""",
    re.VERBOSE,
)
_TAG = re.compile(r"\$(?!" + "|".join(re.escape(tag[1:]) for tag in IDS) + r")[A-Za-z_]*")
_HINTS = {
    "-": "the arrow is `->`",
    "$": "a name begins with a letter",
    "*": "a name begins with a letter; `*` is a number inside it",
    "^": "`^T` is allowed at the end of a name only",
    '"': "the quote is not closed",
    "'": "the quote is not closed",
    ";": "one statement per line",
    "#": "a comment ends the line",
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the text; ``kind`` is ``arrow``, ``name`` and so on, and ``end`` after the last one."""

    kind: str
    text: str
    start: int

    @property
    def stop(self) -> int:
        """Position after its last character."""
        return self.start + len(self.text)


def tokens_of(text: str, locate: Locator) -> list[Token]:
    """Return the tokens, with one of kind ``end`` after them.

    Raises:
        AoaError: PP180, a character that begins no token.
    """
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _unexpected(text, position, locate)
        kind = str(match.lastgroup)
        if kind == "name":
            _require_known_tags(match[0], position, locate)
        if kind != "space":
            tokens.append(Token(kind, match[0], position))
        position = match.end()
    return [*tokens, Token("end", "", len(text.rstrip()))]


def _unexpected(text: str, position: int, locate: Locator) -> AoaError:
    character = text[position]
    fix = _HINTS.get(character)
    if character.isdigit():
        fix = "a name begins with a letter, and digits are 0 to 9"
    return AoaError(UNREADABLE.finding(f"unexpected {character!r}", locate(position, position + 1), fix))


def _require_known_tags(name: str, start: int, locate: Locator) -> None:
    wrong = _TAG.search(name)
    if wrong is not None:
        location = locate(start + wrong.start(), start + wrong.end())
        choices = ", ".join(f"`{tag}`" for tag in IDS)
        raise AoaError(UNREADABLE.finding(f"`{wrong[0]}` is not a placeholder", location, f"known are {choices}"))


_NUMBERS = ("axis", "num_heads", "num_key_value_groups")
_TYPES = ("dtype", "src_dtype", "dst_dtype")
KEYS = (*_NUMBERS, *_TYPES, "permute")
"""Attributes that have a value; the fused ones have none."""
_ATTRIBUTES = (*KEYS, *FUSED_KINDS)
_DIMS = re.compile(r"\[\s*(?:[0-9]+(?:\s*,\s*[0-9]+)*)?\s*\]", re.ASCII)
_FORM = "a statement is NAMES -> NAMES, then its attributes: `A, B -> C, axis=1`"

_Values = dict[str, tuple[str, Token]]


def parse_statement(text: str, locate: Locator) -> Statement:
    """Parse the text of one statement.

    Raises:
        AoaError: PP180, with the location.
    """
    return _Parser(text, locate).statement()


class _Parser:
    def __init__(self, text: str, locate: Locator) -> None:
        self._locate = locate
        self._tokens = tokens_of(text, locate)
        self._next = 0

    def statement(self) -> Statement:
        left = self._names()
        self._take("arrow", "`->`")
        right = self._names()
        attributes = self._attributes()
        location = self._locate(self._tokens[0].start, self._tokens[-1].start)
        statement = self._statement_of(attributes, left, right, location)
        problems = list(form_faults(statement))
        if problems:
            raise AoaError(*problems)
        return statement

    def _names(self) -> tuple[Name, ...]:
        names = [self._name()]
        while self._peek().kind == "comma" and not self._is_attribute(1):
            self._next += 1
            names.append(self._name())
        return tuple(names)

    def _name(self) -> Name:
        token = self._take("name", "a name")
        if token.text in _ATTRIBUTES:
            raise self._error(f"`{token.text}` is an attribute, and a name is needed here", token, _FORM)
        text, stop, transposed, numbers = token.text, token.stop, False, None
        if self._peek().kind == "transpose" and self._peek().start == stop:
            stop, transposed = self._take("transpose", "^T").stop, True
        elif self._peek().kind == "open":
            numbers, stop = self._range(token)
        return Name(text, transposed, numbers, self._locate(token.start, stop))

    def _range(self, name: Token) -> tuple[tuple[int, int], int]:
        self._take("open", "`[`")
        start = self._take("number", "a number")
        self._take("colon", "`:`")
        stop = self._take("number", "a number")
        close = self._take("close", "`]`")
        if not 0 <= int(start.text) < int(stop.text):
            message = f"`{name.text}[{start.text}:{stop.text}]` matches no names"
            raise self._error(message, name, "`NAME[0:4]` stands for NAME_0, NAME_1, NAME_2 and NAME_3")
        return (int(start.text), int(stop.text)), close.stop

    def _is_attribute(self, ahead: int) -> bool:
        token = self._peek(ahead)
        return token.kind == "name" and (token.text in _ATTRIBUTES or self._peek(ahead + 1).kind == "equal")

    def _attributes(self) -> _Values:
        values: _Values = {}
        while self._peek().kind == "comma":
            self._next += 1
            token = self._take("name", "an attribute")
            if token.text in values:
                raise self._error(f"`{token.text}` is repeated", token, "remove one of the two")
            if token.text in FUSED_KINDS:
                values[token.text] = ("", token)
                continue
            if self._peek().kind != "equal" and token.text not in KEYS:
                raise self._error(f"the name `{token.text}` comes after attributes", token, _FORM)
            if token.text not in KEYS:
                near = nearest_name(token.text, _ATTRIBUTES)
                fix = f"did you mean `{near}`?" if near else f"known are {listed(_ATTRIBUTES, 'and')}"
                raise self._error(f"unknown attribute `{token.text}`", token, fix)
            self._take("equal", f"`=` after `{token.text}`")
            values[token.text] = (self._value(token.text), token)
        if self._peek().kind != "end":
            raise self._error(f"unexpected `{self._peek().text}`", self._peek(), _FORM)
        return values

    def _value(self, key: str) -> str:
        token = self._peek()
        self._next += 1
        if key in _NUMBERS:
            least = 0 if key == "axis" else 1
            if token.kind != "number" or int(token.text) < least:
                fix = "axes are counted from 0; there are none from the end" if key == "axis" else None
                message = f"`{key}` is a number from {least} on, found `{token.text}`"
                raise self._error(message, token, fix)
            return token.text
        inside = token.text[1:-1]
        if key == "permute":
            is_good = token.kind == "string" and _DIMS.fullmatch(inside)
            if not is_good or sorted(dims_of(inside)) != list(range(len(dims_of(inside)))):
                fix = 'permute="[2, 0, 1]" makes dim 0 of what was dim 2; permute="[]" reverses the dims'
                raise self._error(f"`permute` is a string with each dim once, found `{token.text}`", token, fix)
        elif token.kind != "string" or inside not in CAST_TYPES:
            raise self._error(f"`{key}` is a string, one of {listed(CAST_TYPES)}, found `{token.text}`", token)
        return inside

    def _statement_of(
        self, values: _Values, left: tuple[Name, ...], right: tuple[Name, ...], location: Location
    ) -> Statement:
        kinds = [kind for kind in values if kind in FUSED_KINDS]
        if len(kinds) > 1:
            raise self._error(f"`{kinds[0]}` and `{kinds[1]}` in one statement", values[kinds[1]][1])
        for key in ("num_heads", "num_key_value_groups"):
            if key in values and (not kinds or kinds[0] == "fused_ffn"):
                raise self._error(f"`{key}` is of fused_qkv and fused_qkv_old alone", values[key][1])
            if key not in values and kinds and kinds[0] != "fused_ffn":
                raise self._error(f"`{kinds[0]}` needs `{key}`", values[kinds[0]][1])
        values_by_key = {key: text for key, (text, _) in values.items()}
        heads, groups = int(values_by_key.get("num_heads", 0)), int(values_by_key.get("num_key_value_groups", 0))
        if groups and heads % groups:
            message = f"{heads} heads do not divide into {groups} groups"
            raise self._error(message, values["num_key_value_groups"][1], "num_heads is of the queries")
        return Statement(
            left,
            right,
            int(values_by_key["axis"]) if "axis" in values_by_key else None,
            dims_of(values_by_key["permute"]) if "permute" in values_by_key else None,
            self._cast(values),
            Fused(kinds[0], heads, groups) if kinds else None,
            location,
        )

    def _cast(self, values: _Values) -> Cast | None:
        values_by_key = [key for key in _TYPES if key in values]
        if not values_by_key:
            return None
        if values_by_key == ["dtype"]:
            return Cast(values["dtype"][0])
        if values_by_key != ["src_dtype", "dst_dtype"]:
            message = "a cast has `dtype`, or `src_dtype` and `dst_dtype`"
            raise self._error(message, values[values_by_key[0]][1], 'write dtype="float32"')
        return Cast(values["dst_dtype"][0], values["src_dtype"][0])

    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._next + ahead, len(self._tokens) - 1)]

    def _take(self, kind: str, what: str) -> Token:
        token = self._peek()
        if token.kind != kind:
            found_text = f"`{token.text}`" if token.text else "the end"
            raise self._error(f"{what} is missing here, found {found_text}", token, _FORM)
        self._next += 1
        return token

    def _error(self, message: str, token: Token, fix: str | None = None) -> AoaError:
        return AoaError(UNREADABLE.finding(message, self._locate(token.start, max(token.stop, token.start + 1)), fix))


def dims_of(text: str) -> tuple[int, ...]:
    """Return the dims of a permutation as it is written."""
    return tuple(map(int, re.findall(r"[0-9]+", text)))


KEY = "aoa_statements"
MAX_BYTES = 2**26
"""Largest file of statements."""
_IS_CONFIG = re.compile(rf"(?:\s|#.*|---)*(?:\{{|['\"]?{KEY}['\"]?\s*:)")
_CONFIGS = (".yaml", ".yml", ".json")
_REVERSED = "aoa_config_reverse"


def read_file(path: Path) -> Program:
    """Return all statements of a file, at least one: only an empty list means that there are none.

    Raises:
        AoaError: PP180 and PP184; the file or a statement cannot be read, or there is no statement.
    """
    try:
        text = read_foreign(path, MAX_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise AoaError(UNREADABLE.finding(f"{path} is not UTF-8 text", None, "name a file of statements")) from error
    except OSError as error:
        fix = "name a file of statements; $LAYER_ID and $EXPERT_ID cover many tensors"
        raise AoaError(UNREADABLE.finding(f"{path} cannot be read: {error.strerror}", None, fix)) from error
    program = read_statements(text, str(path))
    if not program.statements and not _is_config(text, program.file):  # forgotten, or a command that failed wrote it
        fix = f"write one per line, `A -> B`; `{KEY}: []` keeps every tensor unchanged"
        raise AoaError(UNREADABLE.finding(f"{path} has no statement", None, fix))
    return program


def read_statements(text: str, file: str) -> Program:
    """Return all statements of a text; ``file`` is its name, for locations.

    Raises:
        AoaError: PP180 and PP184, for each statement that cannot be read.
    """
    findings: list[Finding] = []
    statements: list[Statement] = []
    for line, locate in _from_config(text, file) if _is_config(text, file) else _from_lines(text, file):
        try:
            statements.append(parse_statement(line, locate))
        except AoaError as error:
            findings += error.findings
    if findings:
        raise AoaError(*findings)
    return Program(tuple(statements), file)


def _is_config(text: str, file: str) -> bool:
    return _IS_CONFIG.match(text) is not None or Path(file).suffix.lower() in _CONFIGS


def _from_lines(text: str, file: str) -> Iterator[tuple[str, Locator]]:
    for number, line in enumerate(LINE_BREAK.split(text), 1):
        content = line.partition("#")[0]
        if content.strip():
            yield content, Location(file, number).part


def _from_config(text: str, file: str) -> Iterator[tuple[str, Locator]]:
    tree = parse_text(text, file)
    problems = [UNREADABLE.finding(problem.message, problem.location, problem.help) for problem in tree.problems]
    if problems or not isinstance(tree.data, Mapping) or KEY not in tree.data:
        keys = [f"`{key}`" for key in tree.data] if isinstance(tree.data, Mapping) else []
        message = f"{file} has no `{KEY}`" + (f", found {listed(keys, 'and')}" if keys else "")
        fix = f"write `{KEY}: [..]`; a file with a statement a line has another ending than {', '.join(_CONFIGS)}"
        raise AoaError(*problems or [UNREADABLE.finding(message, None, fix)])
    for key in tree.data:
        if key != KEY:
            fix = "remove it; `pipeproof state aoa --inverse` writes the inverse" if key == _REVERSED else "remove it"
            raise AoaError(UNREADABLE.finding(f"unknown key `{key}`", tree.source.locate((key,), key=True), fix))
    lines = tree.data.get(KEY)
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        wrong_type = describe_value(lines)
        if isinstance(lines, list):
            wrong_type = describe_value(next(line for line in lines if not isinstance(line, str)))
        message = f"`{KEY}` is a list of strings, found {wrong_type}"
        fix = f"write `{KEY}: ['A -> B']`"
        raise AoaError(UNREADABLE.finding(message, tree.source.locate((KEY,)), fix))
    for number, line in enumerate(lines):
        yield line, in_scalar(tree.source, tree.source.values[(KEY, number)], line)


def in_scalar(source: SourceMap, location: Location, text: str) -> Locator:
    """Return the locator for a YAML string, which may be quoted and have escapes."""
    column = source.lines[location.line - 1].find(text, location.column - 1)
    if column < 0:
        return lambda _start, _stop: location
    return Location(source.file, location.line, column + 1).part
