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
from pipeproof.state.codes import StateError
from pipeproof.state.header import read_header
from pipeproof.state.index import ShardFile, TensorEntry
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
    arrays = read_header(path).arrays
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}", _MEND) from error
    return {
        name: ByteArray(one.dtype, one.shape, content[one.start : one.start + one.num_bytes])
        for name, one in arrays.items()
    }


def require_whole(directory: Path, file: ShardFile, tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse a file that is not what the index says of it.

    Raises:
        StateError: it is missing, shorter or longer, has other content, or holds other tensors.
    """
    path = directory / file.name
    try:
        size = regular_size(path)
    except FileNotFoundError as error:
        first = file.shards[0].tensor if file.shards else "nothing"
        raise StateError(f"{path} is missing; it holds {len(file.shards)} tensors, {first} first", _MEND) from error
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}", _MEND) from error
    if size != file.size_bytes:
        how = "cut short" if size < file.size_bytes else "longer"
        raise StateError(f"{path} is {how}: it has {size} bytes, and the index says {file.size_bytes}", _MEND)
    try:
        sha256 = digest_of(path)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}", _MEND) from error
    if sha256 != file.sha256:
        raise StateError(f"{path} was changed: its SHA-256 is not the {file.sha256[:12]}.. of the index", _MEND)
    _require_header(path, file, tensors)


def _require_header(path: Path, file: ShardFile, tensors: Mapping[str, TensorEntry]) -> None:
    found = read_header(path).arrays
    for shard in file.shards:
        name, key = shard.tensor, file.key_of(shard.tensor)
        if name not in tensors or key not in found:
            where = "the index has no tensor of that name" if key in found else "it is not there"
            raise StateError(f"{path} is to hold {name}, and {where}", _MEND)
        part = found[key]
        is_now = part.dtype, part.shape or (1,)  # Paddle's numbers have one dim
        if is_now != (tensors[name].dtype, shard.shape or (1,)):
            message = f"{path} has {name} as {is_now[0]} {list(is_now[1])}"
            raise StateError(f"{message}, and the index says {tensors[name].dtype} {list(shard.shape)}", _MEND)


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
