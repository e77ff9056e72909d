"""Tracks: the operation orders of a rank, one for its host and one for each named queue of reductions or copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.schedule.columns import HOST_QUEUE, NONE, IntColumn
from pipeproof.schedule.derive import packed
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, COPY_KINDS, TRANSFER_KINDS, UPDATE_KINDS, OpKind

_SIDE_KINDS = UPDATE_KINDS | COLLECTIVE_KINDS | COPY_KINDS | {OpKind.WAIT}


@dataclass(frozen=True, eq=False)
class Tracks:
    """The tracks of a graph: a host with its transfers is one track, each queue of another name is another.

    Without named queues a track is a rank.
    """

    graph: OpGraph

    @cached_property
    def named_queues_only_reduce_or_copy(self) -> bool:
        """True if named queues hold only reductions, gathers, copies and waits, and the host never delays them."""
        graph = self.graph
        named = np.flatnonzero(graph.queue > HOST_QUEUE)
        waits = named[graph.is_kind(frozenset({OpKind.WAIT}))[named]]
        awaited = graph.waits_for[waits]
        known = graph.is_kind(_SIDE_KINDS)[named].all() and not (len(named) and (graph.queue == HOST_QUEUE).any())
        return bool(known and not graph.is_kind(TRANSFER_KINDS)[awaited[awaited != NONE]].any())

    @property
    def have_no_named_queue(self) -> bool:
        """True if every operation is on a queue that each rank has."""
        return not (self.graph.queue > HOST_QUEUE).any()

    @cached_property
    def number(self) -> IntColumn:
        """Track number of each operation."""
        return packed(self.graph.rank, np.where(self.graph.queue > HOST_QUEUE, self.graph.queue, NONE))

    @cached_property
    def order(self) -> IntColumn:
        """Operation ids sorted by track, in program order within a track."""
        return np.argsort(self.number, kind="stable")

    @cached_property
    def position(self) -> IntColumn:
        """Position of each operation in ``order``."""
        position = np.empty_like(self.order)
        position[self.order] = np.arange(len(position))
        return position

    @cached_property
    def begins(self) -> IntColumn:
        """Positions in ``order`` at which tracks begin."""
        return np.flatnonzero(np.diff(self.number[self.order], prepend=NONE))

    def before(self, durations: IntColumn) -> IntColumn:
        """Sum of the durations that precede each operation on its track."""
        ordered = durations[self.order]
        so_far = np.cumsum(ordered) - ordered
        lengths = np.diff(np.append(self.begins, len(ordered)))
        result = np.empty_like(so_far)
        result[self.order] = so_far - np.repeat(so_far[self.begins], lengths)
        return result
