"""Boxes of a tensor: where parts of it begin and how far they go along each dim; how they meet, and do they tile it.

Work grows with the number of boxes, never with the number of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import prod
from operator import mul
from types import EllipsisType
from typing import NamedTuple

NO_DIM = -1
"""In a permutation, in place of a dim that is not there."""


class Box(NamedTuple):
    """The elements from ``offsets`` on, ``extents`` of them along each dim. A number (no dims) is one element."""

    offsets: tuple[int, ...]
    extents: tuple[int, ...]

    @property
    def stops(self) -> tuple[int, ...]:
        """Where it ends along each dim."""
        return tuple(start + length for start, length in zip(*self, strict=True))

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.extents)

    @property
    def slices(self) -> tuple[slice | EllipsisType, ...]:
        """It as an index of an array, which gives a view; of a number, too, and not its value."""
        return (*map(slice, self.offsets, self.stops), ...)

    def moved(self, by: Sequence[int]) -> Box:
        """The box of as many elements, ``by`` further along each dim."""
        return Box(tuple(start + step for start, step in zip(self.offsets, by, strict=True)), self.extents)

    def within(self, other: Box) -> Box:
        """The same elements, counted from the beginning of ``other``."""
        return self.moved([-start for start in other.offsets])

    def between(self, dim: int, start: int, stop: int) -> Box:
        """As far as it goes along the other dims; along ``dim`` from ``start`` to ``stop`` of the tensor."""
        offsets = (*self.offsets[:dim], start, *self.offsets[dim + 1 :])
        return Box(offsets, (*self.extents[:dim], stop - start, *self.extents[dim + 1 :]))

    def permuted(self, permutation: Sequence[int]) -> Box:
        """As seen when dim i of the result is dim ``permutation[i]`` of the tensor, or a new one of one element."""
        offsets = tuple(0 if i == NO_DIM else self.offsets[i] for i in permutation)
        return Box(offsets, tuple(1 if i == NO_DIM else self.extents[i] for i in permutation))


class Fault(NamedTuple):
    """A box that is held ``times`` times and should be once; ``holders`` are the numbers of the boxes that hold it."""

    box: Box
    times: int
    holders: tuple[int, ...]


def is_outside(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box has something that a tensor of that shape has not, or other dims; an empty box may lie in it."""
    return len(box.extents) != len(shape) or any(
        start < 0 or stop > size for start, stop, size in zip(box.offsets, box.stops, shape, strict=True)
    )


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def meet(one: Box, other: Box) -> Box | None:
    """What two boxes have in common, None where that is nothing."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    extents = tuple(map(int.__sub__, map(min, one.stops, other.stops), offsets))
    return Box(offsets, extents) if all(length > 0 for length in extents) else None


def minus(box: Box, others: Iterable[Box]) -> list[Box]:
    """What is left of a box without ``others``, as boxes that do not meet: at most two for each dim and other."""
    left = [box] if box.numel else []
    for other in others:
        left = [piece for one in left for piece in _without(one, other)]
    return left


def _without(box: Box, other: Box) -> Iterator[Box]:
    common = meet(box, other)
    if common is None:
        yield box
        return
    rest = box
    for dim, (start, stop) in enumerate(zip(common.offsets, common.stops, strict=True)):
        for first, last in ((rest.offsets[dim], start), (stop, rest.stops[dim])):
            if first < last:
                yield rest.between(dim, first, last)
        rest = rest.between(dim, start, stop)


def row_numels(extents: Sequence[int]) -> list[int]:
    """By dim how many elements lie, in C order, from one index to the next."""
    return [prod(extents[dim + 1 :]) for dim in range(len(extents))]


def span_of(box: Box, extents: Sequence[int]) -> tuple[int, int]:
    """Which elements of an array, flattened in C order, a box of it goes from and to; not all between are the box's."""
    rows = row_numels(extents)
    last = sum(map(mul, (stop - 1 for stop in box.stops), rows))
    return sum(map(mul, box.offsets, rows)), last + 1


def flat_boxes(extents: Sequence[int], flat: tuple[int, int]) -> Iterator[Box]:
    """The elements ``flat[0]`` to ``flat[1]`` of a box, flattened in C order, as boxes of it in their order.

    There are at most 2 * dims - 1 of them, and each is one range of the flattened box.
    """
    start, stop = flat
    if not extents:
        if start < stop:
            yield Box((), ())
        return
    row = prod(extents[1:])
    while start < stop:
        first, inside = divmod(start, row)
        num_rows = (stop - start) // row
        if inside == 0 and num_rows:
            yield Box((first, *(0 for _ in extents[1:])), (num_rows, *extents[1:]))
            start += num_rows * row
            continue
        end = min(stop, (first + 1) * row)
        for box in flat_boxes(extents[1:], (inside, end - first * row)):
            yield Box((first, *box.offsets), (1, *box.extents))
        start = end


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> Fault | None:
    """The first box of a tensor that ``boxes`` hold not once: missing, held more often, or outside of the tensor.

    None where every element stands in exactly one of the boxes, so that they
    are a bijection onto the tensor. Empty boxes hold nothing.
    """
    for number, box in enumerate(boxes):
        if box.numel and shape and meet(box, whole_box(shape)) != box:
            return Fault(box, 1, (number,))
    return first_held(shape, boxes, lambda times: times != 1)


def first_held(shape: Sequence[int], boxes: Sequence[Box], so_often: Callable[[int], bool]) -> Fault | None:
    """The first box of a tensor that stands in a number of ``boxes`` of which ``so_often`` is true; all are within."""

    @cache
    def fault_from(dim: int, active: tuple[int, ...]) -> Fault | None:
        """Of the dims from ``dim`` on, where the boxes ``active`` are those that hold the place in the dims before."""
        if dim == len(shape):
            return Fault(Box((), ()), len(active), active) if so_often(len(active)) else None
        ends = {0, shape[dim]}
        for number in active:
            ends |= {boxes[number].offsets[dim], boxes[number].stops[dim]}
        cuts = sorted(ends)
        begins: dict[int, list[int]] = {}
        for number in active:
            begins.setdefault(boxes[number].offsets[dim], []).append(number)
        live: list[int] = []
        for start, stop in pairwise(cuts):
            live = [number for number in live if boxes[number].stops[dim] > start] + begins.get(start, [])
            found = fault_from(dim + 1, tuple(sorted(live)))
            if found is not None:
                box = Box((start, *found.box.offsets), (stop - start, *found.box.extents))
                return Fault(box, found.times, found.holders)
        return None

    there = tuple(number for number, box in enumerate(boxes) if box.numel)
    return fault_from(0, there) if prod(shape) else None
