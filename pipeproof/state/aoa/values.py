"""Tensors on their way: cut along an axis and put together anew, transposed, cast. Work is in slabs, not elements."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeproof.state.boxes import Box, meet, whole_box
from pipeproof.state.mapping import Slab

Part = tuple[int, int]
"""Of which input, and the number of the part of it."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor made of the source's. ``num_shards`` is of the source's tensor that it comes from; None of several."""

    dtype: str
    shape: tuple[int, ...]
    slabs: tuple[Slab, ...]
    num_shards: int | None


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Each input is cut evenly into ``cuts`` parts along one axis, and each output is parts in their order."""

    cuts: tuple[int, ...]
    outputs: tuple[tuple[Part, ...], ...]
    even: bool
    """Whether parts of all inputs are of one size."""


def zeros(dtype: str, shape: tuple[int, ...]) -> Value:
    """A tensor that is added."""
    return Value(dtype, shape, (Slab(whole_box(shape), None, whole_box(shape)),), 1)


def cast(value: Value, dtype: str) -> Value:
    """The tensor in another type."""
    slabs = tuple(slab if slab.source is None else replace(slab, casts=(*slab.casts, dtype)) for slab in value.slabs)
    return replace(value, dtype=dtype, slabs=slabs)


def permuted(value: Value, permutation: tuple[int, ...]) -> Value:
    """The tensor whose dim i was dim ``permutation[i]``."""
    slabs = tuple(_permuted(slab, permutation) for slab in value.slabs)
    return replace(value, shape=tuple(value.shape[i] for i in permutation), slabs=slabs)


def regrouped(values: Sequence[Value], axis: int, regrouping: Regrouping) -> list[Value]:
    """The outputs. Inputs fit: types, shapes and sizes of parts were looked at."""
    strips = [_Strips(value, axis, cuts) for value, cuts in zip(values, regrouping.cuts, strict=True)]
    num_shards = values[0].num_shards if len(values) == 1 else None
    made = []
    for parts in regrouping.outputs:
        slabs: list[Slab] = []
        end = 0
        for number, first, last in _runs(parts):
            start, stop = strips[number].range_of(first, last)
            slabs += strips[number].slabs(start, stop, moved=end - start)
            end += stop - start
        shape = tuple(end if dim == axis else length for dim, length in enumerate(values[0].shape))
        made.append(Value(values[0].dtype, shape, tuple(_grown(slabs, axis)), num_shards))
    return made


class _Strips:
    """A tensor whose slabs are found by their place along one axis."""

    def __init__(self, value: Value, axis: int, cuts: int) -> None:
        self._axis, self._shape = axis, value.shape
        self._size = value.shape[axis] // cuts
        self._slabs = sorted(value.slabs, key=lambda slab: slab.box.offsets[axis])
        self._starts = [slab.box.offsets[axis] for slab in self._slabs]
        self._longest = max((slab.box.extents[axis] for slab in self._slabs), default=0)

    def range_of(self, first: int, last: int) -> tuple[int, int]:
        """Where some parts begin and end along the axis."""
        return first * self._size, (last + 1) * self._size

    def slabs(self, start: int, stop: int, moved: int) -> Iterator[Slab]:
        """What stands there, ``moved`` along the axis."""
        cut = Box(
            tuple(start if dim == self._axis else 0 for dim in range(len(self._shape))),
            tuple(stop - start if dim == self._axis else length for dim, length in enumerate(self._shape)),
        )
        by = tuple(moved if dim == self._axis else 0 for dim in range(len(self._shape)))
        near = range(bisect_left(self._starts, start - self._longest), bisect_left(self._starts, stop))
        for slab in (self._slabs[number] for number in near):
            common = meet(slab.box, cut)
            if common is not None:
                part = slab.part(common)
                yield replace(part, box=part.box.moved(by))


def _runs(parts: Sequence[Part]) -> Iterator[tuple[int, int, int]]:
    """Parts that follow each other in one input, as one."""
    begin = 0
    for index, (one, other) in enumerate(pairwise((*parts, (-1, 0))), 1):
        if other != (one[0], one[1] + 1):
            yield one[0], parts[begin][1], one[1]
            begin = index


def _permuted(slab: Slab, permutation: tuple[int, ...]) -> Slab:
    first = slab.permutation or tuple(range(len(permutation)))
    both = tuple(first[i] for i in permutation)
    return replace(
        slab, box=slab.box.permuted(permutation), permutation=None if both == tuple(range(len(both))) else both
    )


def _grown(slabs: Sequence[Slab], axis: int) -> Iterator[Slab]:
    """Neighbours along the axis that are neighbours in the source, too, as one."""
    current: Slab | None = None
    for slab in slabs:
        if current is not None and _goes_on(current, slab, axis):
            current = replace(
                current,
                box=_longer(current.box, axis, slab.box.extents[axis]),
                source_box=_longer(current.source_box, _source_axis(slab, axis), slab.box.extents[axis]),
            )
            continue
        if current is not None:
            yield current
        current = slab
    if current is not None:
        yield current


def _goes_on(one: Slab, other: Slab, axis: int) -> bool:
    alike = (one.source, one.permutation, one.casts) == (other.source, other.permutation, other.casts)
    return (
        alike
        and one.source is not None
        and _continues(one.box, other.box, axis)
        and _continues(one.source_box, other.source_box, _source_axis(one, axis))
    )


def _source_axis(slab: Slab, axis: int) -> int:
    return axis if slab.permutation is None else slab.permutation[axis]


def _continues(one: Box, other: Box, axis: int) -> bool:
    return all(
        (stop == start if dim == axis else (begin == start and length == size))
        for dim, (begin, stop, length, start, size) in enumerate(
            zip(one.offsets, one.stops, one.extents, other.offsets, other.extents, strict=True)
        )
    )


def _longer(box: Box, axis: int, by: int) -> Box:
    return Box(box.offsets, tuple(length + by if dim == axis else length for dim, length in enumerate(box.extents)))
