"""Maps from the elements of a rank's local tensor to elements of the whole tensor, as ranges.

A map is a list of ranges (local start, global start, length), with both sides flattened in C order. Maps are compared
by sorting the ends of ranges, so the time depends on the number of ranges, not on the number of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeproof.specs.axis_layout import Placement, PlacementKind

IntColumn = NDArray[np.int64]

NOWHERE = -1
"""The global index of a local index that is not in the map."""


class IndexRange(NamedTuple):
    """``length`` elements from local index ``local`` on are the elements from global index ``whole`` on."""

    local: int
    whole: int
    length: int


class Difference(NamedTuple):
    """Local range in which two maps differ, with the global start in the first and in the second map.

    The global start is ``NOWHERE`` if a map does not contain the range.
    """

    local: int
    length: int
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class IndexMap:
    """One rank's local indices and their global indices: three arrays of equal length, sorted by ``local``."""

    local: IntColumn
    whole: IntColumn
    length: IntColumn

    @staticmethod
    def of(ranges: Iterable[tuple[int, int, int]]) -> IndexMap:
        """A map of ranges (local start, global start, length), in any order. Empty ranges are dropped."""
        table = np.array(sorted(p for p in ranges if p[2] > 0), dtype=np.int64).reshape(-1, 3)
        return IndexMap(*table.T.copy())

    @property
    def ranges(self) -> list[IndexRange]:
        """The ranges in the order of their local start."""
        columns = zip(self.local.tolist(), self.whole.tolist(), self.length.tolist(), strict=True)
        return [IndexRange(*row) for row in columns]

    def part(self, start: int, stop: int, at: int) -> IndexMap:
        """The map of local indices ``start .. stop``, shifted from ``start`` to ``at``."""
        low = np.maximum(self.local, start)
        length = np.minimum(self.local + self.length, stop) - low
        kept = length > 0
        return IndexMap((low - start + at)[kept], (self.whole + low - self.local)[kept], length[kept])

    def at(self, local: IntColumn) -> IntColumn:
        """The global index of each local index, ``NOWHERE`` outside the map."""
        if not len(self.local):
            return np.full(len(local), NOWHERE)
        row = np.maximum(np.searchsorted(self.local, local, side="right") - 1, 0)
        inside = (local >= self.local[row]) & (local < self.local[row] + self.length[row])
        return np.where(inside, self.whole[row] + local - self.local[row], NOWHERE)

    def inverted(self) -> IndexMap:
        """The map from global to local indices. The global ranges must not overlap."""
        order = np.argsort(self.whole, kind="stable")
        return IndexMap(self.whole[order], self.local[order], self.length[order])


def differences(first: IndexMap, second: IndexMap) -> list[Difference]:
    """Ranges in which two maps of the same local indices differ, in order. They end where a range of either ends."""
    ends = np.unique(
        np.concatenate([first.local, first.local + first.length, second.local, second.local + second.length])
    )
    starts, lengths = ends[:-1], np.diff(ends)
    in_first, in_second = first.at(starts), second.at(starts)
    wrong = np.flatnonzero(in_first != in_second)
    columns = (starts, lengths, in_first, in_second)
    return [Difference(*row) for row in zip(*(column[wrong].tolist() for column in columns), strict=True)]


class Count(NamedTuple):
    """Indices ``start .. stop`` are held ``times`` times."""

    start: int
    stop: int
    times: int


def counts(ranges: Iterable[tuple[int, int]], size: int) -> list[Count]:
    """The number of ``ranges`` (start, length) that contain each index 0 .. ``size`` - 1, as ranges in order.

    Ranges that go further give counts below 0 or from ``size`` on.
    """
    table = np.array([(start, length) for start, length in ranges], dtype=np.int64).reshape(-1, 2)
    starts, stops = table[:, 0], table[:, 0] + table[:, 1]
    ends = np.unique(np.concatenate([starts, stops, [0, size]]))
    begun = np.searchsorted(np.sort(starts), ends[:-1], side="right")
    done = np.searchsorted(np.sort(stops), ends[:-1], side="right")
    counted: list[Count] = []
    for start, stop, times in zip(ends[:-1].tolist(), ends[1:].tolist(), (begun - done).tolist(), strict=True):
        if counted and counted[-1].stop == start and counted[-1].times == times and start not in (0, size):
            counted[-1] = Count(counted[-1].start, stop, times)
        elif times or 0 <= start < size:
            counted.append(Count(start, stop, times))
    return counted


def layout_map(shape: Sequence[int], placement: Placement, num_ranks: int, rank: int) -> IndexMap:
    """The elements of a tensor of global ``shape`` on rank ``rank`` of ``num_ranks``.

    Addends (partial) and varying values of different ranks are different elements: rank k's have global indices from
    ``(k + 1) * numel`` on.

    Raises:
        ValueError: the ranks do not divide the sharded dim.
    """
    numel = prod(shape)
    if placement.holds_equal_values:
        return IndexMap.of([(0, 0, numel)])
    if placement.kind is not PlacementKind.SHARDED:
        return IndexMap.of([(0, (rank + 1) * numel, numel)])
    assert placement.dim is not None
    share = prod(placement.local_shape(tuple(shape), num_ranks)[placement.dim :])
    runs = np.arange(prod(shape[: placement.dim]), dtype=np.int64)
    whole = (runs * num_ranks + rank) * share
    return IndexMap(runs * share, whole, np.full(len(runs), share, dtype=np.int64))


def expert_map(num_experts: int, numel: int, num_ranks: int, rank: int) -> IndexMap:
    """The experts of an expert-parallel rank, each of ``numel`` elements: rank k has the k-th shard of them.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    return layout_map((num_experts, numel), Placement(PlacementKind.SHARDED, 0), num_ranks, rank)


def token_map(num_rows: int, seq_length: int, num_ranks: int, rank: int) -> IndexMap:
    """The tokens [rows, sequence] of a rank if the sequence is sharded. Several rows are several ranges.

    Raises:
        ValueError: the ranks do not divide the sequence.
    """
    return layout_map((num_rows, seq_length), Placement(PlacementKind.SHARDED, 1), num_ranks, rank)
