"""Reading a checkpoint's tensors box by box, wherever their parts lie, without holding more than a block of them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from types import EllipsisType

import numpy as np
import numpy.typing as npt

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.boxes import NO_DIM, Box, flat_boxes, meet
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.codes import StateError
from pipeproof.state.index import Shard
from pipeproof.state.mapping import Slab, TensorMap, inverse_permutation, slabs_of
from pipeproof.state.reshard.cast import Bits, bits_dtype, cast
from pipeproof.state.stream import Stretch, stretches_of


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Where a tensor lies; the columns ``starts`` and ``stops``, [stretches, dims], find those that meet a box."""

    dtype: str
    all: tuple[Stretch, ...]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    def meeting(self, box: Box) -> Iterator[tuple[Stretch, Box]]:
        """Those that have something of a box, and what."""
        near = ((self.starts < box.stops) & (self.stops > box.offsets)).all(axis=1)
        for number in np.flatnonzero(near):
            common = meet(self.all[number].box, box)
            if common is not None:
                yield self.all[number], common


class Source:
    """A checkpoint whose files are mapped into memory; threads may share it.

    Files are mapped and not read because a box of a few columns is many short
    ranges of a file. Mapped pages count as memory of the process, so that no more
    than ``block_bytes`` are looked at before they are given back.
    """

    def __init__(self, checkpoint: Checkpoint, block_bytes: int) -> None:
        self._checkpoint = checkpoint
        self._block_bytes = block_bytes
        self._mapped: dict[Path, mmap.mmap] = {}
        self._stretches: dict[str, _Stretches] = {}
        self._lock = Lock()

    def fill(self, out: Bits, tensor: TensorMap, shard: Shard, begin: int) -> None:
        """Put the elements of a target's part from ``begin`` on, flattened in C order, into ``out`` of one dim."""
        done = 0
        for box in flat_boxes(shard.extents, (begin, begin + out.size)):
            whole = box.moved(shard.offsets)
            values = out[done : done + box.numel].reshape(box.extents)
            for slab in slabs_of(tensor, whole):
                self._fill_slab(values[_place(slab.box.within(whole))], slab)
            done += box.numel

    def files_of(self, name: str, box: Box) -> set[Path]:
        """The files that have something of a box of a tensor."""
        return {stretch.file for stretch, _ in self._lying(name).meeting(box)}

    def _fill_slab(self, out: Bits, slab: Slab) -> None:
        """``out`` has the dims of the target."""
        if slab.source is None:
            out[...] = 0
            return
        if slab.permutation is not None:  # seen with the dims of the source
            out = _as_source(out, slab.permutation, len(slab.source_box.extents))
        lying = self._lying(slab.source)
        for stretch, common in lying.meeting(slab.source_box):
            for near in _near(common.within(stretch.box), stretch.box.extents, self._block_bytes // out.itemsize):
                to = near.moved(stretch.box.offsets).within(slab.source_box)
                self._copy(out[_place(to)], stretch, near, lying.dtype, slab.casts)

    def _copy(self, out: Bits, stretch: Stretch, box: Box, dtype: str, casts: Sequence[str]) -> None:
        """Copy a box of a stretch, counted from the stretch's own beginning."""
        item = dtype_bytes(dtype)
        strides = tuple(item * numel for numel in _row_numels(stretch.box.extents))
        start = stretch.start + sum(map(int.__mul__, box.offsets, strides))
        stop = start + sum((extent - 1) * stride for extent, stride in zip(box.extents, strides, strict=True)) + item
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        mapped = self._map(stretch.file)
        mapped.madvise(mmap.MADV_WILLNEED, first, stop - first)  # one long read, and not page after page
        values: Bits = np.ndarray(box.extents, bits_dtype(dtype), mapped, start, strides)
        if casts:
            values = np.ascontiguousarray(values)
            for to in casts:
                values, dtype = cast(values, dtype, to), to
        out[...] = values
        mapped.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def _lying(self, name: str) -> _Stretches:
        if name not in self._stretches:
            dtype, parts = self._checkpoint.tensors[name].dtype, self._checkpoint.parts[name]
            found = tuple(stretch for part in parts for stretch in stretches_of(part, dtype_bytes(dtype)))
            shape = len(found), len(self._checkpoint.tensors[name].shape)
            starts = np.array([stretch.box.offsets for stretch in found], np.int64).reshape(shape)
            stops = np.array([stretch.box.stops for stretch in found], np.int64).reshape(shape)
            self._stretches[name] = _Stretches(dtype, found, starts, stops)
        return self._stretches[name]

    def _map(self, file: Path) -> mmap.mmap:
        with self._lock:
            if file not in self._mapped:
                try:
                    with file.open("rb") as stream:
                        self._mapped[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                except OSError as error:
                    mend = "copy the file anew from where it was saved"
                    raise StateError(f"{file} cannot be read: {error.strerror}", mend) from error
            return self._mapped[file]


def _as_source(out: Bits, permutation: tuple[int, ...], num_dims: int) -> Bits:
    """A target's box with the dims of the source; one that only the target or only the source has is one long."""
    named = out[(*(0 if dim == NO_DIM else slice(None) for dim in permutation), ...)]
    order = [dim for dim in permutation if dim != NO_DIM]
    found = named.transpose(inverse_permutation(tuple(sorted(order).index(dim) for dim in order)))
    return found[(*(slice(None) if dim in order else None for dim in range(num_dims)), ...)]


def _near(box: Box, extents: Sequence[int], most: int) -> Iterator[Box]:
    """A box of a tensor of ``extents`` as boxes that lie within ``most`` elements of it, or are one element."""
    for dim, numel in enumerate(_row_numels(extents)):
        if box.extents[dim] > 1 and box.extents[dim] * numel > most:
            step = max(1, most // numel)
            for done in range(0, box.extents[dim], step):
                by = tuple(done if other == dim else 0 for other in range(len(extents)))
                length = min(step, box.extents[dim] - done)
                rows = Box(box.offsets, (*box.extents[:dim], length, *box.extents[dim + 1 :])).moved(by)
                yield from _near(rows, extents, most)
            return
    yield box


def _row_numels(extents: Sequence[int]) -> list[int]:
    """By dim how many elements lie from one index to the next."""
    return [prod(extents[dim + 1 :]) for dim in range(len(extents))]


def _place(box: Box) -> tuple[slice | EllipsisType, ...]:
    return (*map(slice, box.offsets, box.stops), ...)  # of a number a view, too, and not the number
