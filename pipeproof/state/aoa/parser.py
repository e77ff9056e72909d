"""One statement, read strictly: names, an arrow, names, attributes; see docs/aoa.md for the grammar."""

from __future__ import annotations

import re

from pipeproof.specs.finding import Location
from pipeproof.specs.problems import listed, nearest_name
from pipeproof.state.aoa.codes import NOT_READ, AoaError, fault
from pipeproof.state.aoa.forms import form_faults
from pipeproof.state.aoa.lexer import Placing, Token, tokens_of
from pipeproof.state.aoa.syntax import CAST_TYPES, FUSED_KINDS, Cast, Fused, Name, Statement

_NUMBERS = ("axis", "num_heads", "num_key_value_groups")
_TYPES = ("dtype", "src_dtype", "dst_dtype")
KEYS = (*_NUMBERS, *_TYPES, "permute")
"""Attributes that have a value; the fused ones have none."""
_DIMS = re.compile(r"\[\s*(?:[0-9]+(?:\s*,\s*[0-9]+)*)?\s*\]", re.ASCII)
_FORM = "a statement is NAMES -> NAMES, then its attributes: `A, B -> C, axis=1`"

_Values = dict[str, tuple[str, Token]]


def parse_statement(text: str, placing: Placing) -> Statement:
    """Read the text of one statement.

    Raises:
        AoaError: PP180, with the place.
    """
    return _Parser(text, placing).statement()


class _Parser:
    def __init__(self, text: str, placing: Placing) -> None:
        self._placing = placing
        self._tokens = tokens_of(text, placing)
        self._next = 0

    def statement(self) -> Statement:
        left = self._names()
        self._take("arrow", "`->`")
        right = self._names()
        attributes = self._attributes()
        place = self._placing(self._tokens[0].start, self._tokens[-1].start)
        statement = self._with(attributes, left, right, place)
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
        if token.text in (*KEYS, *FUSED_KINDS):
            raise self._error(f"`{token.text}` is an attribute, and stands where a name should", token, _FORM)
        text, stop, transposed, numbers = token.text, token.stop, False, None
        if self._peek().kind == "transpose" and self._peek().start == stop:
            stop, transposed = self._take("transpose", "^T").stop, True
        elif self._peek().kind == "open":
            numbers, stop = self._range(token)
        return Name(text, transposed, numbers, self._placing(token.start, stop))

    def _range(self, name: Token) -> tuple[tuple[int, int], int]:
        self._take("open", "`[`")
        start = self._take("number", "a number")
        self._take("colon", "`:`")
        stop = self._take("number", "a number")
        close = self._take("close", "`]`")
        if not 0 <= int(start.text) < int(stop.text):
            message = f"`{name.text}[{start.text}:{stop.text}]` stands for no names"
            raise self._error(message, name, "`NAME[0:4]` stands for NAME_0, NAME_1, NAME_2 and NAME_3")
        return (int(start.text), int(stop.text)), close.stop

    def _is_attribute(self, ahead: int) -> bool:
        token = self._peek(ahead)
        return token.kind == "name" and (token.text in (*KEYS, *FUSED_KINDS) or self._peek(ahead + 1).kind == "equal")

    def _attributes(self) -> _Values:
        values: _Values = {}
        while self._peek().kind == "comma":
            self._next += 1
            token = self._take("name", "an attribute")
            if token.text in values:
                raise self._error(f"`{token.text}` stands here again", token, "remove one of the two")
            if token.text in FUSED_KINDS:
                values[token.text] = ("", token)
                continue
            if self._peek().kind != "equal" and token.text not in KEYS:
                raise self._error(f"the name `{token.text}` stands after attributes", token, _FORM)
            if token.text not in KEYS:
                near = nearest_name(token.text, (*KEYS, *FUSED_KINDS))
                mend = f"did you mean `{near}`?" if near else f"known are {listed((*KEYS, *FUSED_KINDS), 'and')}"
                raise self._error(f"unknown attribute `{token.text}`", token, mend)
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
                mend = "axes are counted from 0; there are none from the end" if key == "axis" else None
                message = f"`{key}` is a number from {least} on, found `{token.text}`"
                raise self._error(message, token, mend)
            return token.text
        inside = token.text[1:-1]
        if key == "permute":
            is_good = token.kind == "string" and _DIMS.fullmatch(inside)
            if not is_good or sorted(dims_of(inside)) != list(range(len(dims_of(inside)))):
                mend = 'permute="[2, 0, 1]" makes dim 0 of what was dim 2; permute="[]" reverses the dims'
                raise self._error(f"`permute` is a string with each dim once, found `{token.text}`", token, mend)
        elif token.kind != "string" or inside not in CAST_TYPES:
            raise self._error(f"`{key}` is a string, one of {listed(CAST_TYPES)}, found `{token.text}`", token)
        return inside

    def _with(self, values: _Values, left: tuple[Name, ...], right: tuple[Name, ...], place: Location) -> Statement:
        kinds = [kind for kind in values if kind in FUSED_KINDS]
        if len(kinds) > 1:
            raise self._error(f"`{kinds[0]}` and `{kinds[1]}` in one statement", values[kinds[1]][1])
        for key in ("num_heads", "num_key_value_groups"):
            if key in values and (not kinds or kinds[0] == "fused_ffn"):
                raise self._error(f"`{key}` is of fused_qkv and fused_qkv_old alone", values[key][1])
            if key not in values and kinds and kinds[0] != "fused_ffn":
                raise self._error(f"`{kinds[0]}` needs `{key}`", values[kinds[0]][1])
        given = {key: text for key, (text, _) in values.items()}
        heads, groups = int(given.get("num_heads", 0)), int(given.get("num_key_value_groups", 0))
        if groups and heads % groups:
            message = f"{heads} heads do not divide into {groups} groups"
            raise self._error(message, values["num_key_value_groups"][1], "num_heads is of the queries")
        return Statement(
            left,
            right,
            int(given["axis"]) if "axis" in given else None,
            dims_of(given["permute"]) if "permute" in given else None,
            self._cast(values),
            Fused(kinds[0], heads, groups) if kinds else None,
            place,
        )

    def _cast(self, values: _Values) -> Cast | None:
        given = [key for key in _TYPES if key in values]
        if not given:
            return None
        if given == ["dtype"]:
            return Cast(values["dtype"][0])
        if given != ["src_dtype", "dst_dtype"]:
            raise self._error(
                "a cast has `dtype`, or `src_dtype` and `dst_dtype`", values[given[0]][1], 'write dtype="float32"'
            )
        return Cast(values["dst_dtype"][0], values["src_dtype"][0])

    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._next + ahead, len(self._tokens) - 1)]

    def _take(self, kind: str, what: str) -> Token:
        token = self._peek()
        if token.kind != kind:
            found = f"`{token.text}`" if token.text else "the end"
            raise self._error(f"{what} is missing here, found {found}", token, _FORM)
        self._next += 1
        return token

    def _error(self, message: str, token: Token, mend: str | None = None) -> AoaError:
        return AoaError(fault(NOT_READ, message, self._placing(token.start, max(token.stop, token.start + 1)), mend))


def dims_of(text: str) -> tuple[int, ...]:
    """The dims of a permutation as it is written."""
    return tuple(map(int, re.findall(r"[0-9]+", text)))
