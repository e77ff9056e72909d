"""The header of a safetensors file: where each tensor's bytes stand; read strictly, and made as the library makes it.

The format (github.com/huggingface/safetensors): 8 bytes, the length of the
header; the header, JSON; then the tensors' bytes without gaps. The library's
reader gives tensors and no places, and its writer wants all tensors in memory.
Both are wrong for files of many GB.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.codes import StateError, reading
from pipeproof.state.regular import regular_size

METADATA = "__metadata__"
_TYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""Types as the files name them, in the library's order: what is further down stands earlier in a file."""
_SHORT = {name: short for short, name in _TYPES.items()}
_PLACE = {name: place for place, name in enumerate(_SHORT)}
_MAX_BYTES = 100_000_000
"""Of a header; the library's own limit."""
_LENGTH_BYTES = 8
_MEND = "copy the file anew from where it was saved, or name another checkpoint"


class _UnknownTypeError(ValueError):
    """A type that newer releases of the library have, or none."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One tensor of a file: ``start`` is the byte of the file where its first element stands."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """How many bytes its elements have."""
        return prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds by key, what it says beside, and how large it is in all."""

    arrays: Mapping[str, StoredArray]
    metadata: Mapping[str, str]
    size_bytes: int


def read_header(path: Path) -> Header:
    """The header of a file, which is as large as the header says.

    Raises:
        StateError: the file cannot be read, is cut short or longer, or has a header that is none.
    """
    with reading(path, _MEND):
        size = regular_size(path)
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_BYTES):
                raise StateError(f"{path} is cut short, or no safetensors file: it has {size} bytes", _MEND)
            content = stream.read(length)
    try:
        table = json.loads(content, object_pairs_hook=_once)
        metadata = _texts(table.pop(METADATA, {}))
        spans = sorted((_span(name, one) for name, one in table.items()), key=lambda span: (span[2], span[3], span[0]))
    except _UnknownTypeError as error:
        mend = "leave such tensors out, or turn them into one of these types"
        raise StateError(f"{path}: {error}, and read are {', '.join(_TYPES)}", mend) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StateError(f"{path} is damaged: its header cannot be read: {error}", _MEND) from error
    at, arrays = 0, {}
    for name, array, start, stop in spans:
        if start != at or stop - start != array.num_bytes:
            raise StateError(
                f"{path} is damaged: {name}, {array.dtype} {list(array.shape)}, is to stand in bytes {start} to {stop} "
                f"behind the header, and takes {at} to {at + array.num_bytes}",
                _MEND,
            )
        arrays[name] = StoredArray(array.dtype, array.shape, _LENGTH_BYTES + length + start)
        at = stop
    whole = _LENGTH_BYTES + length + at
    if size != whole:
        how = "cut short" if size < whole else "longer"
        raise StateError(f"{path} is {how}: it has {size} bytes, and its header says {whole}", _MEND)
    return Header(arrays, metadata, whole)


def require_array(path: Path, header: Header, key: str, dtype: str, shape: tuple[int, ...], mend: str) -> StoredArray:
    """The array of a file that an index speaks of; Paddle's numbers have one dim.

    Raises:
        StateError: it is not there, or not of the type and shape that the index says.
    """
    array = header.arrays.get(key)
    if array is None:
        raise StateError(f"{path} is to hold {key}, and it is not there", mend)
    if array.dtype != dtype or (array.shape or (1,)) != (shape or (1,)):
        message = f"{path} has {key} as {array.dtype} {list(array.shape)}"
        raise StateError(f"{message}, and the index says {dtype} {list(shape)}", mend)
    return array


def header_bytes(path: Path) -> bytes:
    """All of a file before its first tensor, of one that ``read_header`` reads.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        length = stream.read(_LENGTH_BYTES)
        return length + stream.read(min(int.from_bytes(length, "little"), _MAX_BYTES))


def make_header(arrays: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    """The bytes before the first tensor, and where each will stand, in the file's order; ``arrays`` has type and shape.

    It is what the library writes: larger types first, then by name, padded to 8 bytes. With several keys of
    ``metadata`` the library's order is that of its hash table, ours is sorted.
    """
    order = sorted(arrays, key=lambda name: (-_PLACE[arrays[name][0]], name))
    table: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    at, starts = 0, {}
    for name in order:
        dtype, shape = arrays[name]
        stop = at + prod(shape) * dtype_bytes(dtype)
        table[name] = {"dtype": _SHORT[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        starts[name], at = at, stop
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    first = _LENGTH_BYTES + len(text)
    placed = {name: StoredArray(*arrays[name], first + starts[name]) for name in order}
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, Header(placed, dict(metadata), first + at)


def _span(name: str, one: Mapping[str, Any]) -> tuple[str, StoredArray, int, int]:
    """Name, type and shape of a tensor, and where it begins and ends behind the header."""
    if one["dtype"] not in _TYPES:
        raise _UnknownTypeError(f"{name} has the type {one['dtype']!r}")
    numbers = [*one["shape"], *one["data_offsets"]]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name} has a shape or place that is not of whole numbers")
    start, stop = one["data_offsets"]
    return name, StoredArray(_TYPES[one["dtype"]], tuple(one["shape"]), start), start, stop


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} is not text by name")
    return dict(metadata)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a name that stands there twice, readers would take one or the other."""
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} stands there twice")
    return table
