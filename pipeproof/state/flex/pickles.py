"""Pickles, read and written without importing what they name: calls stay records, and bytes stay in the file.

``pickle.load`` imports and calls everything that a file names. Paddle's metadata and its ``.distcp`` files are pickles,
and so is the metadata of PyTorch's checkpoints (``state.dcp``), so a checkpoint from an unknown source could execute
anything. Here the operations of the pickle machine (Python's ``pickletools`` documents each) move plain values only. A
function or class is a ``GlobalName``, the result of a call a ``PickledObject``, and bytes are ``PickledBytes`` of the
file, so that arrays of many GB are located and not read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pipeproof.state.flex.flex_codes import FlexError
from pipeproof.state.state_codes import regular_size

_LONGEST_NAME = 2**16
_FIX = "Paddle writes protocol 4 by itself: save the checkpoint again, with `safetensors=True` if it holds arrays"


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A function or class that the pickle names."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class PickledObject:
    """The result that a call would have; ``state`` would be set on it afterwards.

    With a state it is written as an instance of a class, otherwise as the result of a call.
    """

    global_name: GlobalName
    arguments: Any
    state: Any = None


@dataclass(frozen=True, slots=True)
class PickledBytes:
    """Bytes of the file, not read."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PersistentId:
    """A reference to an object that is stored outside of the pickle, such as the elements of a PyTorch tensor."""

    value: Any


class UnreadablePickleError(Exception):
    """The pickle uses an unknown operation, or is damaged."""


def read_pickle(path: Path) -> Any:
    """Read a pickle as dicts, lists, sets, tuples, text, numbers and the four records of this module.

    Raises:
        FlexError: It cannot be read, is cut short, or uses an operation that Paddle's pickles lack.
    """
    try:
        return unpickled(path)
    except OSError as error:
        raise FlexError(f"{path} cannot be read: {error.strerror}", _FIX) from error
    except UnreadablePickleError as error:
        raise FlexError(f"{path} is damaged, or no pickle of Paddle's: {error}", _FIX) from error


class ForeignNameError(UnreadablePickleError):
    """The pickle names a function or class that its kind of pickle has no use for."""


def unpickled(
    path: Path, start: int = 0, length: int | None = None, allows: Callable[[GlobalName], bool] = lambda _: True
) -> Any:
    """Read the pickle at the bytes ``start`` to ``start + length`` of a file, or from ``start`` on, as records.

    Raises:
        OSError: The file cannot be read.
        ForeignNameError: The pickle has a name that ``allows`` refuses.
        UnreadablePickleError: The pickle is damaged, or uses an operation that is not read.
    """
    size = regular_size(path)
    with path.open("rb") as stream:
        stream.seek(start)
        try:
            return _Machine(stream, size if length is None else min(size, start + length), start, allows).run()
        except (struct.error, IndexError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise UnreadablePickleError(str(error)) from error


class _Machine:
    """Stack, marks and memo of a pickle being read; ``size`` is the byte of the file where it must have ended."""

    def __init__(self, stream: BinaryIO, size: int, start: int, allows: Callable[[GlobalName], bool]) -> None:
        self._stream, self._size, self._at, self._allows = stream, size, start, allows
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
                raise UnreadablePickleError(f"operation {bytes([code])!r} at byte {self._at - 1}")
            operations[code](self)

    def take_bytes(self, length: int) -> bytes:
        """Return the next bytes of the file."""
        self._require(length)
        content = self._stream.read(length)
        if len(content) < length:
            raise UnreadablePickleError("it is cut short")
        self._at += length
        return content

    def number(self, form: str) -> Any:
        """Return the next number of the file, in ``struct``'s format."""
        (value,) = struct.unpack(form, self.take_bytes(struct.calcsize(form)))
        return value

    def byte_range(self, form: str) -> PickledBytes:
        """Return the next bytes, which follow their length, without reading them."""
        length = self.number(form)
        self._require(length)
        byte_range = PickledBytes(self._at, length)
        self._at = self._stream.seek(self._at + length)
        return byte_range

    def text(self, form: str) -> str:
        return self.take_bytes(self.number(form)).decode("utf-8", "surrogatepass")

    def long(self) -> int:
        return int.from_bytes(self.take_bytes(self.number("<B")), "little", signed=True)

    def line(self) -> str:
        content = self._stream.readline(_LONGEST_NAME)
        self._at += len(content)
        if not content.endswith(b"\n"):
            raise UnreadablePickleError("it is cut short")
        return content[:-1].decode()

    def _require(self, length: int) -> None:
        if length > self._size - self._at:
            raise UnreadablePickleError(f"{length} bytes are missing from byte {self._at} on")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def push_global(self, module: str, name: str) -> None:
        global_name = GlobalName(module, name)
        if not self._allows(global_name):
            raise ForeignNameError(f"{module}.{name}")
        self.push(global_name)

    def pop(self) -> Any:
        return self._stack.pop()

    def take(self, count: int) -> tuple[Any, ...]:
        """Take the last values off the stack."""
        if not 0 <= count <= len(self._stack):
            raise UnreadablePickleError("the stack is empty")
        taken = tuple(self._stack[len(self._stack) - count :])
        del self._stack[len(self._stack) - count :]
        return taken

    def top(self) -> Any:
        return self._stack[-1]

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def take_since_mark(self) -> tuple[Any, ...]:
        return self.take(len(self._stack) - self._marks.pop())

    def memoize(self, index: int | None = None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def recall(self, index: int) -> None:
        self.push(self._memo[index])


def _put(machine: _Machine, pairs: tuple[Any, ...]) -> None:
    table = machine.top()
    if not isinstance(table, dict) or len(pairs) % 2:
        raise UnreadablePickleError("pairs are put into what is no dict")
    table.update(zip(pairs[::2], pairs[1::2], strict=True))


def _append(machine: _Machine, values: tuple[Any, ...]) -> None:
    content = machine.top()
    if not isinstance(content, list):
        raise UnreadablePickleError("values are appended to what is no list")
    content.extend(values)


def _global(machine: _Machine) -> None:
    module, name = machine.take(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise UnreadablePickleError("a name is no text")
    machine.push_global(module, name)


def _call(machine: _Machine) -> None:
    global_name, arguments = machine.take(2)
    if not isinstance(global_name, GlobalName) or not isinstance(arguments, tuple):
        raise UnreadablePickleError("what is called is no name")
    machine.push(PickledObject(global_name, arguments))


def _build(machine: _Machine) -> None:
    (state,) = machine.take(1)
    made = machine.top()
    if not isinstance(made, PickledObject):
        raise UnreadablePickleError("a state is put into what was not made")
    made.state = state


def _global_by_lines(machine: _Machine) -> None:
    module = machine.line()
    machine.push_global(module, machine.line())


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
        yield code, lambda m, form=form: m.push(m.byte_range(form))  # type: ignore[misc]
    yield b"}", lambda m: m.push({})
    yield b"]", lambda m: m.push([])
    yield b")", lambda m: m.push(())
    yield b"t", lambda m: m.push(m.take_since_mark())
    for count in (1, 2, 3):
        yield bytes([0x84 + count]), lambda m, count=count: m.push(m.take(count))  # type: ignore[misc]
    yield b"a", lambda m: _append(m, m.take(1))
    yield b"e", lambda m: _append(m, m.take_since_mark())
    yield b"s", lambda m: _put(m, m.take(2))
    yield b"u", lambda m: _put(m, m.take_since_mark())
    yield b"\x94", lambda m: m.memoize()
    yield b"q", lambda m: m.memoize(m.number("<B"))
    yield b"r", lambda m: m.memoize(m.number("<I"))
    yield b"h", lambda m: m.recall(m.number("<B"))
    yield b"j", lambda m: m.recall(m.number("<I"))
    yield b"c", _global_by_lines
    yield b"\x93", _global
    yield b"\x81", _call  # an instance of a class
    yield b"R", _call  # what a function gives
    yield b"b", _build
    yield b"Q", lambda m: m.push(PersistentId(m.pop()))


_STOP = ord(".")
_OPERATIONS = {code[0]: act for code, act in _operations()}


_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}


def to_pickle(value: Any) -> bytes:
    """Pickle dicts, lists, tuples, text, integers, booleans, None and ``PickledObject``, in protocol 4.

    Python's own writer would have to import the classes of Paddle.
    """
    writer = _Writer()
    writer.write(value)
    return b"\x80\x04" + bytes(writer.content) + b"."


class _Writer:
    """The bytes written so far; repeated text and names are references."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._places: dict[str | GlobalName, int] = {}

    def write(self, value: Any) -> None:
        content = self.content
        if value is None or isinstance(value, bool):
            content += _CONSTANTS[value]
        elif isinstance(value, int):
            number = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            content += bytes((0x8A, len(number))) + number
        elif isinstance(value, str | GlobalName):
            self._write_once(value)
        elif isinstance(value, PickledObject):
            self._write_once(value.global_name)
            self.write(value.arguments)
            if value.state is None:
                content += b"R"
                return
            content += b"\x81"
            self.write(value.state)
            content += b"b"
        elif isinstance(value, dict):
            content += b"}("
            for key, item in value.items():
                self.write(key)
                self.write(item)
            content += b"u"
        else:
            content += b"(" if isinstance(value, tuple) else b"]("
            for item in value:
                self.write(item)
            content += b"t" if isinstance(value, tuple) else b"e"

    def _write_once(self, value: str | GlobalName) -> None:
        if value in self._places:
            self.content += b"j" + struct.pack("<I", self._places[value])
            return
        index = self._places[value] = len(self._places)
        if isinstance(value, GlobalName):
            self.content += f"c{value.module}\n{value.name}\n".encode()
        else:
            text = value.encode("utf-8", "surrogatepass")
            self.content += b"X" + struct.pack("<I", len(text)) + text
        self.content += b"r" + struct.pack("<I", index)
