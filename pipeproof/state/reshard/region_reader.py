"""Reading a checkpoint's tensors region by region, from any files, with one block in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeproof.state.byte_ranges import RangeReader
from pipeproof.state.cast import Bits, cast
from pipeproof.state.checkpoint import Checkpoint, StoredRegion, read_stored_regions, stored_regions_of
from pipeproof.state.regions import NO_DIM, Region, flat_regions
from pipeproof.state.state_index import Shard
from pipeproof.state.tensor_map import RegionCopy, TensorMap, copies_into, inverse_permutation


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Regions of a stored tensor.

    The columns ``starts`` and ``stops``, [regions, dims], find those that overlap a region.
    """

    dtype: str
    all: tuple[StoredRegion, ...]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]

    def overlapping(self, region: Region) -> Iterator[StoredRegion]:
        """Yield the stored regions that overlap a region, which is not empty."""
        meets = (np.maximum(self.starts, region.offsets) < np.minimum(self.stops, region.stops)).all(axis=1)
        return (self.all[number] for number in np.flatnonzero(meets))


class RegionReader:
    """A checkpoint's tensors as a map reads them; threads may share it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stored_tensors: dict[str, _StoredTensor] = {}

    def fill(self, reader: RangeReader, out: Bits, tensor: TensorMap, shard: Shard, begin: int) -> None:
        """Write the elements of a target shard from ``begin`` on, flattened in C order, into ``out`` of one dim.

        Raises:
            StateError: A file cannot be read, or is too short.
        """
        done = 0
        for region in flat_regions(shard.extents, (begin, begin + out.size)):
            whole = region.shifted(shard.offsets)
            values = out[done : done + region.numel].reshape(region.extents)
            for copy in copies_into(tensor, whole):
                self._fill_copy(reader, values[copy.region.relative_to(whole).slices], copy)
            done += region.numel

    def files_of(self, name: str, region: Region) -> set[Path]:
        """Return the files that have elements of a region of a tensor."""
        return {stored.array.path for stored in self._stored_tensor(name).overlapping(region)}

    def _fill_copy(self, reader: RangeReader, out: Bits, copy: RegionCopy) -> None:
        """Fill ``out``, which has the dims of the target."""
        if copy.source is None:
            out[...] = 0
            return
        if copy.permutation is not None:  # seen with the dims of the source
            out = _as_source(out, copy.permutation, len(copy.source_region.extents))
        lying = self._stored_tensor(copy.source)
        convert = _casting(lying.dtype, copy.casts) if copy.casts else None
        read_stored_regions(reader, lying.overlapping(copy.source_region), copy.source_region, out, convert)

    def _stored_tensor(self, name: str) -> _StoredTensor:
        if name not in self._stored_tensors:
            entry = self._checkpoint.tensors[name]
            stored_regions = tuple(
                stored
                for stored_shard in self._checkpoint.shards[name]
                for stored in stored_regions_of(stored_shard, entry.dtype)
            )
            shape = len(stored_regions), len(entry.shape)
            starts = np.array([stored.region.offsets for stored in stored_regions], np.int64).reshape(shape)
            stops = np.array([stored.region.stops for stored in stored_regions], np.int64).reshape(shape)
            self._stored_tensors[name] = _StoredTensor(entry.dtype, stored_regions, starts, stops)
        return self._stored_tensors[name]


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
    stored_regions = named.transpose(inverse_permutation(tuple(sorted(order).index(dim) for dim in order)))
    return stored_regions[(*(slice(None) if dim in order else None for dim in range(num_dims)), ...)]
