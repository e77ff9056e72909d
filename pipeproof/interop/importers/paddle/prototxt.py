"""Protocol buffers' text format, as far as strategies use it: scalar fields and nested messages.

The grammar is that of https://protobuf.dev/reference/protobuf/textformat-spec.
Extensions, ``Any`` and lists do not occur in strategies, and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import shortened
from pipeproof.interop.importers.paddle.training_file import unreadable

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v]+|\#[^\n]*)
      | (?P<line>\n)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?[fF]?))
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<mark>[{}<>:,;])""",
    re.VERBOSE | re.ASCII,
)
_CLOSES = {"{": "}", "<": ">"}
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value as it is written, with its location; for strings, ``quoted`` is True, and the quotes are removed."""

    text: str
    location: Location
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """The fields of a message, in order, with repetitions."""

    location: Location
    fields: list[tuple[str, Scalar | Message, Location]] = field(default_factory=list)

    def only(self, name: str) -> Scalar | Message | None:
        """Return the field of that name, or None.

        Raises:
            PlanFileError: PP170, there are several.
        """
        matches = [(value, location) for known, value, location in self.fields if known == name]
        if len(matches) > 1:
            raise unreadable(f"`{name}` is repeated here, and a message has it once", matches[1][1])
        return matches[0][0] if matches else None


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    location: Location


def parse_prototxt(text: str, file: str) -> Message:
    """Parse the fields of a text.

    Raises:
        PlanFileError: PP170, at the location of the syntax error.
    """
    tokens = [*_tokens(text, file)]
    top = Message(Location(file))
    end = _fields(tokens, 0, top, None, 0)
    assert tokens[end].kind == "end", "the top-level fields end with the text"
    return top


def _tokens(text: str, file: str) -> Iterator[_Token]:
    line, begin, position = 1, 0, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        column = position - begin + 1
        if match is None:
            shown = shortened(text[position:].split(maxsplit=1)[0])
            raise unreadable(f"`{shown}` is not valid in protobuf's text format", Location(file, line, column))
        kind = str(match.lastgroup)
        if kind == "line":
            line, begin = line + 1, match.end()
        elif kind != "space":
            yield _Token(kind, match[0], Location(file, line, column).part(0, len(match[0])))
        position = match.end()
    yield _Token("end", "", Location(file, line, position - begin + 1))


def _fields(tokens: list[_Token], index: int, message: Message, closes: str | None, depth: int) -> int:
    """Read fields into ``message`` up to its closing token, and return the index of that token."""
    while not (tokens[index].kind == "end" if closes is None else tokens[index].text == closes):
        name = tokens[index]
        if name.kind != "name":
            raise _unexpected(name, "the name of a field" if closes is None else f"the name of a field or `{closes}`")
        colon = tokens[index + 1].text == ":"
        index += 2 if colon else 1
        value: Scalar | Message
        if tokens[index].text in _CLOSES:
            if depth >= _MAX_DEPTH:
                raise unreadable(f"more than {_MAX_DEPTH} nested messages", tokens[index].location)
            value = Message(name.location)
            index = _fields(tokens, index + 1, value, _CLOSES[tokens[index].text], depth + 1) + 1
        elif colon:
            value, index = _scalar(tokens, index)
        else:
            raise _unexpected(tokens[index], f"`:` or `{{` after `{name.text}`")
        message.fields.append((name.text, value, name.location))
        if tokens[index].text in (",", ";"):
            index += 1
    return index


def _scalar(tokens: list[_Token], index: int) -> tuple[Scalar, int]:
    """Read a number, a name, or adjacent strings, which are joined."""
    first = tokens[index]
    if first.kind in ("name", "number"):
        return Scalar(first.text, first.location), index + 1
    if first.kind != "string":
        raise _unexpected(first, "a value")
    text = ""
    while tokens[index].kind == "string":
        text += re.sub(r"\\(.)", r"\1", tokens[index].text[1:-1])
        index += 1
    return Scalar(text, first.location, quoted=True), index


def _unexpected(token: _Token, expected: str) -> Exception:
    found = f"`{shortened(token.text)}`" if token.text else "the end of the text"
    return unreadable(f"{expected} is expected, found {found}", token.location)
