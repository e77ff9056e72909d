"""A checkpoint of any origin.

Its tensors, their shards on disk, and their content as bytes in C order, block by block.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.byte_ranges import FileArray, RangeReader
from pipeproof.state.cast import Bits, bits_dtype
from pipeproof.state.regions import Region, flat_regions, intersect, tiling_fault
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import Shard, ShardFile, StateIndex, TensorEntry

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard on disk. ``start`` is the byte of the file where its first element is."""

    shard: Shard
    file: Path
    key: str
    """The tensor's name in that file."""
    start: int
    rank: int | None
    """The rank that wrote it, where that is known."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was opened."""

    path: Path
    kind: str
    """``state``, ``merged`` (whole tensors in one file or several), ``flex`` (Paddle's) or ``dcp`` (PyTorch's)."""
    tensors: Mapping[str, TensorEntry]
    """Whole tensors by name."""
    shards: Mapping[str, tuple[StoredShard, ...]]
    """Shards by tensor."""
    files: Mapping[Path, ShardFile | None]
    """All files, each with its entry in the index, where there is one."""
    index: StateIndex | None
    """Index of a state; of a merged file the one in its provenance file, if it has the file's tensors."""
    others: tuple[str, ...] = ()
    """Names of what is stored next to the tensors of model and optimizer, such as learning rates and RNG states."""
    crcs: Mapping[StoredShard, int] = field(default_factory=lambda: MappingProxyType({}))
    """CRC-32 of the content of each shard, where its file has one; -1 where it covers more than the shard."""

    def has_sha256(self, file: Path) -> bool:
        """Return True if an index has a SHA-256 to compare the content of a file with."""
        return self.files[file] is not None


BLOCK = 2**24
"""Most bytes of a tensor that are in memory at once."""
_FIX_CONTENT = "copy the file again from where it was saved, or name another checkpoint"


@dataclass(frozen=True, slots=True)
class StoredRegion:
    """A region of a whole tensor that is stored in C order in one file, as an array of its extents."""

    region: Region
    array: FileArray


def stored_regions_of(stored: StoredShard, dtype: str) -> Iterator[StoredRegion]:
    """Yield a shard as regions that are one byte range of its file each; ``dtype`` is the type of the elements."""
    bits = bits_dtype(dtype)
    for first, region in stored.shard.regions():
        yield StoredRegion(region, FileArray(stored.file, stored.start + first * bits.itemsize, region.extents, bits))


def read_stored_regions(
    reader: RangeReader,
    stored_regions: Iterable[StoredRegion],
    region: Region,
    out: Bits,
    convert: Callable[[Bits], Bits] | None = None,
) -> None:
    """Copy what the stored regions have of ``region`` into ``out``, of the region's extents and any strides.

    ``convert`` is as in ``RangeReader.read_region``.

    Raises:
        StateError: A file cannot be read, or is too short.
    """
    for stored in stored_regions:
        common = intersect(stored.region, region)
        if common is not None:
            reader.read_region(
                stored.array, common.relative_to(stored.region), out[common.relative_to(region).slices], convert
            )


def require_tiled(checkpoint: Checkpoint, name: str) -> list[StoredRegion]:
    """Return the stored regions of a tensor, which hold every element exactly once.

    Raises:
        StateError: An element is stored nowhere, or in several places.
    """
    entry = checkpoint.tensors[name]
    stored_regions = [
        region for shard in checkpoint.shards.get(name, ()) for region in stored_regions_of(shard, entry.dtype)
    ]
    fault = tiling_fault(entry.shape, [stored.region for stored in stored_regions])
    if fault is None:
        return stored_regions
    where = " and ".join(sorted({str(stored_regions[number].array.path) for number in fault.holders})[:2]) or "no file"
    raise StateError(
        f"{checkpoint.path}: of {name}, {list(entry.shape)}, the region of {list(fault.region.extents)} "
        f"from {list(fault.region.offsets)} on is stored in {where}, and must be stored once",
        "the index was changed, or a file of another checkpoint lies there: copy it again from where it was saved",
    )


def tensor_blocks(checkpoint: Checkpoint, name: str, block_bytes: int = BLOCK) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of a whole tensor in C order, at most ``block_bytes`` at once (but at least one element).

    Each block overwrites the one before.

    Raises:
        StateError: The shards do not make up the tensor, or a file cannot be read or is too short.
    """
    entry = checkpoint.tensors[name]
    bits, stored_regions = bits_dtype(entry.dtype), require_tiled(checkpoint, name)
    numel, row = prod(entry.shape), prod(entry.shape[1:])
    most = max(1, block_bytes // bits.itemsize)
    step = most // row * row or most if row else most  # whole rows where one fits: fewer and longer reads
    buffer = np.empty(min(step, numel), bits)
    with RangeReader(_FIX_CONTENT) as reader:
        for begin in range(0, numel, step):
            end, done = min(begin + step, numel), 0
            for region in flat_regions(entry.shape, (begin, end)):
                read_stored_regions(
                    reader, stored_regions, region, buffer[done : done + region.numel].reshape(region.extents)
                )
                done += region.numel
            yield buffer[: end - begin].view(np.uint8)


_MOST_AT_ONCE = 8
_Result = TypeVar("_Result")


def entry_bytes(entry: TensorEntry) -> int:
    """Return the bytes of a whole tensor."""
    return prod(entry.shape) * dtype_bytes(entry.dtype)


def tensor_md5s(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the MD5 of each whole tensor by name, in the order of names.

    The digest is that of the bytes in C order, as ``hashlib.md5(array.tobytes())`` and Paddle's ``tensor._md5sum()``
    give. So checkpoints of different topologies, and other tools, agree on it.

    Raises:
        StateError: A file cannot be read, or the shards of a tensor do not make it up.
    """

    def md5_of(name: str) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        for block in tensor_blocks(checkpoint, name):
            digest.update(block.data)
        return digest.hexdigest()

    return over_tensors(md5_of, checkpoint.tensors)


def md5_lines(digests: Mapping[str, str]) -> str:
    """Return ``name  md5``, one line each, in the order of names."""
    return "".join(f"{name}  {digests[name]}\n" for name in sorted(digests))


def md5_of_all(digests: Mapping[str, str]) -> str:
    """Return one digest of all tensors: the MD5 of ``md5_lines``."""
    return hashlib.md5(md5_lines(digests).encode(), usedforsecurity=False).hexdigest()


def over_tensors(work: Callable[[str], _Result], tensors: Mapping[str, TensorEntry]) -> dict[str, _Result]:
    """Return the results of ``work`` for each tensor, in the order of names.

    Several threads work, because reading and hashing release the lock.
    """
    largest_first = sorted(tensors, key=lambda name: (-entry_bytes(tensors[name]), name))
    with ThreadPoolExecutor(min(_MOST_AT_ONCE, os.cpu_count() or 1)) as pool:
        results = dict(zip(largest_first, _results_in_order(pool, work, largest_first), strict=True))
    return {name: results[name] for name in sorted(results)}


def _results_in_order(
    pool: ThreadPoolExecutor, work: Callable[[str], _Result], names: Iterable[str]
) -> Iterable[_Result]:
    futures = [pool.submit(work, name) for name in names]
    try:
        return [future.result() for future in futures]
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
