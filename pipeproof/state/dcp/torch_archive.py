"""The archive of one tensor, as ``torch.save`` writes it: located in a file.

It is a zip archive without compression. ``archive/data.pkl`` is a pickle that calls ``_rebuild_tensor_v2`` with type,
offset, shape and strides; ``archive/data/0`` has the elements.
"""

from __future__ import annotations

import io
import struct
import zipfile
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from pipeproof.foreign_text import MALFORMED
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.dcp.dcp_metadata import DTYPES, DcpChunk
from pipeproof.state.flex.pickles import GlobalName, PersistentId, PickledObject, UnreadablePickleError, unpickled
from pipeproof.state.regions import row_numels
from pipeproof.state.safetensors_header import StoredArray
from pipeproof.state.state_codes import DcpError

_STORAGES = {
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "BoolStorage": "bool",
}
"""Type of the elements by class of the storage; newer types have an untyped storage, and are an argument."""
_REBUILD = {
    GlobalName("torch._utils", "_rebuild_tensor_v2"): False,
    GlobalName("torch._utils", "_rebuild_tensor_v3"): True,
}
"""Functions that make a tensor from a storage; True: the type is their last argument."""
_PARAMETER = GlobalName("torch._utils", "_rebuild_parameter")
_FIX = "save the checkpoint again, or copy it again from where it was saved"
_MAX_PICKLE = 2**20
_LOCAL = struct.Struct("<4s5H3I2H")


class _Slice(io.RawIOBase):
    """The bytes ``start`` to ``start + length`` of a file."""

    def __init__(self, stream: BinaryIO, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._position = stream, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if origin + offset < 0:
            raise OSError(22, "a position before the archive")
        self._position = origin + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._length - self._position)
        self._stream.seek(self._start + self._position)
        content = self._stream.read(rest if size < 0 else min(size, rest))
        self._position += len(content)
        return content


def locate_tensor(stream: BinaryIO, path: Path, name: str, dtype: str, chunk: DcpChunk) -> tuple[StoredArray, int]:
    """Return the array of a chunk, and the CRC of its elements; elements are not read.

    Raises:
        DcpError: The archive is damaged, or has another type, shape or order of elements than the metadata.
        OSError: The file cannot be read.
    """
    try:
        archive, entries = _opened(_Slice(stream, chunk.start, chunk.length))
        pickle_start, length = _content_of(stream, chunk, entries["data.pkl"])
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise DcpError(f"{path}: {name} is in big-endian order", "save the checkpoint on a little-endian machine")
        call = unpickled(path, pickle_start, min(length, _MAX_PICKLE))
        stored_dtype, key, offset, shape, strides = _tensor_of(call)
        data = entries[f"data/{key}"]
        start, num_bytes = _content_of(stream, chunk, data)
    except (zipfile.BadZipFile, struct.error, KeyError, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        raise DcpError(f"{path}: the archive of {name} at byte {chunk.start} is damaged: {error}", _FIX) from error
    except (UnreadablePickleError, *MALFORMED) as error:
        raise DcpError(f"{path}: the archive of {name} at byte {chunk.start} is not a tensor: {error}", _FIX) from error
    if (stored_dtype, shape) != (dtype, chunk.extents):
        stored_text = f"{stored_dtype} {list(shape)}"
        message = f"{path} has {name} as {stored_text}, and the metadata lists {dtype} {list(chunk.extents)}"
        raise DcpError(message, "two saves went into one directory, or a file was changed: " + _FIX)
    steps = zip(shape, strides, row_numels(shape), strict=True)
    if prod(shape) and any(size > 1 and step != own for size, step, own in steps):
        message = f"{path}: {name}, {list(shape)}, is stored with the strides {list(strides)}"
        raise DcpError(message, "save contiguous tensors (`tensor.contiguous()`)")
    item = dtype_bytes(dtype)
    if (offset + prod(shape)) * item > num_bytes:
        message = f"{path}: {name} has {num_bytes} bytes, and {(offset + prod(shape)) * item} make {list(shape)}"
        raise DcpError(message, _FIX)
    is_all = prod(shape) * item == num_bytes
    return StoredArray(dtype, shape, start + offset * item), data.CRC if is_all else -1


def _opened(content: _Slice) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
    """Return an archive, and its entries by name without the directory that PyTorch gives them."""
    archive = zipfile.ZipFile(content)
    if min((entry.header_offset for entry in archive.infolist()), default=0):
        raise zipfile.BadZipFile("it begins elsewhere")
    return archive, {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}


def _content_of(stream: BinaryIO, chunk: DcpChunk, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Return the first byte of an entry's content in the file, and its length."""
    if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size or entry.flag_bits & 1:
        raise zipfile.BadZipFile(f"{entry.filename} is compressed or encrypted")
    stream.seek(chunk.start + entry.header_offset)
    signature, *_, name_length, extra_length = _LOCAL.unpack(stream.read(_LOCAL.size))
    start = entry.header_offset + _LOCAL.size + name_length + extra_length
    if signature != b"PK\x03\x04" or start + entry.file_size > chunk.length:
        raise zipfile.BadZipFile(f"{entry.filename} is not in the archive")
    return chunk.start + start, entry.file_size


def _tensor_of(call: Any) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Return type, key of the storage, offset, shape and strides from ``torch.save``'s record of a tensor."""
    if isinstance(call, PickledObject) and call.global_name == _PARAMETER:
        call = call.arguments[0]
    if not isinstance(call, PickledObject) or call.global_name not in _REBUILD:
        name = f"{call.global_name}" if isinstance(call, PickledObject) else repr(call)
        raise ValueError(f"it holds {name[:100]}, which was not executed")
    storage, offset, shape, strides, _, _, *more = call.arguments
    if not isinstance(storage, PersistentId):
        raise TypeError("it has no storage")
    kind, storage_class, key, _, _ = storage.value
    if kind != "storage" or not isinstance(key, str) or not isinstance(storage_class, GlobalName):
        raise ValueError("it has no storage")
    if _REBUILD[call.global_name]:
        dtype = more[0].name if isinstance(more[0], GlobalName) and more[0].module == "torch" else ""
    else:
        dtype = _STORAGES.get(storage_class.name, storage_class.name) if storage_class.module == "torch" else ""
    numbers = (offset, *shape, *strides)
    if dtype not in DTYPES or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"its type is {storage_class.name}")
    return dtype, key, offset, tuple(shape), tuple(strides)
