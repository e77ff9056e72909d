"""Pickles read without running them: names of classes stay names, calls stay records, bytes stay where they are.

``pickle.load`` imports and calls whatever a file asks for. Paddle's
metadata and its ``.distcp`` files are pickles, so a checkpoint from somebody
else could do anything. Here the operations of the pickle machine (Python's
``pickletools`` documents each) move plain values alone. A function or class is
a ``Name``, what it would make a ``Made``, and bytes a ``Span`` of the file, so
that arrays of many GB are found and not read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeproof.state.flex.codes import FlexError
from pipeproof.state.regular import regular_size

_LONGEST_NAME = 2**16
_MEND = "Paddle writes protocol 4 by itself: save the checkpoint anew, with `safetensors=True` if it holds arrays"


@dataclass(frozen=True, slots=True)
class Name:
    """A function or class that the pickle names."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class Made:
    """What a call would make: ``state`` is what would be put into it afterwards."""

    what: Name
    arguments: Any
    state: Any = None


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of the file, not read."""

    start: int
    length: int


class _UnreadableError(Exception):
    """The pickle asks for something that is not known here, or is damaged."""


def read_pickle(path: Path) -> Any:
    """What a pickle says, as dicts, lists, sets, tuples, text, numbers, ``Name``, ``Made`` and ``Span``.

    Raises:
        FlexError: it cannot be read, is cut short, or uses an operation that Paddle's pickles have not.
    """
    try:
        size = regular_size(path)
        with path.open("rb") as stream:
            return _Machine(stream, size).run()
    except OSError as error:
        raise FlexError(f"{path} cannot be read: {error.strerror}", _MEND) from error
    except (_UnreadableError, struct.error, IndexError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise FlexError(f"{path} is damaged, or no pickle of Paddle's: {error}", _MEND) from error


class _Machine:
    """The stack, the marks and the memo of a pickle that is being read."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._size, self._at = stream, size, 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        operations = _OPERATIONS
        while True:
            code = self.take_bytes(1)[0]
            if code == _STOP:
                return self._stack.pop()
            if code not in operations:
                raise _UnreadableError(f"operation {bytes([code])!r} at byte {self._at - 1}")
            operations[code](self)

    def take_bytes(self, length: int) -> bytes:
        """The next bytes of the file."""
        self._require(length)
        content = self._stream.read(length)
        if len(content) < length:
            raise _UnreadableError("it is cut short")
        self._at += length
        return content

    def number(self, form: str) -> Any:
        """The next number of the file, in ``struct``'s form."""
        (value,) = struct.unpack(form, self.take_bytes(struct.calcsize(form)))
        return value

    def span(self, form: str) -> Span:
        """The next bytes, behind their length; they are passed over."""
        length = self.number(form)
        self._require(length)
        span = Span(self._at, length)
        self._at = self._stream.seek(self._at + length)
        return span

    def text(self, form: str) -> str:
        return self.take_bytes(self.number(form)).decode("utf-8", "surrogatepass")

    def long(self) -> int:
        return int.from_bytes(self.take_bytes(self.number("<B")), "little", signed=True)

    def line(self) -> str:
        content = self._stream.readline(_LONGEST_NAME)
        self._at += len(content)
        if not content.endswith(b"\n"):
            raise _UnreadableError("it is cut short")
        return content[:-1].decode()

    def _require(self, length: int) -> None:
        if length > self._size - self._at:
            raise _UnreadableError(f"{length} bytes from byte {self._at} on are not there")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        return self._stack.pop()

    def take(self, count: int) -> tuple[Any, ...]:
        """The last values of the stack, off it."""
        if not 0 <= count <= len(self._stack):
            raise _UnreadableError("the stack is empty")
        taken = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        return taken

    def top(self) -> Any:
        return self._stack[-1]

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def since_mark(self) -> tuple[Any, ...]:
        return self.take(len(self._stack) - self._marks.pop())

    def keep(self, place: int | None = None) -> None:
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def kept(self, place: int) -> None:
        self.push(self._memo[place])


def _put(machine: _Machine, pairs: tuple[Any, ...]) -> None:
    table = machine.top()
    if not isinstance(table, dict) or len(pairs) % 2:
        raise _UnreadableError("pairs are put into what is no dict")
    table.update(zip(pairs[::2], pairs[1::2], strict=True))


def _append(machine: _Machine, values: tuple[Any, ...]) -> None:
    content = machine.top()
    if not isinstance(content, list):
        raise _UnreadableError("values are appended to what is no list")
    content.extend(values)


def _global(machine: _Machine) -> None:
    module, name = machine.take(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise _UnreadableError("a name is no text")
    machine.push(Name(module, name))


def _call(machine: _Machine) -> None:
    what, arguments = machine.take(2)
    if not isinstance(what, Name) or not isinstance(arguments, tuple):
        raise _UnreadableError("what is called is no name")
    machine.push(Made(what, arguments))


def _build(machine: _Machine) -> None:
    (state,) = machine.take(1)
    made = machine.top()
    if not isinstance(made, Made):
        raise _UnreadableError("a state is put into what was not made")
    made.state = state


def _named_by_lines(machine: _Machine) -> None:
    module = machine.line()
    machine.push(Name(module, machine.line()))


def _operations() -> Iterator[tuple[bytes, Callable[[_Machine], object]]]:
    yield b"\x80", lambda m: m.take_bytes(1)  # protocol
    yield b"\x95", lambda m: m.take_bytes(8)  # frame: how much a reader may fetch at once
    yield b"(", _Machine.mark
    for code, value in ((b"N", None), (b"\x88", True), (b"\x89", False)):
        yield code, lambda m, value=value: m.push(value)  # type: ignore[misc]
    for code, form in ((b"J", "<i"), (b"K", "<B"), (b"M", "<H"), (b"G", ">d")):
        yield code, lambda m, form=form: m.push(m.number(form))  # type: ignore[misc]
    yield b"\x8a", lambda m: m.push(m.long())
    for code, form in ((b"\x8c", "<B"), (b"X", "<I"), (b"\x8d", "<Q")):
        yield code, lambda m, form=form: m.push(m.text(form))  # type: ignore[misc]
    for code, form in ((b"C", "<B"), (b"B", "<I"), (b"\x8e", "<Q")):
        yield code, lambda m, form=form: m.push(m.span(form))  # type: ignore[misc]
    yield b"}", lambda m: m.push({})
    yield b"]", lambda m: m.push([])
    yield b")", lambda m: m.push(())
    yield b"t", lambda m: m.push(m.since_mark())
    for count in (1, 2, 3):
        yield bytes([0x84 + count]), lambda m, count=count: m.push(m.take(count))  # type: ignore[misc]
    yield b"a", lambda m: _append(m, m.take(1))
    yield b"e", lambda m: _append(m, m.since_mark())
    yield b"s", lambda m: _put(m, m.take(2))
    yield b"u", lambda m: _put(m, m.since_mark())
    yield b"\x94", lambda m: m.keep()
    yield b"q", lambda m: m.keep(m.number("<B"))
    yield b"r", lambda m: m.keep(m.number("<I"))
    yield b"h", lambda m: m.kept(m.number("<B"))
    yield b"j", lambda m: m.kept(m.number("<I"))
    yield b"c", _named_by_lines
    yield b"\x93", _global
    yield b"\x81", _call  # an instance of a class
    yield b"R", _call  # what a function gives
    yield b"b", _build


_STOP = ord(".")
_OPERATIONS = {code[0]: act for code, act in _operations()}
