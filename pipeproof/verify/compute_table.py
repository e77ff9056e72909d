"""Computation as columns: one entry per rank, stage and micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import COMPUTE_KINDS, KIND_CODE, OpKind


@dataclass(frozen=True, eq=False)
class ComputeTable:
    """The compute operations of a graph by rank, stage and micro-batch, in that order.

    ``rank``, ``stage`` and ``work_item`` identify entry ``i``;
    ``count[kind][i]`` how often its rank runs that kind, ``first[kind][i]`` the
    op id of the first one, ``NONE`` without any. ``rows`` are the op ids of
    all compute operations, ``entry_of`` the entry of each.
    """

    rank: IntColumn
    stage: IntColumn
    work_item: IntColumn
    count: Mapping[OpKind, IntColumn]
    first: Mapping[OpKind, IntColumn]
    rows: IntColumn
    entry_of: IntColumn

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def forwards(self) -> IntColumn:
        """Number of forwards of each entry."""
        return self.count[OpKind.FORWARD]

    @cached_property
    def backwards(self) -> IntColumn:
        """Number of input gradients of each entry: in a whole backward or in its first half."""
        return self.count[OpKind.BACKWARD] + self.count[OpKind.BACKWARD_INPUT]

    @cached_property
    def first_backward(self) -> IntColumn:
        """The op id of the first operation that makes an entry's input gradient, ``NONE`` without any."""
        whole, half = self.first[OpKind.BACKWARD], self.first[OpKind.BACKWARD_INPUT]
        return np.where(whole == NONE, half, np.where(half == NONE, whole, np.minimum(whole, half)))

    def ops(self, entry: int) -> list[int]:
        """The op ids of one entry, in program order."""
        order, starts = self._by_entry
        return [int(op_id) for op_id in self.rows[order[starts[entry] : starts[entry + 1]]]]

    def find(self, rank: IntColumn, stage: IntColumn, work_item: IntColumn) -> IntColumn:
        """The entry at each of these places, ``NONE`` where nothing is computed; all arrays of one length."""
        num_stages, num_work_items, keys = self._index
        inside = (stage >= 0) & (stage < num_stages) & (work_item >= 0) & (work_item < num_work_items)
        if not len(keys):
            return np.full(len(rank), NONE, dtype=np.int64)
        expected = np.where(inside, (rank * num_stages + stage) * num_work_items + work_item, NONE)
        place = np.minimum(np.searchsorted(keys, expected), len(keys) - 1)
        return np.where(keys[place] == expected, place, NONE)

    @cached_property
    def _index(self) -> tuple[int, int, IntColumn]:
        num_stages = int(self.stage.max(initial=-1)) + 1
        num_work_items = int(self.work_item.max(initial=-1)) + 1
        return (
            num_stages,
            num_work_items,
            (self.rank * num_stages + self.stage) * num_work_items + self.work_item,
        )

    @cached_property
    def _by_entry(self) -> tuple[IntColumn, IntColumn]:
        order = np.argsort(self.entry_of, kind="stable")
        return order, np.searchsorted(self.entry_of[order], np.arange(len(self) + 1))


def compute_table(graph: OpGraph) -> ComputeTable:
    """The compute operations of a graph; linear in rows but for one sort of them.

    Raises:
        OverflowError: stages and micro-batches are numbered too high for 63 bits.
    """
    rows = np.flatnonzero(graph.is_kind(COMPUTE_KINDS) & (graph.work_item != NONE))
    rank, stage, work_item = graph.rank[rows], graph.stage[rows], graph.work_item[rows]
    sizes = graph.num_ranks, int(stage.max(initial=-1)) + 1, int(work_item.max(initial=-1)) + 1
    if sizes[0] * sizes[1] * sizes[2] >= 2**63:
        raise OverflowError("operations are numbered too high for this table")
    keys = (rank * sizes[1] + stage) * sizes[2] + work_item
    _, some, entry_of = np.unique(keys, return_index=True, return_inverse=True)
    count: dict[OpKind, IntColumn] = {}
    first: dict[OpKind, IntColumn] = {}
    for kind in sorted(COMPUTE_KINDS):
        selected = np.flatnonzero(graph.kind[rows] == KIND_CODE[kind])
        count[kind] = np.bincount(entry_of[selected], minlength=len(some))
        first[kind] = np.full(len(some), NONE, dtype=np.int64)
        first[kind][entry_of[selected[::-1]]] = rows[
            selected[::-1]
        ]  # of several the last one written stays: the first row
    return ComputeTable(rank[some], stage[some], work_item[some], count, first, rows, entry_of)
