"""Memory of one rank over simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE, NONE, IntColumn
from pipeproof.schedule.derive import look_up, packed
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import OpKind

GIB = 2**30


class Part(StrEnum):
    """Kinds of memory contents."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    MESSAGES = "messages"
    OVERHEAD = "overhead"


PARTS = tuple(Part)
"""All parts; the index of a part is its code in columns."""
STATES = (Part.PARAMETERS, Part.GRADIENTS, Part.OPTIMIZER)
"""Parts that last from step to step."""


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Bytes over time: ``persistent`` bytes by part for the step, and a ``change`` of ``part`` at each of ``times``.

    Times are ticks, ``ticks_per_us`` to a microsecond, in ascending order;
    at equal times releases precede allocations.
    """

    persistent: Mapping[Part, int]
    times: IntColumn
    part: IntColumn
    change: IntColumn
    ticks_per_us: int

    @cached_property
    def held(self) -> IntColumn:
        """Bytes after each change."""
        return np.cumsum(self.change) + self._always

    @property
    def peak(self) -> int:
        """Most bytes held at once."""
        return max(self._always, int(self.held.max(initial=0)))

    @property
    def peak_at_us(self) -> Fraction:
        """First time of the peak, in microseconds; 0 if the persistent parts alone make the peak."""
        return Fraction(0) if self._peak_index is None else self.us(int(self.times[self._peak_index]))

    def us(self, ticks: int) -> Fraction:
        """A time of this curve in microseconds."""
        return Fraction(ticks, self.ticks_per_us)

    @cached_property
    def make_up(self) -> Mapping[Part, int]:
        """Bytes of each part at the peak."""
        last = 0 if self._peak_index is None else self._peak_index + 1
        taken = {part: int(self.change[:last][self.part[:last] == code].sum()) for code, part in enumerate(PARTS)}
        return {part: self.persistent.get(part, 0) + taken[part] for part in PARTS}

    def steps(self) -> tuple[IntColumn, IntColumn]:
        """Points of the curve: distinct times, and the bytes held from each time on."""
        last = np.ones(len(self.times), dtype=bool)
        last[:-1] = self.times[1:] != self.times[:-1]
        return self.times[last], self.held[last]

    @property
    def _always(self) -> int:
        return sum(self.persistent.values())

    @cached_property
    def _peak_index(self) -> int | None:
        """Index of the change that makes the peak; None if the persistent parts alone make it."""
        if not len(self.held) or int(self.held.max()) <= self._always:
            return None
        return int(self.held.argmax())


@dataclass(frozen=True, eq=False)
class Holdings:
    """Allocations of one part: ``num_bytes`` on ``rank`` from ``begin`` to ``end``; none if both are equal."""

    part: Part
    rank: IntColumn
    begin: IntColumn
    end: IntColumn
    num_bytes: IntColumn


class Clock:
    """Times of the operations of a graph, with look-ups by work item. ``last`` is the end of the step."""

    def __init__(self, graph: OpGraph, starts: IntColumn, ends: IntColumn) -> None:
        self.graph, self.starts, self.ends = graph, starts, ends
        self.last = int(ends.max(initial=0))
        self._key = packed(graph.rank, graph.stage, graph.work_item)

    def rows(self, *kinds: OpKind) -> IntColumn:
        """Operations of these kinds."""
        return np.flatnonzero(self.graph.is_kind(frozenset(kinds)))

    def partner(self, rows: IntColumn, *kinds: OpKind) -> IntColumn:
        """Operation of these kinds on the same rank, stage and work item as each of ``rows``, or ``NONE``."""
        return self.look_up(rows, self.rows(*kinds))

    def look_up(self, rows: IntColumn, candidates: IntColumn, stage: int | None = None) -> IntColumn:
        """Candidate on the same rank and work item as each of ``rows``, and its or another stage, or ``NONE``."""
        candidates = candidates[np.argsort(self._key[candidates], kind="stable")]
        key = self._key[rows]
        if stage is not None:  # as ``packed`` has them, behind the stage
            key = key + (stage - self.graph.stage[rows]) * (int(self.graph.work_item.max(initial=NONE)) + 2)
        return look_up(self._key[candidates], candidates, key)

    def start_of(self, rows: IntColumn) -> IntColumn:
        """Start times; the end of the step for ``NONE``."""
        return np.where(rows == NONE, self.last, self.starts[rows])

    def end_of(self, rows: IntColumn) -> IntColumn:
        """End times; the end of the step for ``NONE``."""
        return np.where(rows == NONE, self.last, self.ends[rows])

    def posted_at(self, rows: IntColumn) -> IntColumn:
        """Times at which hosts post transfers: the end of the preceding operation on the host's queue."""
        graph = self.graph
        on_host = (graph.queue == COMPUTE_QUEUE) | (graph.queue == HOST_QUEUE)
        before = np.maximum.accumulate(np.where(on_host, np.arange(graph.num_ops), NONE))[rows]
        return np.where(before >= graph.offsets[graph.rank[rows]], self.ends[before], 0)


def curves_of(
    persistent: Sequence[Mapping[Part, int]], holdings: Sequence[Holdings], ticks_per_us: int
) -> tuple[MemoryCurve, ...]:
    """Memory curve of each rank; ``persistent`` are its bytes for the whole step."""
    code = {part: number for number, part in enumerate(PARTS)}
    entries = [(held, (held.begin < held.end) & (held.num_bytes != 0)) for held in holdings]
    rank, time, part, change = (
        np.concatenate([*columns, np.empty(0, dtype=np.int64)]).astype(np.int64)
        for columns in (
            [column[some] for held, some in entries for column in (held.rank, held.rank)],
            [column[some] for held, some in entries for column in (held.begin, held.end)],
            [np.full(2 * int(some.sum()), code[held.part]) for held, some in entries],
            [column[some] for held, some in entries for column in (held.num_bytes, -held.num_bytes)],
        )
    )
    order = np.lexsort((change, time, rank))
    bounds = np.searchsorted(rank[order], np.arange(len(persistent) + 1))
    return tuple(
        MemoryCurve(persistent[i], time[of_rank], part[of_rank], change[of_rank], ticks_per_us)
        for i, (first, last) in enumerate(pairwise(bounds.tolist()))
        for of_rank in (order[first:last],)
    )
