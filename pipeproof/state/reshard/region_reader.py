"""Reading of a target's elements from a checkpoint by a map: copies are transposed and cast on the way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeproof.state.byte_ranges import RangeReader
from pipeproof.state.cast import Bits, cast
from pipeproof.state.checkpoint import Checkpoint, CheckpointReader
from pipeproof.state.regions import NO_DIM, flat_regions
from pipeproof.state.state_index import Shard
from pipeproof.state.tensor_map import RegionCopy, TensorMap, copies_into, inverse_permutation


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
