"""Safetensors files: written and read whole, and checked against the SHA-256 of an index."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeproof.state.byte_ranges import RangeReader
from pipeproof.state.safetensors_header import make_header, read_header, require_array
from pipeproof.state.state_codes import StateError, reading, regular_size
from pipeproof.state.state_index import ShardFile, TensorEntry
from pipeproof.system_calls import sync

_BLOCK = 2**20
_FIX = "name an older state (`--resume DIR/step-..`), or copy the file again from where it was saved"


@dataclass(frozen=True, slots=True)
class ByteArray:
    """An array without a framework, because numpy has no bfloat16."""

    dtype: str
    shape: tuple[int, ...]
    content: npt.NDArray[np.uint8]
    """The elements in C order."""


def write_file(path: Path, arrays: Mapping[str, ByteArray]) -> tuple[int, str]:
    """Write a file and sync it to the disk; return its size in bytes and its SHA-256."""
    start, header = make_header({name: (array.dtype, array.shape) for name, array in arrays.items()}, {})
    digest = hashlib.sha256()
    with path.open("wb", buffering=0) as stream:
        for content in (
            memoryview(start),
            *(np.ascontiguousarray(arrays[name].content).data for name in header.arrays),
        ):
            digest.update(content)
            write_all(stream.fileno(), content)
    sync(path)
    size = path.stat().st_size
    assert size == header.size_bytes, f"an array of {path} has not the size of its shape"
    return size, digest.hexdigest()


def write_all(handle: int, content: memoryview) -> None:
    """Write all bytes: Linux writes at most 2 GiB at once, and a network disk may accept less."""
    while content:
        content = content[os.write(handle, content) :]


def read_file(path: Path) -> dict[str, ByteArray]:
    """Return all arrays of a file by name.

    Raises:
        StateError: The file is missing, or is no safetensors file.
    """
    header = read_header(path)
    content = np.empty(header.size_bytes, np.uint8)
    with RangeReader(_FIX) as reader:
        reader.read(path, 0, content)
    return {
        name: ByteArray(array.dtype, array.shape, content[array.start : array.start + array.num_bytes])
        for name, array in header.arrays.items()
    }


def require_whole(path: Path, file: ShardFile, tensors: Mapping[str, TensorEntry]) -> None:
    """Refuse a file at ``path`` that does not match its entry in the index.

    Raises:
        StateError: The file is missing, shorter or longer, has other content, or holds other tensors.
    """
    with reading(path, _FIX):
        try:
            size = regular_size(path)
        except FileNotFoundError as error:
            first = file.shards[0].tensor if file.shards else "nothing"
            raise StateError(f"{path} is missing; it holds {len(file.shards)} tensors, {first} first", _FIX) from error
    if size != file.size_bytes:
        how = "cut short" if size < file.size_bytes else "longer"
        raise StateError(f"{path} is {how}: it has {size} bytes, and {file.size_bytes} in the index", _FIX)
    require_sha256(path, file.sha256, _FIX)
    _require_header(path, file, tensors)


def _require_header(path: Path, file: ShardFile, tensors: Mapping[str, TensorEntry]) -> None:
    header = read_header(path)
    for shard in file.shards:
        if shard.tensor not in tensors:
            message = f"{path} must hold {shard.tensor}, and the index has no tensor of that name"
            raise StateError(message, _FIX)
        require_array(path, header, file.key_of(shard.tensor), tensors[shard.tensor].dtype, shard.shape, _FIX)


def require_sha256(path: Path, sha256: str, fix: str, on_block: Callable[[], None] = lambda: None) -> None:
    """Refuse a file whose SHA-256 is not that of the index; ``on_block`` is as in ``digest_of``.

    Raises:
        StateError: The SHA-256 differs, or the file cannot be read.
    """
    with reading(path, fix):
        actual = digest_of(path, on_block)
    if actual != sha256:
        raise StateError(f"{path} was changed: its SHA-256 is not the {sha256[:12]}.. of the index", fix)


def digest_of(path: Path, on_block: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file; ``on_block`` is called between blocks, and may raise."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            on_block()
    return digest.hexdigest()
