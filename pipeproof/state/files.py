"""Files of arrays as bytes: written whole, read whole, and looked at before. The format is safetensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.codes import StateError, reading
from pipeproof.state.header import read_header, require_array
from pipeproof.state.index import ShardFile, TensorEntry
from pipeproof.state.ranges import RangeReader
from pipeproof.state.regular import regular_size

_BLOCK = 2**20
_MEND = "name an older state (`--resume DIR/step-..`), or copy the file anew from where it was saved"


@dataclass(frozen=True, slots=True)
class ByteArray:
    """An array without a framework: numpy has no type for 16 bits of which 8 are the exponent."""

    dtype: str
    shape: tuple[int, ...]
    content: npt.NDArray[np.uint8]
    """The elements in C order."""


def write_file(path: Path, arrays: Mapping[str, ByteArray]) -> tuple[int, str]:
    """Write a file to the disk itself; its size in bytes and SHA-256."""
    specs, kept = {}, []
    for name, array in arrays.items():
        content = np.ascontiguousarray(array.content)
        assert content.nbytes == prod(array.shape) * dtype_bytes(array.dtype), name
        kept.append(content)  # alive until it is written: the library is given addresses
        specs[name] = TensorSpec(
            dtype=array.dtype, shape=array.shape, data_ptr=content.ctypes.data, data_len=content.nbytes
        )
    path.touch()
    mode = path.stat().st_mode  # by the umask, as other files of a state; the library's are for their owner alone
    serialize_file(specs, path)
    path.chmod(mode)
    sync(path)
    return path.stat().st_size, digest_of(path)


def read_file(path: Path) -> dict[str, ByteArray]:
    """All arrays of a file by name.

    Raises:
        StateError: it is not there, or no such file.
    """
    header = read_header(path)
    content = np.empty(header.size_bytes, np.uint8)
    with RangeReader(_MEND) as reader:
        reader.read(path, 0, content)
    return {
        name: ByteArray(one.dtype, one.shape, content[one.start : one.start + one.num_bytes])
        for name, one in header.arrays.items()
    }


def require_whole(directory: Path, file: ShardFile, tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse a file that is not what the index says of it.

    Raises:
        StateError: it is missing, shorter or longer, has other content, or holds other tensors.
    """
    path = directory / file.name
    with reading(path, _MEND):
        try:
            size = regular_size(path)
        except FileNotFoundError as error:
            first = file.shards[0].tensor if file.shards else "nothing"
            raise StateError(f"{path} is missing; it holds {len(file.shards)} tensors, {first} first", _MEND) from error
    if size != file.size_bytes:
        how = "cut short" if size < file.size_bytes else "longer"
        raise StateError(f"{path} is {how}: it has {size} bytes, and the index says {file.size_bytes}", _MEND)
    require_sha256(path, file.sha256, _MEND)
    _require_header(path, file, tensors)


def _require_header(path: Path, file: ShardFile, tensors: Mapping[str, TensorEntry]) -> None:
    header = read_header(path)
    for shard in file.shards:
        if shard.tensor not in tensors:
            message = f"{path} is to hold {shard.tensor}, and the index has no tensor of that name"
            raise StateError(message, _MEND)
        require_array(path, header, file.key_of(shard.tensor), tensors[shard.tensor].dtype, shard.shape, _MEND)


def require_sha256(path: Path, sha256: str, mend: str, between: Callable[[], None] = lambda: None) -> None:
    """Refuse a file whose SHA-256 is not that of the index; ``between`` is as for ``digest_of``.

    Raises:
        StateError: it has another one, or cannot be read.
    """
    with reading(path, mend):
        found = digest_of(path, between)
    if found != sha256:
        raise StateError(f"{path} was changed: its SHA-256 is not the {sha256[:12]}.. of the index", mend)


def digest_of(path: Path, between: Callable[[], None] = lambda: None, start: bytes = b"") -> str:
    """The SHA-256 of a file, with ``start`` in place of as many of its first bytes.

    ``between`` is called between blocks, and may raise.
    """
    digest = hashlib.sha256(start)
    with path.open("rb") as stream:
        stream.seek(len(start))
        while block := stream.read(_BLOCK):
            digest.update(block)
            between()
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Make a file, or the entries of a directory, outlive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
