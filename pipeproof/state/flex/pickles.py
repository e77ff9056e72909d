"""Pickles, read and written without imports of the named classes: calls stay records, and bytes stay in the file.

``pickle.load`` imports and calls everything that a file names. Paddle's metadata and its ``.distcp`` files are pickles,
and so is the metadata of PyTorch's checkpoints (``state.dcp``), so a checkpoint from an unknown source could execute
anything. Here Python's ``pickletools`` reads the operations of the pickle machine, which move plain values only. A
function or class is a ``GlobalName``, the result of a call a ``PickledObject``, and bytes are ``PickledBytes`` of the
file: arrays of many GB are located and not read.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

from pipeproof.foreign_text import MALFORMED, open_foreign
from pipeproof.state.state_codes import FlexError

_T = TypeVar("_T")
_LONGEST_TEXT = 2**20
_WIDEST_NUMBER = 8
"""Bytes."""
MAX_OPERATIONS = 2**25
"""Most operations of a pickle, and most values in it; shared values count each time."""
MAX_DEPTH = 64
"""Most values inside one another."""
_SCALARS = (str, int, float, type(None))
_FIX = "Paddle writes protocol 4 by itself: save the checkpoint again, with `safetensors=True` if it holds arrays"


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A function or class that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


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
    """Bytes of the file, not read; for a number, ``content`` has the bytes."""

    start: int
    length: int
    content: bytes = field(default=b"", compare=False)

    def __len__(self) -> int:
        return self.length


class UnreadablePickleError(Exception):
    """The pickle uses an unknown operation, or is damaged."""


def read_pickle(path: Path) -> Any:
    """Read a pickle as dicts, lists, sets, tuples, text, numbers and the three records of this module.

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
    """The pickle names a function or class that its kind of pickle does not use."""


def unpickled(path: Path, allows: Callable[[GlobalName], bool] = lambda _: True) -> Any:
    """Read the pickle in a file as records.

    Raises:
        OSError: The file cannot be read.
        ForeignNameError: The pickle has a name that ``allows`` refuses.
        UnreadablePickleError: The pickle is damaged, uses an operation that is not read, or has more than
            ``MAX_OPERATIONS`` or ``MAX_DEPTH``.
    """
    with open_foreign(path) as stream:
        size = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        try:
            value = _run(_Source(stream, size), allows)
            _require_moderate(value)
        except (struct.error, *MALFORMED) as error:
            raise UnreadablePickleError(str(error)) from error
    return value


class _Source:
    """A pickle in a file of ``size`` bytes, for ``pickletools``.

    Bytes that are too long for a text are skipped, and not read.
    """

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._size, self._at = stream, size, 0

    def tell(self) -> int:
        return self._at

    def read(self, length: int) -> bytes | PickledBytes:
        if length > self._size - self._at:
            raise UnreadablePickleError(f"{length} bytes are missing from byte {self._at} on")
        self._at += length
        if length > _LONGEST_TEXT:
            self._stream.seek(self._at)
            return PickledBytes(self._at - length, length)
        content = self._stream.read(length)
        if len(content) < length:
            raise UnreadablePickleError("it is cut short")
        return content

    def readline(self) -> bytes:
        content = self._stream.readline(_LONGEST_TEXT)
        self._at += len(content)
        return content


_VALUES = frozenset(
    {"BINFLOAT", "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE"}
)
"""Operations that push their argument."""
_BYTES = frozenset({"BINBYTES", "BINBYTES8", "SHORT_BINBYTES"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _run(source: _Source, allows: Callable[[GlobalName], bool]) -> Any:
    machine = _Machine(allows)
    operations: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]] = pickletools.genops(cast(IO[bytes], source))
    for number, (opcode, argument, position) in enumerate(operations):
        if number == MAX_OPERATIONS:
            raise UnreadablePickleError(f"it has more than {MAX_OPERATIONS:,} operations")
        match operation := opcode.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return machine.stack.pop()
            case _ if operation in _BYTES:
                content = argument if len(argument) <= _WIDEST_NUMBER else b""
                machine.stack.append(PickledBytes(source.tell() - len(argument), len(argument), content))
            case _ if operation in _VALUES:
                machine.stack.append(argument)
            case _ if operation in _CONSTANTS:
                machine.stack.append(_CONSTANTS[operation])
            case _ if not machine.executes(operation, argument):
                raise UnreadablePickleError(f"operation {operation} at byte {position}")
    raise AssertionError("the last operation is STOP")


class _Machine:
    """The pickle machine without calls: a stack, marks on it, and a memo."""

    def __init__(self, allows: Callable[[GlobalName], bool]) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._allows = allows

    def executes(self, operation: str, argument: Any) -> bool:
        """Execute an operation that moves values; False for any other."""
        stack = self.stack
        match operation:
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "TUPLE":
                stack.append(self._since_mark())
            case "APPEND" | "APPENDS":
                values = self._take(1) if operation == "APPEND" else self._since_mark()
                _of_type(stack[-1], list).extend(values)
            case "SETITEM" | "SETITEMS":
                pairs = self._take(2) if operation == "SETITEM" else self._since_mark()
                _of_type(stack[-1], dict).update(zip(map(_key, pairs[::2]), pairs[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                module, name = argument.split(" ", 1) if operation == "GLOBAL" else self._take(2)
                global_name = GlobalName(_of_type(module, str), _of_type(name, str))
                if not self._allows(global_name):
                    raise ForeignNameError(f"{global_name}")
                stack.append(global_name)
            case "NEWOBJ" | "REDUCE":  # an instance of a class, and the result of a function
                called, arguments = self._take(2)
                made = PickledObject(_of_type(called, GlobalName), _of_type(arguments, tuple))
                number = _whole_number(made)
                stack.append(made if number is None else number)
            case "BUILD":
                (state,) = self._take(1)
                _of_type(stack[-1], PickledObject).state = state
            case _ if operation in _TUPLES:
                stack.append(self._take(_TUPLES[operation]))
            case _:
                return False
        return True

    def _take(self, count: int) -> tuple[Any, ...]:
        if not 0 <= count <= len(self.stack):
            raise UnreadablePickleError("the stack is empty")
        taken = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return taken

    def _since_mark(self) -> tuple[Any, ...]:
        return self._take(len(self.stack) - self._marks.pop())


def _whole_number(made: PickledObject) -> int | None:
    """Return a whole number of numpy, as Fleet's DygraphShardingOptimizerV2 has in ranges; None for anything else."""
    match made:
        case PickledObject(
            GlobalName("numpy.core.multiarray" | "numpy._core.multiarray", "scalar"),
            (
                PickledObject(GlobalName("numpy", "dtype"), (str(kind), *_), (_, "<" | "|", *_)),
                PickledBytes() as stored,
            ),
        ) if kind[:1] in ("i", "u") and kind[1:] == str(len(stored.content)):
            return int.from_bytes(stored.content, "little", signed=kind[0] == "i")
    return None


def _key(value: Any) -> Any:
    """Return a key of a dict: to hash nested tuples takes longer than the age of the universe."""
    parts = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(part, _SCALARS) or type(part) is PickledObject for part in parts):
        raise UnreadablePickleError(f"a {type(value).__name__} of other values as a key")
    return value


def _parts(value: Any) -> tuple[Any, ...]:
    match value:
        case dict():
            return (*value.keys(), *value.values())
        case list() | tuple():
            return tuple(value)
        case PickledObject():
            return value.arguments, value.state
        case _:
            return ()


def _require_moderate(whole: Any) -> None:
    """Refuse values that contain themselves, are too deep, or are only small because they share their parts.

    A few hundred bytes make lists of lists that no program walks to the end. Nothing here recurses.
    """
    measures: dict[int, tuple[int, int] | None] = {}
    pending = [whole]
    while pending:
        value = pending[-1]
        parts = [part for part in _parts(value) if isinstance(part, dict | list | tuple | PickledObject)]
        if id(value) not in measures:
            measures[id(value)] = None
            if any(measures.get(id(part), ()) is None for part in parts):
                raise UnreadablePickleError("a value contains itself")
            pending += (part for part in parts if id(part) not in measures)
            continue
        pending.pop()
        if measures[id(value)] is not None:
            continue
        sizes = [size for part in parts if (size := measures[id(part)]) is not None]
        num_values = len(_parts(value)) + sum(number for number, _ in sizes)
        depth = 1 + max((depth for _, depth in sizes), default=0)
        if depth > MAX_DEPTH or num_values > MAX_OPERATIONS:
            raise UnreadablePickleError(f"it is nested {depth:,} deep, with {num_values:,} values")
        measures[id(value)] = num_values, depth


def _of_type(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise UnreadablePickleError(f"a {kind.__name__} is needed, not {type(value).__name__}")
    return value


_WRITTEN = {None: b"N", True: b"\x88", False: b"\x89"}


def whole_numbers(values: Iterable[Any]) -> tuple[int, ...]:
    """Return the values of a pickle that must be whole numbers.

    Raises:
        TypeError, ValueError: they are not.
    """
    numbers = tuple(values)
    if not all(type(value) is int and value >= 0 for value in numbers):
        raise ValueError(f"{values!r} are not whole numbers")
    return numbers


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
            content += _WRITTEN[value]
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
