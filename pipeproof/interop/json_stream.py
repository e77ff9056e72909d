"""Values of a large JSON text, decoded one by one from a window: memory depends on single values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import IO, Any

from pipeproof.foreign_text import ForeignTextError, IncompleteValueError, decode_json_value

MAX_VALUE = 2**24
"""Largest single value, in characters."""
_CHUNK = 2**20


class JsonStream:
    """Reads one JSON object. Numbers with a decimal point are their text, to be exact.

    ``refusal`` makes the error of a message. ``max_text`` is the largest text, in characters.
    """

    def __init__(self, stream: IO[str], refusal: Callable[[str], Exception], max_text: int) -> None:
        self._stream, self._refusal, self._max_text = stream, refusal, max_text
        self._text, self._at, self._before = "", 0, 0
        self._decoder = json.JSONDecoder(parse_float=str)

    def members(self) -> Iterator[str]:
        """Yield the keys of the object; the consumer reads the value of each before it asks for the next key."""
        if self.peek() != "{":
            raise self.error("the text begins with `{`")
        self.take("{")
        while self.peek() != "}":
            key = self.value()
            if not isinstance(key, str):
                raise self.error("a key is a text")
            self.take(":")
            yield key
            if self.peek() == "}":
                break
            self.take(",")

    def items(self) -> Iterator[Any]:
        """Yield the items of the list that comes next."""
        self.take("[")
        while self.peek() != "]":
            yield self.value()
            if self.peek() == "]":
                break
            self.take(",")
        self.take("]")

    def peek(self) -> str:
        """Return the next character that is not a space, without consuming it."""
        while True:
            while self._at < len(self._text):
                if not self._text[self._at].isspace():
                    return self._text[self._at]
                self._at += 1
            if not self._fill():
                raise self.error("the text ends early")

    def take(self, expected: str) -> None:
        """Consume one of these characters."""
        if self.peek() not in expected:
            raise self.error(f"expected one of `{expected}`, found `{self.peek()}`")
        self._at += 1

    def value(self) -> Any:
        """Decode the next value."""
        self.peek()
        while True:
            try:
                decoded, end = decode_json_value(self._decoder, self._text, self._at)
            except IncompleteValueError as error:
                if len(self._text) - self._at > MAX_VALUE or not self._fill():
                    raise self.error("not a JSON value") from error
                continue
            except ForeignTextError as error:
                raise self.error(f"not a JSON value: {error}") from error
            if end == len(self._text) and self._fill():
                continue  # a number may continue in the next part
            self._at = end
            return decoded

    def error(self, message: str) -> Exception:
        """Return the error at this position."""
        return self._refusal(f"{message}, at character {self._before + self._at} of the text")

    def _fill(self) -> bool:
        more = self._stream.read(_CHUNK)
        if not more:
            return False
        self._before += self._at
        self._text, self._at = self._text[self._at :] + more, 0
        if self._before > self._max_text:
            raise self._refusal(f"the text has more than {self._max_text:,} characters")
        return True
