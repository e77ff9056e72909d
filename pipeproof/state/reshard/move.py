"""Moving a checkpoint's elements into other files, which several threads write, each from front to back."""

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

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.boxes import Box
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.files import require_sha256
from pipeproof.state.header import Header, make_header
from pipeproof.state.index import Shard, ShardFile, TensorEntry
from pipeproof.state.mapping import StateMap, slabs_of
from pipeproof.state.ranges import RangeReader
from pipeproof.state.reshard.cast import Bits, bits_dtype
from pipeproof.state.reshard.refused import writing
from pipeproof.state.reshard.source import Source
from pipeproof.state.seal import place_of_seal, require_sealed

_BLOCKS_BYTES = 2**26
"""Most bytes of tensors that all threads hold: each a block of its target, and as much of the source."""
_WRITE_BACK_BYTES = 2**25
"""After so many the disk is told to begin, so that it works all the time and not at the end alone."""


@dataclass(frozen=True, slots=True)
class Target:
    """The files that are to be written."""

    files: Mapping[str, tuple[Shard, ...]]
    """By file name what it holds."""
    tensors: Mapping[str, TensorEntry]
    ranks: Mapping[str, int]
    """By file name its rank."""
    metadata: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What each file's header says beside; if it has room for a seal (see ``state.seal``), the file gets one."""
    keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """By tensor its key in the files, as Paddle has them; else its name. Paddle's numbers have one dim."""

    def header_of(self, file: str) -> tuple[bytes, Header]:
        """The beginning of a file, and what stands where in it."""
        shards = self.files[file]
        number = (1,) if self.keys else ()
        arrays = {self.key_of(one.tensor): (self.tensors[one.tensor].dtype, one.shape or number) for one in shards}
        return make_header(arrays, self.metadata)

    def key_of(self, tensor: str) -> str:
        """Under which key a file has its part of a tensor."""
        return self.keys.get(tensor, tensor)

    @property
    def size_bytes(self) -> int:
        """Of all elements."""
        return sum(
            prod(one.shape) * dtype_bytes(self.tensors[one.tensor].dtype)
            for shards in self.files.values()
            for one in shards
        )


def move(
    source: Checkpoint,
    state_map: StateMap,
    target: Target,
    directory: Path,
    tell: Callable[[int, int], None],
    jobs: int,
    finished: Mapping[str, ShardFile] = MappingProxyType({}),
    note: Callable[[ShardFile], None] = lambda _: None,
) -> tuple[ShardFile, ...]:
    """Write the target's files into ``directory``, each down to the disk; what the index has to say of them.

    ``tell`` is told bytes done and in all, by whichever thread. Files that are ``finished`` are left as they are;
    of each other one ``note`` is told when it is on the disk and the source's files that it is made of have the
    SHA-256 that the source's index, or they themselves, say.

    Raises:
        StateError: a file of the source was changed, or cannot be read.
        RefusedError: a file cannot be written.
    """
    mover = _Mover(source, state_map, target, directory, tell, jobs)
    with ThreadPoolExecutor(jobs, "reshard") as pool:
        tasks: list[Future[Any]] = []
        written: dict[str, Future[ShardFile]] = {}
        begun: set[Path] = set()
        for name in target.files:
            if name in finished:
                mover.told(finished[name])
                continue
            needed = mover.sources_of(name)
            if len(target.files) < jobs:  # a thread to itself takes longest, and is not to begin last
                written[name] = pool.submit(mover.write, name, note)
            tasks += [pool.submit(mover.verify, path) for path in sorted(needed - begun)]
            if name not in written:  # its sources are read once from the disk, one after the other, and then again
                written[name] = pool.submit(mover.write, name, note)
            tasks.append(written[name])
            begun |= needed
        try:
            wait(tasks, return_when=FIRST_EXCEPTION)
            failed = [task for task in tasks if task.done() and task.exception() is not None]
            for task in failed:
                task.result()
        finally:
            mover.stop.set()
            pool.shutdown(cancel_futures=True)
    return tuple(finished[name] if name in finished else written[name].result() for name in target.files)


class _StoppedError(Exception):
    """Another thread failed, or somebody interrupts."""


class _Mover:
    """One move, whose threads share where the source's tensors lie, and what is told."""

    def __init__(
        self, source: Checkpoint, state_map: StateMap, target: Target, directory: Path,
        tell: Callable[[int, int], None], jobs: int,
    ) -> None:  # fmt: skip
        self._block_bytes = _BLOCKS_BYTES // (2 * jobs)
        self._checkpoint, self._source = source, Source(source)
        self._map, self._target, self._directory = state_map, target, directory
        self._tell, self._done, self._all, self._lock = tell, 0, target.size_bytes, Lock()
        self._verified: dict[Path, Future[None]] = {}
        self.stop = Event()

    def sources_of(self, name: str) -> set[Path]:
        """The files with a SHA-256 that a target's file is made of, or may be."""
        return {
            path
            for shard in self._target.files[name]
            for slab in slabs_of(self._map.tensors[shard.tensor], Box(shard.offsets, shard.extents))
            if slab.source is not None
            for path in self._source.files_of(slab.source, slab.source_box)
            if self._checkpoint.has_sha256(path)
        }

    def verify(self, path: Path) -> None:
        """Hold a file of the source against its SHA-256, or wait for the thread that does."""
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
        if entry is None:
            require_sealed(path, self._checkpoint.seals[path], self._require_going_on)
        else:
            require_sha256(path, entry.sha256, _MEND, self._require_going_on)

    def write(self, name: str, note: Callable[[ShardFile], None]) -> ShardFile:
        """Write one file, and have it noted when its sources are known to be whole."""
        start, header = self._target.header_of(name)
        digest, at, told = hashlib.sha256(start), len(start), 0
        path = self._directory / name
        with writing(path), path.open("wb", buffering=0) as stream:
            handle = stream.fileno()
            _write(handle, memoryview(start))
            for block in self._blocks(name, header):
                self._require_going_on()
                digest.update(block.data)
                _write(handle, block.data.cast("B"))
                at += block.nbytes
                if at - told >= _WRITE_BACK_BYTES:  # begins to write what is not on the disk yet, forgets what is
                    os.posix_fadvise(handle, max(0, 2 * told - at), 0, os.POSIX_FADV_DONTNEED)
                    told = at
                self._count(block.nbytes)
            place = place_of_seal(start)
            if place >= 0:
                os.lseek(handle, place, os.SEEK_SET)
                _write(handle, memoryview(digest.hexdigest().encode()))
            os.fsync(handle)
        for path in sorted(self.sources_of(name)):
            self.verify(path)
        shards, rank = self._target.files[name], self._target.ranks[name]
        renamed = {one.tensor: key for one in shards if (key := self._target.key_of(one.tensor)) != one.tensor}
        file = ShardFile(
            name=name,
            rank=rank,
            size_bytes=header.size_bytes,
            sha256=digest.hexdigest(),
            shards=shards,
            keys=renamed or None,
        )
        note(file)
        return file

    def told(self, file: ShardFile) -> None:
        """Count a file that was finished before."""
        self._count(sum(array.num_bytes for array in self._target.header_of(file.name)[1].arrays.values()))

    def _blocks(self, name: str, header: Header) -> Iterator[Bits]:
        """The elements of a file in its order; a block is overwritten by the next one."""
        buffer = np.empty(self._block_bytes, np.uint8)
        shards = {self._target.key_of(shard.tensor): shard for shard in self._target.files[name]}
        with RangeReader(_MEND, self._block_bytes) as reader:
            for key, array in header.arrays.items():
                shard, dtype = shards[key], bits_dtype(array.dtype)
                begin, end = shard.flat or (0, prod(shard.extents))
                step = buffer.nbytes // dtype.itemsize
                for at in range(begin, end, step):
                    block = buffer[: (min(at + step, end) - at) * dtype.itemsize].view(dtype)
                    self._source.fill(reader, block, self._map.tensors[shard.tensor], shard, at)
                    yield block

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._tell(self._done, self._all)

    def _require_going_on(self) -> None:
        if self.stop.is_set():
            raise _StoppedError


def _write(handle: int, content: memoryview) -> None:
    """All of it: Linux writes at most 2 GiB at once, and a network's disk may take less."""
    while content:
        content = content[os.write(handle, content) :]


_MEND = "copy the file anew from where it was saved, or name an older state"
