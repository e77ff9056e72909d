"""Writing the files of a reshard: several threads, each writes one file from front to back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Event, Lock
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.byte_ranges import Bits, RangeReader, bits_dtype, cast, require_sha256, write_all
from pipeproof.state.checkpoint import Checkpoint, CheckpointReader
from pipeproof.state.regions import NO_DIM, Region, flat_regions
from pipeproof.state.reshard.reshard_codes import writing
from pipeproof.state.safetensors_header import Header, make_header
from pipeproof.state.state_index import Shard, ShardFile, TensorEntry
from pipeproof.state.tensor_map import RegionCopy, StateMap, TensorMap, copies_into, inverse_permutation
from pipeproof.system_calls import forget_cached

# --- Reading of a target's elements from a checkpoint by a map: copies are transposed and cast on the way ---


class MappedReader:
    """A checkpoint's tensors as a map reads them; threads may share it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._reader = checkpoint, CheckpointReader(checkpoint)
        self.files_of = self._reader.files_of

    def fill(self, files: RangeReader, out: Bits, tensor: TensorMap, shard: Shard, begin: int) -> None:
        """Write the elements of a target shard from ``begin`` on, flattened in C order, into ``out`` of one dim.

        Raises:
            StateError: A file cannot be read, or is too short.
        """
        done = 0
        for region in flat_regions(shard.extents, (begin, begin + out.size)):
            whole = region.shifted(shard.offsets)
            values = out[done : done + region.numel].reshape(region.extents)
            for copy in copies_into(tensor, whole):
                self._fill_copy(files, values[copy.region.relative_to(whole).slices], copy)
            done += region.numel

    def _fill_copy(self, files: RangeReader, out: Bits, copy: RegionCopy) -> None:
        """Fill ``out``, which has the dims of the target."""
        if copy.source is None:
            out[...] = 0
            return
        if copy.permutation is not None:  # seen with the dims of the source
            out = _as_source(out, copy.permutation, len(copy.source_region.extents))
        dtype = self._checkpoint.tensors[copy.source].dtype
        convert = _casting(dtype, copy.casts) if copy.casts else None
        self._reader.read(files, copy.source, copy.source_region, out, convert)


def _casting(dtype: str, casts: tuple[str, ...]) -> Callable[[Bits], Bits]:
    """Return the function that applies several casts, one after the other, to elements of a type."""

    def cast_all(values: Bits) -> Bits:
        values, was = np.ascontiguousarray(values), dtype
        for to in casts:
            values, was = cast(values, was, to), to
        return values

    return cast_all


def _as_source(out: Bits, permutation: tuple[int, ...], num_dims: int) -> Bits:
    """Return a view of a target region in the dims of the source; a dim of one side only is one element long."""
    named = out[(*(0 if dim == NO_DIM else slice(None) for dim in permutation), ...)]
    order = [dim for dim in permutation if dim != NO_DIM]
    in_order = named.transpose(inverse_permutation(tuple(sorted(order).index(dim) for dim in order)))
    return in_order[(*(slice(None) if dim in order else None for dim in range(num_dims)), ...)]


_BLOCKS_BYTES = 2**26
"""Most bytes of tensors that all threads hold: each a block of its target, and as much of the source."""
_WRITE_BACK_BYTES = 2**25
"""After so many bytes the disk starts writing: it then works all the time and not only at the end."""


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """The files to be written."""

    files: Mapping[str, tuple[Shard, ...]]
    """Shards by file name."""
    tensors: Mapping[str, TensorEntry]
    ranks: Mapping[str, int]
    """Ranks by file name."""
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Metadata of each file's header."""
    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Keys by tensor, if they differ from the names, as in Paddle's files. Paddle's scalars have one dim."""

    def header_of(self, file: str) -> tuple[bytes, Header]:
        """Return the first bytes of a file, and its header."""
        names, number = [shard.tensor for shard in self.files[file]], (1,) if self.keys else ()
        arrays = ((self.tensors[shard.tensor].dtype, shard.shape or number) for shard in self.files[file])
        return make_header(dict(zip(map(self.key_of, names), arrays, strict=True)), self.metadata)

    def key_of(self, tensor: str) -> str:
        """Return the key of a tensor in the files."""
        return self.keys.get(tensor, tensor)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return sum(
            prod(shard.shape) * dtype_bytes(self.tensors[shard.tensor].dtype)
            for shards in self.files.values()
            for shard in shards
        )


def write_target(
    source: Checkpoint,
    state_map: StateMap,
    target: TargetFiles,
    directory: Path,
    report_progress: Callable[[int, int], None],
    jobs: int,
) -> tuple[ShardFile, ...]:
    """Write the target's files into ``directory``, synced to the disk; return their index entries.

    Any thread calls ``report_progress`` with the bytes done and in all. The source files have the SHA-256 of the
    source's index or provenance.

    Raises:
        StateError: A file of the source was changed, or cannot be read.
        RefusedError: A file cannot be written.
    """
    writer = _TargetWriter(source, state_map, target, directory, report_progress, jobs)
    with ThreadPoolExecutor(jobs, "reshard") as pool:
        tasks: list[Future[Any]] = []
        written: dict[str, Future[ShardFile]] = {}
        verified_paths: set[Path] = set()
        for name in target.files:
            needed = writer.sources_of(name)
            if len(target.files) < jobs:  # a file with its own thread takes longest, and must not begin last
                written[name] = pool.submit(writer.write, name)
            tasks += [pool.submit(writer.verify, path) for path in sorted(needed - verified_paths)]
            if name not in written:  # its sources are read from the disk once, in sequence, then again from the cache
                written[name] = pool.submit(writer.write, name)
            tasks.append(written[name])
            verified_paths |= needed
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
            failures = [task for task in tasks if task.done() and task.exception() is not None]
            for task in failures:
                task.result()
        finally:
            writer.stop.set()
            pool.shutdown(cancel_futures=True)
    return tuple(written[name].result() for name in target.files)


class _StoppedError(Exception):
    """Another thread failed, or the user interrupts."""


class _TargetWriter:
    """One reshard, whose threads share the regions of the source's tensors and the progress."""

    def __init__(
        self, source: Checkpoint, state_map: StateMap, target: TargetFiles, directory: Path,
        report_progress: Callable[[int, int], None], jobs: int,
    ) -> None:  # fmt: skip
        self._block_bytes = _BLOCKS_BYTES // (2 * jobs)
        self._checkpoint, self._source = source, MappedReader(source)
        self._map, self._target, self._directory = state_map, target, directory
        self._report_progress, self._done, self._all, self._lock = report_progress, 0, target.size_bytes, Lock()
        self._verified: dict[Path, Future[None]] = {}
        self.stop = Event()

    def sources_of(self, name: str) -> set[Path]:
        """Return the files with a SHA-256 that a target file is made of."""
        return {
            path
            for shard in self._target.files[name]
            for copy in copies_into(self._map.tensors[shard.tensor], Region(shard.offsets, shard.extents))
            if copy.source is not None
            for path in self._source.files_of(copy.source, copy.source_region)
            if self._checkpoint.has_sha256(path)
        }

    def verify(self, path: Path) -> None:
        """Check a source file against its SHA-256, or wait for the thread that does."""
        with self._lock:
            is_first = path not in self._verified
            verified = self._verified.setdefault(path, Future())
        if is_first:
            try:
                self._require_sha256(path)
            except BaseException as error:
                verified.set_exception(error)
                raise
            verified.set_result(None)
        verified.result()

    def _require_sha256(self, path: Path) -> None:
        entry = self._checkpoint.files[path]
        assert entry is not None, "only files with a SHA-256 are verified"
        require_sha256(path, entry.sha256, _FIX, self._require_not_stopped)

    def write(self, name: str) -> ShardFile:
        """Write one file; its sources are known to be whole at the end."""
        start, header = self._target.header_of(name)
        digest, position, synced = hashlib.sha256(start), len(start), 0
        path = self._directory / name
        with writing(path), path.open("wb", buffering=0) as stream:
            handle = stream.fileno()
            write_all(handle, memoryview(start))
            for block in self._blocks(name, header):
                self._require_not_stopped()
                digest.update(block.data)
                write_all(handle, block.data.cast("B"))
                position += block.nbytes
                if position - synced >= _WRITE_BACK_BYTES:  # begins to write what is not on the disk, forgets what is
                    forget_cached(handle, max(0, 2 * synced - position))
                    synced = position
                self._add_progress(block.nbytes)
            os.fsync(handle)
        for path in sorted(self.sources_of(name)):
            self.verify(path)
        shards, rank = self._target.files[name], self._target.ranks[name]
        keys = {shard.tensor: key for shard in shards if (key := self._target.key_of(shard.tensor)) != shard.tensor}
        return ShardFile(
            name=name,
            rank=rank,
            size_bytes=header.size_bytes,
            sha256=digest.hexdigest(),
            shards=shards,
            keys=keys or None,
        )

    def _blocks(self, name: str, header: Header) -> Iterator[Bits]:
        """Yield a file behind its first bytes, in its order; each block of elements overwrites the one before."""
        buffer = np.empty(self._block_bytes, np.uint8)
        shards = {self._target.key_of(shard.tensor): shard for shard in self._target.files[name]}
        with RangeReader(_FIX, self._block_bytes) as reader:
            for key, array in header.arrays.items():
                shard, dtype = shards[key], bits_dtype(array.dtype)
                begin, end = shard.flat or (0, prod(shard.extents))
                step = buffer.nbytes // dtype.itemsize
                for element in range(begin, end, step):
                    block = buffer[: (min(element + step, end) - element) * dtype.itemsize].view(dtype)
                    self._source.fill(reader, block, self._map.tensors[shard.tensor], shard, element)
                    yield block

    def _add_progress(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._report_progress(self._done, self._all)

    def _require_not_stopped(self) -> None:
        if self.stop.is_set():
            raise _StoppedError


_FIX = "copy the file again from where it was saved, or name an older state"
