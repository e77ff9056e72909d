"""Regions (n-dimensional slices) of a tensor: intersections, differences, and the check that they tile the tensor.

Work grows with the number of regions, never with the number of elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import prod
from operator import mul
from types import EllipsisType
from typing import NamedTuple

from pipeproof.diagnostics.problems import grouped

NO_DIM = -1
"""Placeholder in a permutation for a dim that the tensor lacks."""


class Region(NamedTuple):
    """An n-dimensional slice: ``extents`` elements along each dim, from ``offsets`` on.

    For a scalar (no dims) it is one element.
    """

    offsets: tuple[int, ...]
    extents: tuple[int, ...]

    @property
    def stops(self) -> tuple[int, ...]:
        """End of the region along each dim."""
        return tuple(start + length for start, length in zip(*self, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.extents)

    @property
    def slices(self) -> tuple[slice | EllipsisType, ...]:
        """Index of an array that gives a view, also of a scalar."""
        return (*map(slice, self.offsets, self.stops), ...)

    def shifted(self, by: Sequence[int]) -> Region:
        """Return the region moved by ``by`` along each dim."""
        return Region(tuple(start + step for start, step in zip(self.offsets, by, strict=True)), self.extents)

    def relative_to(self, other: Region) -> Region:
        """Return the same elements, counted from the beginning of ``other``."""
        return self.shifted([-start for start in other.offsets])

    def sliced(self, dim: int, start: int, stop: int) -> Region:
        """Return the region with ``start`` to ``stop`` of the tensor along ``dim``, unchanged along the other dims."""
        offsets = (*self.offsets[:dim], start, *self.offsets[dim + 1 :])
        return Region(offsets, (*self.extents[:dim], stop - start, *self.extents[dim + 1 :]))

    def permuted(self, permutation: Sequence[int]) -> Region:
        """Return the region with dim i taken from dim ``permutation[i]``, or new and of one element for ``NO_DIM``."""
        offsets = tuple(0 if i == NO_DIM else self.offsets[i] for i in permutation)
        return Region(offsets, tuple(1 if i == NO_DIM else self.extents[i] for i in permutation))


class TilingFault(NamedTuple):
    """A region that ``num_holders`` regions hold instead of one; ``holders`` are the numbers of these."""

    region: Region
    num_holders: int
    holders: tuple[int, ...]


def is_outside(region: Region, shape: Sequence[int]) -> bool:
    """Return True if the region exceeds a tensor of that shape, or has other dims; an empty region may be inside."""
    return len(region.extents) != len(shape) or any(
        start < 0 or stop > size for start, stop, size in zip(region.offsets, region.stops, shape, strict=True)
    )


def whole_region(shape: Sequence[int]) -> Region:
    """Return the region of a whole tensor."""
    return Region((0,) * len(shape), tuple(shape))


def intersect(first: Region, second: Region) -> Region | None:
    """Return the intersection of two regions; None where it is empty."""
    offsets = tuple(map(max, first.offsets, second.offsets))
    extents = tuple(map(int.__sub__, map(min, first.stops, second.stops), offsets))
    return Region(offsets, extents) if all(length > 0 for length in extents) else None


def subtract(region: Region, others: Iterable[Region]) -> list[Region]:
    """Return a region without ``others``, as disjoint regions: at most two for each dim and other region."""
    remaining = [region] if region.numel else []
    for other in others:
        remaining = [rest for part in remaining for rest in _without(part, other)]
    return remaining


def _without(region: Region, other: Region) -> Iterator[Region]:
    common = intersect(region, other)
    if common is None:
        yield region
        return
    rest = region
    for dim, (start, stop) in enumerate(zip(common.offsets, common.stops, strict=True)):
        for first, last in ((rest.offsets[dim], start), (stop, rest.stops[dim])):
            if first < last:
                yield rest.sliced(dim, first, last)
        rest = rest.sliced(dim, start, stop)


def row_numels(extents: Sequence[int]) -> list[int]:
    """Return by dim the number of elements, in C order, from one index to the next."""
    return [prod(extents[dim + 1 :]) for dim in range(len(extents))]


def spanned_range(region: Region, extents: Sequence[int]) -> tuple[int, int]:
    """Return the half-open range, in C order, from a region's first to its last element, in an array of ``extents``.

    The range may also have elements outside the region.
    """
    rows = row_numels(extents)
    last = sum(map(mul, (stop - 1 for stop in region.stops), rows))
    return sum(map(mul, region.offsets, rows)), last + 1


def flat_regions(extents: Sequence[int], flat: tuple[int, int]) -> Iterator[Region]:
    """Yield the elements ``flat[0]`` to ``flat[1]`` of an array of ``extents``, flattened in C order, as regions.

    There are at most 2 * dims - 1 of them, in order, and each is one range of the flattened array.
    """
    start, stop = flat
    if not extents:
        if start < stop:
            yield Region((), ())
        return
    row = prod(extents[1:])
    while start < stop:
        first, inside = divmod(start, row)
        num_rows = (stop - start) // row
        if inside == 0 and num_rows:
            yield Region((first, *(0 for _ in extents[1:])), (num_rows, *extents[1:]))
            start += num_rows * row
            continue
        end = min(stop, (first + 1) * row)
        for region in flat_regions(extents[1:], (inside, end - first * row)):
            yield Region((first, *region.offsets), (1, *region.extents))
        start = end


def tiling_fault(shape: Sequence[int], regions: Sequence[Region]) -> TilingFault | None:
    """Return the first region of a tensor that is missing, held more than once, or outside of the tensor.

    None if every element is in exactly one of the regions: they are then a bijection onto the tensor. Empty regions
    hold nothing.
    """
    for number, region in enumerate(regions):
        if region.numel and shape and intersect(region, whole_region(shape)) != region:
            return TilingFault(region, 1, (number,))
    return first_with_count(shape, regions, lambda num_holders: num_holders != 1)


def first_with_count(
    shape: Sequence[int], regions: Sequence[Region], matches: Callable[[int], bool]
) -> TilingFault | None:
    """Return the first region of a tensor whose number of holders satisfies ``matches``.

    All regions lie inside the tensor.
    """

    @cache
    def fault_from(dim: int, active: tuple[int, ...]) -> TilingFault | None:
        """Search the dims from ``dim`` on; ``active`` are the regions that hold the position in the earlier dims."""
        if dim == len(shape):
            return TilingFault(Region((), ()), len(active), active) if matches(len(active)) else None
        ends = {0, shape[dim]}
        for number in active:
            ends |= {regions[number].offsets[dim], regions[number].stops[dim]}
        cuts = sorted(ends)
        begins = grouped((regions[number].offsets[dim], number) for number in active)
        live: list[int] = []
        for start, stop in pairwise(cuts):
            live = [number for number in live if regions[number].stops[dim] > start] + begins.get(start, [])
            fault = fault_from(dim + 1, tuple(sorted(live)))
            if fault is not None:
                region = Region((start, *fault.region.offsets), (stop - start, *fault.region.extents))
                return TilingFault(region, fault.num_holders, fault.holders)
        return None

    non_empty = tuple(number for number, region in enumerate(regions) if region.numel)
    return fault_from(0, non_empty) if prod(shape) else None
