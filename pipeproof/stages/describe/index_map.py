"""Where the elements of a rank's local tensor stand in the whole tensor, as ranges.

A map is a list of pieces (local start, global start, length), both sides
flattened in C order. Maps are compared and joined by sorting their ends, so
the work grows with the number of pieces, never with the number of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeproof.specs.layout import Placement, PlacementKind

IntColumn = NDArray[np.int64]

NOWHERE = -1
"""In place of a global index: the map says nothing of this local index."""


class Piece(NamedTuple):
    """``length`` elements from local index ``local`` on are those from global index ``whole`` on."""

    local: int
    whole: int
    length: int


class Difference(NamedTuple):
    """Local range in which two maps differ: the first stands for ``one`` on, the second for ``other`` on.

    ``NOWHERE`` where a map says nothing of the range.
    """

    local: int
    length: int
    one: int
    other: int


@dataclass(frozen=True, slots=True)
class IndexMap:
    """One rank's local indices and what they stand for: three arrays of equal length, sorted by ``local``."""

    local: IntColumn
    whole: IntColumn
    length: IntColumn

    @staticmethod
    def of(pieces: Iterable[tuple[int, int, int]]) -> IndexMap:
        """A map of pieces (local start, global start, length), in any order; empty ones are left out."""
        table = np.array(sorted(p for p in pieces if p[2] > 0), dtype=np.int64).reshape(-1, 3)
        return IndexMap(*table.T.copy())

    @property
    def pieces(self) -> list[Piece]:
        """The pieces in order of their local start."""
        columns = zip(self.local.tolist(), self.whole.tolist(), self.length.tolist(), strict=True)
        return [Piece(*piece) for piece in columns]

    def part(self, start: int, stop: int, at: int) -> IndexMap:
        """What ``start .. stop`` of the local indices stand for, moved so that ``start`` becomes ``at``."""
        low = np.maximum(self.local, start)
        length = np.minimum(self.local + self.length, stop) - low
        kept = length > 0
        return IndexMap((low - start + at)[kept], (self.whole + low - self.local)[kept], length[kept])

    def at(self, local: IntColumn) -> IntColumn:
        """The global index of each local one, ``NOWHERE`` outside the map."""
        if not len(self.local):
            return np.full(len(local), NOWHERE)
        place = np.maximum(np.searchsorted(self.local, local, side="right") - 1, 0)
        inside = (local >= self.local[place]) & (local < self.local[place] + self.length[place])
        return np.where(inside, self.whole[place] + local - self.local[place], NOWHERE)

    def inverted(self) -> IndexMap:
        """From global to local indices; of a map in which no two pieces stand for the same."""
        order = np.argsort(self.whole, kind="stable")
        return IndexMap(self.whole[order], self.local[order], self.length[order])


def differences(one: IndexMap, other: IndexMap) -> list[Difference]:
    """Where two maps of the same local indices differ, in order; ranges end where a piece of either ends."""
    ends = np.unique(np.concatenate([one.local, one.local + one.length, other.local, other.local + other.length]))
    starts, lengths = ends[:-1], np.diff(ends)
    ours, theirs = one.at(starts), other.at(starts)
    wrong = np.flatnonzero(ours != theirs)
    columns = (starts, lengths, ours, theirs)
    return [Difference(*row) for row in zip(*(column[wrong].tolist() for column in columns), strict=True)]


class Count(NamedTuple):
    """Indices ``start .. stop`` are held ``times`` times."""

    start: int
    stop: int
    times: int


def counts(pieces: Iterable[tuple[int, int]], size: int) -> list[Count]:
    """How often each index 0 .. ``size`` - 1 lies in one of ``pieces`` (start, length), as ranges in order.

    Pieces that reach beyond give ranges below 0 or from ``size`` on.
    """
    table = np.array([(start, length) for start, length in pieces], dtype=np.int64).reshape(-1, 2)
    starts, stops = table[:, 0], table[:, 0] + table[:, 1]
    ends = np.unique(np.concatenate([starts, stops, [0, size]]))
    begun = np.searchsorted(np.sort(starts), ends[:-1], side="right")
    done = np.searchsorted(np.sort(stops), ends[:-1], side="right")
    found: list[Count] = []
    for start, stop, times in zip(ends[:-1].tolist(), ends[1:].tolist(), (begun - done).tolist(), strict=True):
        if found and found[-1].stop == start and found[-1].times == times and start not in (0, size):
            found[-1] = Count(found[-1].start, stop, times)
        elif times or 0 <= start < size:
            found.append(Count(start, stop, times))
    return found


def layout_map(shape: Sequence[int], placement: Placement, num_ranks: int, rank: int) -> IndexMap:
    """What rank ``rank`` of ``num_ranks`` holds of a tensor of global ``shape``.

    Addends (partial) and varying values of different ranks are different
    things: rank k's stand for index ``(k + 1) * numel`` on.

    Raises:
        ValueError: the ranks do not divide the dim that they cut.
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
    """The experts of an expert-parallel rank, each of ``numel`` elements: rank k has the k-th share of them.

    Raises:
        ValueError: the ranks do not divide the experts.
    """
    return layout_map((num_experts, numel), Placement(PlacementKind.SHARDED, 0), num_ranks, rank)


def token_map(num_rows: int, seq_length: int, num_ranks: int, rank: int) -> IndexMap:
    """The tokens [rows, sequence] of a rank when the sequence is cut: with two rows or more they are no one range.

    Raises:
        ValueError: the ranks do not divide the sequence.
    """
    return layout_map((num_rows, seq_length), Placement(PlacementKind.SHARDED, 1), num_ranks, rank)


def fused_qkv_map(
    num_kv_heads: int, queries_per_kv_head: int, head_numel: int, num_ranks: int, rank: int, *, grouped: bool
) -> IndexMap:
    """The rows of a fused query, key and value weight that a tensor-parallel rank holds, ``head_numel`` a head.

    The local weight is [its queries, its keys, its values]. The whole one is,
    where ``grouped``, for each key-value head its queries, its key, its value
    (Megatron-LM's order); else all queries, all keys, all values.

    Raises:
        ValueError: the ranks do not divide the key-value heads.
    """
    if num_kv_heads % num_ranks:
        raise ValueError(f"{num_kv_heads} key-value heads do not divide over {num_ranks} ranks")
    share = num_kv_heads // num_ranks
    heads = range(rank * share, (rank + 1) * share)
    widths = (queries_per_kv_head, 1, 1)  # heads of query, key and value for each key-value head
    pieces = []
    local = 0
    for part, width in enumerate(widths):
        before = sum(widths[:part])
        for head in heads:
            first = head * sum(widths) + before if grouped else num_kv_heads * before + head * width
            pieces.append((local, first * head_numel, width * head_numel))
            local += width * head_numel
    return IndexMap.of(pieces)
