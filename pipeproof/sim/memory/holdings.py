"""What is held from when until when: the columns from which curves are made, and rows found by unit of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE, NONE, IntColumn
from pipeproof.schedule.derive import packed
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.optable import OpGraph
from pipeproof.sim.memory.curve import PARTS, MemoryCurve, Part


@dataclass(frozen=True, eq=False)
class Holdings:
    """Entries of one part: ``num_bytes`` on ``rank`` from ``begin`` to ``end``; none where they are the same time."""

    part: Part
    rank: IntColumn
    begin: IntColumn
    end: IntColumn
    num_bytes: IntColumn


class Clock:
    """When the operations of a graph run, and where those of a unit of work are.

    ``last`` is the end of the step.
    """

    def __init__(self, graph: OpGraph, starts: IntColumn, ends: IntColumn) -> None:
        self.graph, self.starts, self.ends = graph, starts, ends
        self.last = int(ends.max(initial=0))
        self._key = packed(graph.rank, graph.stage, graph.unit)

    def rows(self, *kinds: OpKind) -> IntColumn:
        """The operations of these kinds."""
        return np.flatnonzero(self.graph.is_kind(frozenset(kinds)))

    def beside(self, rows: IntColumn, *kinds: OpKind) -> IntColumn:
        """For each of ``rows`` the operation of these kinds on the same rank, stage and unit of work; else ``NONE``."""
        return self.found(rows, self.rows(*kinds))

    def found(self, rows: IntColumn, there: IntColumn) -> IntColumn:
        """For each of ``rows`` that of ``there`` on the same rank, stage and unit of work; else ``NONE``."""
        if not len(there):
            return np.full(len(rows), NONE, dtype=np.int64)
        there = there[np.argsort(self._key[there], kind="stable")]
        place = np.minimum(np.searchsorted(self._key[there], self._key[rows]), len(there) - 1)
        return np.where(self._key[there[place]] == self._key[rows], there[place], NONE)

    def start_of(self, rows: IntColumn) -> IntColumn:
        """Starts; of what is not there, the end of the step."""
        return np.where(rows == NONE, self.last, self.starts[rows])

    def end_of(self, rows: IntColumn) -> IntColumn:
        """Ends; of what is not there, the end of the step."""
        return np.where(rows == NONE, self.last, self.ends[rows])

    def posted_at(self, rows: IntColumn) -> IntColumn:
        """When the hosts of transfers come to them: after what stands before them on the host's own queue."""
        graph = self.graph
        on_host = (graph.queue == COMPUTE_QUEUE) | (graph.queue == HOST_QUEUE)
        before = np.maximum.accumulate(np.where(on_host, np.arange(graph.num_ops), NONE))[rows]
        return np.where(before >= graph.offsets[graph.rank[rows]], self.ends[before], 0)


def curves_of(
    lasting: Sequence[Mapping[Part, int]], holdings: Sequence[Holdings], ticks_per_us: int
) -> tuple[MemoryCurve, ...]:
    """The curve of each rank; ``lasting`` is what it has all along."""
    code = {part: number for number, part in enumerate(PARTS)}
    found = [(held, (held.begin < held.end) & (held.num_bytes != 0)) for held in holdings]
    rank, time, part, change = (
        np.concatenate([*columns, np.empty(0, dtype=np.int64)]).astype(np.int64)
        for columns in (
            [column[some] for held, some in found for column in (held.rank, held.rank)],
            [column[some] for held, some in found for column in (held.begin, held.end)],
            [np.full(2 * int(some.sum()), code[held.part]) for held, some in found],
            [column[some] for held, some in found for column in (held.num_bytes, -held.num_bytes)],
        )
    )
    order = np.lexsort((change, time, rank))
    bounds = np.searchsorted(rank[order], np.arange(len(lasting) + 1))
    return tuple(
        MemoryCurve(lasting[i], time[mine], part[mine], change[mine], ticks_per_us)
        for i, (first, last) in enumerate(pairwise(bounds.tolist()))
        for mine in (order[first:last],)
    )
