"""Intermediate tensors of the engine: split along an axis, regrouped, transposed, cast. Work is in region copies.

Merges, splits and the fused forms are one operation: shards along an axis in another order. The layouts are Paddle's
(aoa/macros.py of its flex checkpoint). ``fused_qkv``: for each group its query heads, then one key head and one value
head. ``fused_qkv_old``: for each tensor-parallel rank its queries, its keys, its values. ``fused_ffn``: for each of
these ranks its shard of the gate, then its shard of the up projection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm

from pipeproof.state.aoa.statements import Fused, Statement
from pipeproof.state.regions import Region, intersect, whole_region
from pipeproof.state.tensor_map import RegionCopy

InputShard = tuple[int, int]
"""Number of an input, and number of one of its equal shards along the axis."""


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A tensor made from the source's. ``num_shards`` counts the shards of the only source tensor; None for several."""

    dtype: str
    shape: tuple[int, ...]
    copies: tuple[RegionCopy, ...]
    num_shards: int | None


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Each input is split evenly into ``num_splits`` shards along one axis, and each output is a sequence of shards."""

    num_splits: tuple[int, ...]
    outputs: tuple[tuple[InputShard, ...], ...]
    even: bool
    """True if the shards of all inputs have one size."""


def zeros(dtype: str, shape: tuple[int, ...]) -> TensorValue:
    """Return a tensor that is added."""
    return TensorValue(dtype, shape, (RegionCopy(whole_region(shape), None, whole_region(shape)),), 1)


def cast(value: TensorValue, dtype: str) -> TensorValue:
    """Return the tensor in another type."""
    copies = tuple(copy if copy.source is None else replace(copy, casts=(*copy.casts, dtype)) for copy in value.copies)
    return replace(value, dtype=dtype, copies=copies)


def permuted(value: TensorValue, permutation: tuple[int, ...]) -> TensorValue:
    """Return the tensor whose dim i was dim ``permutation[i]``."""
    copies = tuple(_permuted(copy, permutation) for copy in value.copies)
    return replace(value, shape=tuple(value.shape[i] for i in permutation), copies=copies)


def regrouped(values: Sequence[TensorValue], axis: int, regrouping: Regrouping) -> list[TensorValue]:
    """Return the outputs. Types, shapes and shard sizes of the inputs were checked before."""
    axis_indices = [
        _AxisIndex(value, axis, num_splits) for value, num_splits in zip(values, regrouping.num_splits, strict=True)
    ]
    num_shards = values[0].num_shards if len(values) == 1 else None
    made = []
    for shards in regrouping.outputs:
        copies: list[RegionCopy] = []
        end = 0
        for number, first, last in _consecutive_runs(shards):
            start, stop = axis_indices[number].range_of(first, last)
            copies += axis_indices[number].copies(start, stop, shifted=end - start)
            end += stop - start
        shape = tuple(end if dim == axis else length for dim, length in enumerate(values[0].shape))
        made.append(TensorValue(values[0].dtype, shape, tuple(_merged(copies, axis)), num_shards))
    return made


class _AxisIndex:
    """A tensor whose copies are found by their offset along one axis."""

    def __init__(self, value: TensorValue, axis: int, num_splits: int) -> None:
        self._axis, self._shape = axis, value.shape
        self._size = value.shape[axis] // num_splits
        self._copies = sorted(value.copies, key=lambda copy: copy.region.offsets[axis])
        self._starts = [copy.region.offsets[axis] for copy in self._copies]
        self._longest = max((copy.region.extents[axis] for copy in self._copies), default=0)

    def range_of(self, first: int, last: int) -> tuple[int, int]:
        """Return the begin and end of some shards along the axis."""
        return first * self._size, (last + 1) * self._size

    def copies(self, start: int, stop: int, shifted: int) -> Iterator[RegionCopy]:
        """Yield the copies of a range, ``shifted`` along the axis."""
        strip = whole_region(self._shape).sliced(self._axis, start, stop)
        shift = tuple(shifted if dim == self._axis else 0 for dim in range(len(self._shape)))
        candidates = range(bisect_left(self._starts, start - self._longest), bisect_left(self._starts, stop))
        for copy in (self._copies[number] for number in candidates):
            common = intersect(copy.region, strip)
            if common is not None:
                moved_copy = copy.restricted_to(common)
                yield replace(moved_copy, region=moved_copy.region.shifted(shift))


def _consecutive_runs(shards: Sequence[InputShard]) -> Iterator[tuple[int, int, int]]:
    begin = 0
    for index, (first, second) in enumerate(pairwise((*shards, (-1, 0))), 1):
        if second != (first[0], first[1] + 1):
            yield first[0], shards[begin][1], first[1]
            begin = index


def _permuted(copy: RegionCopy, permutation: tuple[int, ...]) -> RegionCopy:
    first = copy.permutation or tuple(range(len(permutation)))
    both = tuple(first[i] for i in permutation)
    return replace(
        copy, region=copy.region.permuted(permutation), permutation=None if both == tuple(range(len(both))) else both
    )


def _merged(copies: Sequence[RegionCopy], axis: int) -> list[RegionCopy]:
    """Merge copies that are adjacent along the axis in both target and source."""
    merged: list[RegionCopy] = []
    for copy in copies:
        if not merged or not _continues_in_both(merged[-1], copy, axis):
            merged.append(copy)
            continue
        region = _extended(merged[-1].region, axis, copy.region.extents[axis])
        source = _extended(merged[-1].source_region, _source_axis(copy, axis), copy.region.extents[axis])
        merged[-1] = replace(merged[-1], region=region, source_region=source)
    return merged


def _continues_in_both(first: RegionCopy, second: RegionCopy, axis: int) -> bool:
    continues = (first.source, first.permutation, first.casts) == (second.source, second.permutation, second.casts)
    return (
        continues
        and first.source is not None
        and _continues(first.region, second.region, axis)
        and _continues(first.source_region, second.source_region, _source_axis(first, axis))
    )


def _source_axis(copy: RegionCopy, axis: int) -> int:
    return axis if copy.permutation is None else copy.permutation[axis]


def _continues(first: Region, second: Region, axis: int) -> bool:
    end = first.stops[axis]
    return first.sliced(axis, end, end + second.extents[axis]) == second


def _extended(region: Region, axis: int, shift: int) -> Region:
    return region.sliced(axis, region.offsets[axis], region.stops[axis] + shift)


def needs_shards(statement: Statement) -> tuple[bool, bool]:
    """Return if the layouts of the left and of the right tensor depend on their numbers of shards."""
    fused = statement.fused
    if fused is None or fused.kind == "fused_qkv":
        return False, False
    return len(statement.left) == 1, len(statement.right) == 1


def regrouping_of(statement: Statement, shards_left: int, shards_right: int) -> Regrouping:
    """Return the regrouping of a statement with several names, or of a fused one.

    Raises:
        ValueError: Heads do not divide into a tensor's shards.
    """
    num_left, num_right = len(statement.left), len(statement.right)
    if statement.fused is None:
        if num_right == 1:
            return Regrouping((1,) * num_left, (tuple((number, 0) for number in range(num_left)),), even=False)
        return Regrouping((num_right,), tuple(((0, number),) for number in range(num_right)), even=True)
    counts = _counts(statement.fused, shards_left, shards_right)
    if statement.fused.kind == "fused_qkv":
        shards_left = shards_right = statement.fused.num_groups
    left = _layout(counts, shards_left) if num_left == 1 else None
    right = _layout(counts, shards_right) if num_right == 1 else None
    if left is None:
        places = {(component, index): (component, index) for component, index in _layout(counts, 1)}
        num_splits = counts
    else:
        places = {moved_copy: (0, number) for number, moved_copy in enumerate(left)}
        num_splits = (len(left),)
    if right is not None:
        return Regrouping(num_splits, (tuple(places[moved_copy] for moved_copy in right),), even=True)
    outputs = (tuple(places[component, index] for index in range(count)) for component, count in enumerate(counts))
    return Regrouping(num_splits, tuple(outputs), even=True)


def _counts(fused: Fused, shards_left: int, shards_right: int) -> tuple[int, ...]:
    if fused.kind == "fused_ffn":
        return (lcm(shards_left, shards_right),) * 2
    return (fused.num_heads, fused.num_groups, fused.num_groups)


def _layout(counts: tuple[int, ...], num_ranks: int) -> list[InputShard]:
    """Return component and number of each shard, for a tensor with the components of one rank after another."""
    for count in counts:
        if count % num_ranks:
            raise ValueError(f"{count} heads do not divide into its {num_ranks} shards")
    return [
        (component, index)
        for rank in range(num_ranks)
        for component, count in enumerate(counts)
        for index in range(rank * count // num_ranks, (rank + 1) * count // num_ranks)
    ]
