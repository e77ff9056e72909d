"""The orders in which the operations of each rank run: its host's, and one for each queue of sums beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.schedule.columns import HOST_QUEUE, NONE, IntColumn
from pipeproof.schedule.derive import packed
from pipeproof.schedule.ops import COLLECTIVE_KINDS, TRANSFER_KINDS, UPDATE_KINDS, OpKind
from pipeproof.schedule.optable import OpGraph

_SUMS = UPDATE_KINDS | COLLECTIVE_KINDS | {OpKind.WAIT}


@dataclass(frozen=True, eq=False)
class Lanes:
    """What a host comes to, transfers included, is one lane; what stands on a queue of another name is another.

    Where there are no other queues, all columns below are those of the ranks.
    """

    graph: OpGraph

    @cached_property
    def have_sums_alone(self) -> bool:
        """Whether what stands on queues of other names is sums, gathers, and waits for what is no transfer.

        And the host holds them up nowhere.
        """
        graph = self.graph
        beside = np.flatnonzero(graph.queue > HOST_QUEUE)
        waits = beside[graph.is_kind(frozenset({OpKind.WAIT}))[beside]]
        awaited = graph.waits_for[waits]
        known = graph.is_kind(_SUMS)[beside].all() and not (len(beside) and (graph.queue == HOST_QUEUE).any())
        return bool(known and not graph.is_kind(TRANSFER_KINDS)[awaited[awaited != NONE]].any())

    @property
    def is_one(self) -> bool:
        """Whether no queue is there but those that every rank has."""
        return not (self.graph.queue > HOST_QUEUE).any()

    @cached_property
    def number(self) -> IntColumn:
        """By operation, a number that is equal for those of one lane."""
        return packed(self.graph.rank, np.where(self.graph.queue > HOST_QUEUE, self.graph.queue, NONE))

    @cached_property
    def order(self) -> IntColumn:
        """The operations lane by lane, each in the order of its program."""
        return np.argsort(self.number, kind="stable")

    @cached_property
    def place(self) -> IntColumn:
        """By operation, where it stands in ``order``."""
        place = np.empty_like(self.order)
        place[self.order] = np.arange(len(place))
        return place

    @cached_property
    def begins(self) -> IntColumn:
        """Where in ``order`` lanes begin."""
        return np.flatnonzero(np.diff(self.number[self.order], prepend=NONE))

    def before(self, durations: IntColumn) -> IntColumn:
        """By operation, the sum of the durations before it on its lane."""
        ordered = durations[self.order]
        so_far = np.cumsum(ordered) - ordered
        lengths = np.diff(np.append(self.begins, len(ordered)))
        result = np.empty_like(so_far)
        result[self.order] = so_far - np.repeat(so_far[self.begins], lengths)
        return result
