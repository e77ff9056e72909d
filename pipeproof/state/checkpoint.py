"""A checkpoint of any origin: its tensors, their shards on disk, and the one reader of their content.

Resume, comparison, reshard and digests read regions of tensors with it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pipeproof.diagnostics.problems import grouped
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.byte_ranges import Bits, ByteRange, RangeReader, bits_dtype
from pipeproof.state.regions import Region, TilingFault, flat_regions, intersect, tiling_fault
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import Shard, ShardFile, StateIndex, TensorEntry
from pipeproof.state.torch_archive import TorchArchive

SUFFIX = ".safetensors"
FIX = "copy the checkpoint again from where it was saved, or name another one"
"""Suggested fix for damaged files."""


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard and its holder: the rank that has or wrote it, if known, or else a file.

    ``start`` is the byte of the file where its first element is, or where ``archive`` begins, which PyTorch saved.
    """

    shard: Shard
    rank: int | None
    file: Path
    start: int = 0
    archive: TorchArchive | None = None

    @property
    def where(self) -> str:
        """Text for messages, such as ``rank 3``."""
        return self.file.name if self.rank is None else f"rank {self.rank}"


ShardsByTensor = Mapping[str, tuple[HeldShard, ...]]
"""Shards by tensor."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was opened."""

    path: Path
    kind: str
    """``state``, ``merged`` (whole tensors in one file or several), ``flex`` (Paddle's), ``unified`` (PaddleNLP's) or
    ``dcp`` (PyTorch's)."""
    tensors: Mapping[str, TensorEntry]
    """Whole tensors by name."""
    shards: ShardsByTensor
    files: Mapping[Path, ShardFile | None]
    """All files, each with its entry in the index, if any."""
    index: StateIndex | None
    """Index of a state; for a merged file the index in its provenance file, if it has the file's tensors."""
    others: tuple[str, ...] = ()
    """Names of other stored objects than tensors of model and optimizer, such as learning rates and RNG states."""

    def has_sha256(self, file: Path) -> bool:
        """Return True if an index has a SHA-256 to compare the content of a file with."""
        return self.files[file] is not None


class _StoredTensor(NamedTuple):
    """Byte ranges of a tensor; the columns ``starts`` and ``stops``, [ranges, dims], find what overlaps a region."""

    ranges: tuple[ByteRange, ...]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


class CheckpointReader:
    """The reader of a checkpoint's tensors by region, from any files; threads may share it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stored: dict[str, _StoredTensor] = {}

    def read(
        self,
        files: RangeReader,
        name: str,
        region: Region,
        out: Bits,
        convert: Callable[[Bits], Bits] | None = None,
    ) -> None:
        """Copy the stored part of a tensor's region into ``out``, of the region's extents and any strides.

        For ``convert`` see ``RangeReader.read_region``.

        Raises:
            StateError: A file cannot be read, or is too short.
        """
        for stored in self._overlapping(name, region):
            common = intersect(stored.region, region)
            assert common is not None, "it overlaps"
            target = out[common.relative_to(region).slices]
            files.read_region(stored, common.relative_to(stored.region), target, convert)

    def files_of(self, name: str, region: Region) -> set[Path]:
        """Return the files that have elements of a region of a tensor."""
        return {stored.path for stored in self._overlapping(name, region)}

    def _overlapping(self, name: str, region: Region) -> Iterator[ByteRange]:
        stored = self._stored.get(name)
        if stored is None:
            stored = self._stored[name] = self._locate(name)
        meets = (np.maximum(stored.starts, region.offsets) < np.minimum(stored.stops, region.stops)).all(axis=1)
        return (stored.ranges[number] for number in np.flatnonzero(meets))

    def _locate(self, name: str) -> _StoredTensor:
        entry = self._checkpoint.tensors[name]
        bits = bits_dtype(entry.dtype)
        ranges = tuple(
            ByteRange(held.file, held.start + first * bits.itemsize, region, bits, held.archive)
            for held in self._checkpoint.shards.get(name, ())
            for first, region in held.shard.regions()
        )
        shape = len(ranges), len(entry.shape)
        starts = np.array([stored.region.offsets for stored in ranges], np.int64).reshape(shape)
        stops = np.array([stored.region.stops for stored in ranges], np.int64).reshape(shape)
        return _StoredTensor(ranges, starts, stops)


def sharding_fault(shape: Sequence[int], shards: Sequence[Shard]) -> TilingFault | None:
    """Return the first region of a tensor that shards do not hold once, with the numbers of its holders.

    None if the shards are a bijection onto the tensor. Shards with another number of dims are outside of it.
    """
    for number, shard in enumerate(shards):
        if len(shard.extents) != len(shape):
            return TilingFault(Region(shard.offsets, shard.extents), 1, (number,))
    if _whole_regions_tile(shape, shards):
        return None
    held = [(number, region) for number, shard in enumerate(shards) for _, region in shard.regions()]
    fault = tiling_fault(shape, [region for _, region in held])
    return None if fault is None else fault._replace(holders=tuple(held[number][0] for number in fault.holders))


def _whole_regions_tile(shape: Sequence[int], shards: Sequence[Shard]) -> bool:
    """Return True if the shards' regions tile the tensor, and flat ranges each region.

    All plans shard so, and this is a fast check.
    """
    ranges = grouped((Region(shard.offsets, shard.extents), shard.flat or (0, prod(shard.extents))) for shard in shards)
    for region, flat in ranges.items():
        ends = [(0, 0), *sorted(flat), (region.numel, region.numel)]
        if any(held[1] != next_one[0] for held, next_one in pairwise(ends)):
            return False
    return tiling_fault(shape, list(ranges)) is None


def require_tiled(checkpoint: Checkpoint, name: str) -> None:
    """Refuse a tensor with an element that is stored nowhere, or in several places.

    Raises:
        StateError: There is one.
    """
    entry, shards = checkpoint.tensors[name], checkpoint.shards.get(name, ())
    fault = sharding_fault(entry.shape, [held.shard for held in shards])
    if fault is None:
        return
    where = " and ".join(sorted({str(shards[number].file) for number in fault.holders})[:2]) or "no file"
    raise StateError(
        f"{checkpoint.path}: of {name}, {list(entry.shape)}, the region of {list(fault.region.extents)} "
        f"from {list(fault.region.offsets)} on is stored in {where}, and must be stored once",
        "the index was changed, or a file of another checkpoint lies there: copy it again from where it was saved",
    )


BLOCK = 2**24
"""Most bytes of a tensor that are in memory at once."""


def tensor_blocks(checkpoint: Checkpoint, name: str, block_bytes: int = BLOCK) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of a whole tensor in C order, at most ``block_bytes`` at once (but at least one element).

    Each block overwrites the one before.

    Raises:
        StateError: The shards do not make up the tensor, or a file cannot be read or is too short.
    """
    require_tiled(checkpoint, name)
    entry, reader = checkpoint.tensors[name], CheckpointReader(checkpoint)
    bits, numel, row = bits_dtype(entry.dtype), prod(entry.shape), prod(entry.shape[1:])
    most = max(1, block_bytes // bits.itemsize)
    step = most // row * row or most if row else most  # whole rows if one fits: fewer and longer reads
    buffer = np.empty(min(step, numel), bits)
    with RangeReader(FIX) as files:
        for begin in range(0, numel, step):
            end, done = min(begin + step, numel), 0
            for region in flat_regions(entry.shape, (begin, end)):
                reader.read(files, name, region, buffer[done : done + region.numel].reshape(region.extents))
                done += region.numel
            yield buffer[: end - begin].view(np.uint8)


_MOST_AT_ONCE = 8
_Result = TypeVar("_Result")


def entry_bytes(entry: TensorEntry) -> int:
    """Return the bytes of a whole tensor."""
    return prod(entry.shape) * dtype_bytes(entry.dtype)


def tensor_md5s(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the MD5 of each whole tensor by name, in the order of names.

    The digest covers the bytes in C order, like ``hashlib.md5(array.tobytes())`` and Paddle's ``tensor._md5sum()``. So
    it is equal for checkpoints of different topologies, and in other tools.

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
        results = dict(zip(largest_first, pool.map(work, largest_first), strict=True))
    return {name: results[name] for name in sorted(results)}
