"""The header of a safetensors file.

The byte offset of each tensor, read strictly, and written as the library writes it.

The format (github.com/huggingface/safetensors): 8 bytes with the length of the header; the header, JSON; then the
tensors' bytes without gaps. The library's reader gives tensors without offsets, and its writer needs all tensors in
memory. Both are wrong for files of many GB.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pipeproof.foreign_text import MALFORMED, decode_json, open_foreign
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.state_codes import StateError, reading

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
"""Types as the files name them, in the library's order: later types come earlier in a file."""
_SHORT = {name: short for short, name in _TYPES.items()}
_ORDER = {name: number for number, name in enumerate(_SHORT)}
_MAX_BYTES = 100_000_000
"""Largest header; the library's own limit."""
_LENGTH_BYTES = 8
_FIX = "copy the file again from where it was saved, or name another checkpoint"


class _UnknownTypeError(ValueError):
    """A type of newer releases of the library, or no type."""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One tensor of a file: ``start`` is the byte of the file where its first element is."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * dtype_bytes(self.dtype)


@dataclass(frozen=True, slots=True)
class Header:
    """Arrays of a file by key, its metadata, and its size."""

    arrays: Mapping[str, StoredArray]
    metadata: Mapping[str, str]
    size_bytes: int


def read_header(path: Path) -> Header:
    """Return the header of a file, after checking that the file is as large as the header requires.

    Raises:
        StateError: The file cannot be read, is cut short or longer, or its header is invalid.
    """
    with reading(path, _FIX), open_foreign(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_BYTES):
            raise StateError(f"{path} is cut short, or no safetensors file: it has {size} bytes", _FIX)
        content = stream.read(length)
    try:
        table = decode_json(content, object_pairs_hook=_once)
        metadata = _texts(table.pop(METADATA, {}))
        entries = sorted(
            (_entry(name, fields) for name, fields in table.items()), key=lambda entry: (entry[2], entry[3], entry[0])
        )
    except _UnknownTypeError as error:
        fix = "remove such tensors, or convert them to one of these types"
        raise StateError(f"{path}: {error}, and the supported types are {', '.join(_TYPES)}", fix) from error
    except MALFORMED as error:
        raise StateError(f"{path} is damaged: its header cannot be read: {error}", _FIX) from error
    position, arrays = 0, {}
    for name, array, start, stop in entries:
        if start != position or stop - start != array.num_bytes:
            raise StateError(
                f"{path} is damaged: {name}, {array.dtype} {list(array.shape)}, is listed at bytes {start} to {stop} "
                f"after the header, and needs {position} to {position + array.num_bytes}",
                _FIX,
            )
        arrays[name] = StoredArray(array.dtype, array.shape, _LENGTH_BYTES + length + start)
        position = stop
    whole = _LENGTH_BYTES + length + position
    if size != whole:
        how = "cut short" if size < whole else "longer"
        raise StateError(f"{path} is {how}: it has {size} bytes, and {whole} by its header", _FIX)
    return Header(arrays, metadata, whole)


def require_array(path: Path, header: Header, key: str, dtype: str, shape: tuple[int, ...], fix: str) -> StoredArray:
    """Return an array that an index lists; Paddle's scalars have one dim.

    Raises:
        StateError: It is missing, or its type or shape differs from the index.
    """
    array = header.arrays.get(key)
    if array is None:
        raise StateError(f"{path} must hold {key}, and it is missing", fix)
    if array.dtype != dtype or (array.shape or (1,)) != (shape or (1,)):
        message = f"{path} has {key} as {array.dtype} {list(array.shape)}"
        raise StateError(f"{message}, and the index lists {dtype} {list(shape)}", fix)
    return array


def make_header(arrays: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    """Return the bytes before the first tensor, and the header, with arrays in the file's order.

    ``arrays`` has type and shape.

    The bytes equal the library's: larger types first, then by name, padded to 8 bytes. With several keys of
    ``metadata`` the library uses the order of its hash table; this function sorts them.
    """
    order = sorted(arrays, key=lambda name: (-_ORDER[arrays[name][0]], name))
    table: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    position, starts = 0, {}
    for name in order:
        dtype, shape = arrays[name]
        stop = position + prod(shape) * dtype_bytes(dtype)
        table[name] = {"dtype": _SHORT[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        starts[name], position = position, stop
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    first = _LENGTH_BYTES + len(text)
    arrays_by_key = {name: StoredArray(*arrays[name], first + starts[name]) for name in order}
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, Header(arrays_by_key, dict(metadata), first + position)


def _entry(name: str, fields: Mapping[str, Any]) -> tuple[str, StoredArray, int, int]:
    """Return name, type and shape of a tensor, and its begin and end behind the header."""
    if fields["dtype"] not in _TYPES:
        raise _UnknownTypeError(f"{name} has the type {fields['dtype']!r}")
    numbers = [*fields["shape"], *fields["data_offsets"]]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name} has a shape or an offset that is not an integer")
    start, stop = fields["data_offsets"]
    return name, StoredArray(_TYPES[fields["dtype"]], tuple(fields["shape"]), start), start, stop


def _texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{METADATA} is not text by name")
    return dict(metadata)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; of a repeated name, readers would take one value or the other."""
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} occurs twice")
    return table
