"""Reading a checkpoint's tensors box by box, wherever their parts lie, without holding more than a block of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeproof.state.boxes import NO_DIM, Box, flat_boxes
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.index import Shard
from pipeproof.state.mapping import Slab, TensorMap, inverse_permutation, slabs_of
from pipeproof.state.ranges import RangeReader
from pipeproof.state.reshard.cast import Bits, cast
from pipeproof.state.stream import Stretch, read_stretches, stretches_of


@dataclass(frozen=True, slots=True)
class _Stretches:
    """Where a tensor lies; the columns ``starts`` and ``stops``, [stretches, dims], find those that meet a box."""

    dtype: str
    all: tuple[Stretch, ...]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    def meeting(self, box: Box) -> Iterator[Stretch]:
        """Those that have something of a box, which is not empty."""
        meets = (np.maximum(self.starts, box.offsets) < np.minimum(self.stops, box.stops)).all(axis=1)
        return (self.all[number] for number in np.flatnonzero(meets))


class Source:
    """A checkpoint's tensors as a map reads them; threads may share it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stretches: dict[str, _Stretches] = {}

    def fill(self, reader: RangeReader, out: Bits, tensor: TensorMap, shard: Shard, begin: int) -> None:
        """Put the elements of a target's part from ``begin`` on, flattened in C order, into ``out`` of one dim.

        Raises:
            StateError: a file cannot be read, or ends before.
        """
        done = 0
        for box in flat_boxes(shard.extents, (begin, begin + out.size)):
            whole = box.moved(shard.offsets)
            values = out[done : done + box.numel].reshape(box.extents)
            for slab in slabs_of(tensor, whole):
                self._fill_slab(reader, values[slab.box.within(whole).slices], slab)
            done += box.numel

    def files_of(self, name: str, box: Box) -> set[Path]:
        """The files that have something of a box of a tensor."""
        return {stretch.array.path for stretch in self._lying(name).meeting(box)}

    def _fill_slab(self, reader: RangeReader, out: Bits, slab: Slab) -> None:
        """``out`` has the dims of the target."""
        if slab.source is None:
            out[...] = 0
            return
        if slab.permutation is not None:  # seen with the dims of the source
            out = _as_source(out, slab.permutation, len(slab.source_box.extents))
        lying = self._lying(slab.source)
        change = _casting(lying.dtype, slab.casts) if slab.casts else None
        read_stretches(reader, lying.meeting(slab.source_box), slab.source_box, out, change)

    def _lying(self, name: str) -> _Stretches:
        if name not in self._stretches:
            entry = self._checkpoint.tensors[name]
            found = tuple(
                stretch for part in self._checkpoint.parts[name] for stretch in stretches_of(part, entry.dtype)
            )
            shape = len(found), len(entry.shape)
            starts = np.array([stretch.box.offsets for stretch in found], np.int64).reshape(shape)
            stops = np.array([stretch.box.stops for stretch in found], np.int64).reshape(shape)
            self._stretches[name] = _Stretches(entry.dtype, found, starts, stops)
        return self._stretches[name]


def _casting(dtype: str, casts: tuple[str, ...]) -> Callable[[Bits], Bits]:
    """What makes of elements of a type those of the last type of several, one after the other."""

    def cast_all(values: Bits) -> Bits:
        values, was = np.ascontiguousarray(values), dtype
        for to in casts:
            values, was = cast(values, was, to), to
        return values

    return cast_all


def _as_source(out: Bits, permutation: tuple[int, ...], num_dims: int) -> Bits:
    """A target's box with the dims of the source; one that only the target or only the source has is one long."""
    named = out[(*(0 if dim == NO_DIM else slice(None) for dim in permutation), ...)]
    order = [dim for dim in permutation if dim != NO_DIM]
    found = named.transpose(inverse_permutation(tuple(sorted(order).index(dim) for dim in order)))
    return found[(*(slice(None) if dim in order else None for dim in range(num_dims)), ...)]
