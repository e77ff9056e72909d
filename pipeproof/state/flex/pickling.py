"""Pickles made without Python's own writer, which would have to import the classes of Paddle that they name."""

from __future__ import annotations

import struct
from typing import Any

from pipeproof.state.flex.pickles import Made, Name

_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}


def pickled(value: Any) -> bytes:
    """A pickle of dicts, lists, tuples, text, whole numbers, truth values, None and ``Made``, in protocol 4."""
    writer = _Writer()
    writer.write(value)
    return b"\x80\x04" + bytes(writer.content) + b"."


class _Writer:
    """What is written so far; text and names that come again are referred to."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._places: dict[str | Name, int] = {}

    def write(self, value: Any) -> None:
        content = self.content
        if value is None or isinstance(value, bool):
            content += _CONSTANTS[value]
        elif isinstance(value, int):
            number = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            content += bytes((0x8A, len(number))) + number
        elif isinstance(value, str | Name):
            self._write_once(value)
        elif isinstance(value, Made):
            self._write_once(value.what)
            self.write(value.arguments)
            content += b"\x81"
            self.write(value.state)
            content += b"b"
        elif isinstance(value, dict):
            content += b"}("
            for key, one in value.items():
                self.write(key)
                self.write(one)
            content += b"u"
        else:
            content += b"(" if isinstance(value, tuple) else b"]("
            for one in value:
                self.write(one)
            content += b"t" if isinstance(value, tuple) else b"e"

    def _write_once(self, value: str | Name) -> None:
        if value in self._places:
            self.content += b"j" + struct.pack("<I", self._places[value])
            return
        place = self._places[value] = len(self._places)
        if isinstance(value, Name):
            self.content += f"c{value.module}\n{value.name}\n".encode()
        else:
            text = value.encode("utf-8", "surrogatepass")
            self.content += b"X" + struct.pack("<I", len(text)) + text
        self.content += b"r" + struct.pack("<I", place)
