"""The verdict on a graph: deadlock under the declared model, under others only, or under none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from pipeproof.comm.buffering import message_bytes
from pipeproof.comm.channel_models import MODELS, ChannelModel
from pipeproof.schedule.columns import NONE
from pipeproof.schedule.optable import OpGraph
from pipeproof.verify.deadlock.columns import wait_graph
from pipeproof.verify.deadlock.cycles import cyclic_part, shortest_cycle
from pipeproof.verify.deadlock.rows import Rows, rows_of

Fault = Literal["queue", "device", "connections"]
"""Which promise of the declared model a deadlock is due to."""

_SEARCHED_WHOLE = 20_000
"""Operations up to which a whole graph is searched for its shortest cycle."""

_FURTHER = 4
"""The first cycle is often a long one around all ranks; this many times the rows have the short ones after it."""

_PART = 16
"""Of a large graph, that part of each rank's program is looked at first: most deadlocks are there."""


@dataclass(frozen=True)
class Verdict:
    """Whether a graph deadlocks under the declared model, and under which of ``MODELS`` it does."""

    declared: bool
    failing: tuple[ChannelModel, ...]


class Judge:
    """Judges one graph under model after model; what does not depend on the model is made once."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph

    @cached_property
    def _all(self) -> Rows:
        return rows_of(self._graph)

    @cached_property
    def _beginning(self) -> Rows | None:
        if self._graph.num_ops <= _SEARCHED_WHOLE:
            return None
        return rows_of(self._graph, int(np.diff(self._graph.offsets).max()) // _PART)

    def deadlocks(self, model: ChannelModel) -> bool:
        """Whether the waits under a model have a cycle. Linear in operations."""
        if self._beginning is not None and cyclic_part(wait_graph(self._beginning, model)).any():
            return True
        return bool(cyclic_part(wait_graph(self._all, model)).any())

    def verdict(self, declared: ChannelModel) -> Verdict:
        """The verdict under the declared model and under all others, from the strictest down."""
        safe: list[ChannelModel] = []
        failing = []
        for model in MODELS:
            if self._covered(safe, model):
                continue
            if self.deadlocks(model):
                failing.append(model)
            else:
                safe.append(model)
        return Verdict(not self._covered(safe, declared) and self.deadlocks(declared), tuple(failing))

    def _covered(self, safe: list[ChannelModel], model: ChannelModel) -> bool:
        """Whether a model that is known to be safe has all waits that this one has.

        An eager buffer with room for any one message holds a send back no
        longer than one slot does.
        """
        if any(known.covers(model) for known in safe):
            return True
        if model.eager_bytes is None or model.eager_bytes < self._largest_message:
            return False
        slot = replace(model, completes="slots", slots=1, eager_bytes=None)
        return any(known.covers(slot) for known in safe)

    @cached_property
    def _largest_message(self) -> int:
        return int(message_bytes(self._graph).max(initial=0))


def deadlocks(graph: OpGraph, model: ChannelModel) -> bool:
    """Whether a graph's waits under a model have a cycle."""
    return Judge(graph).deadlocks(model)


def cycle_of(graph: OpGraph, model: ChannelModel) -> tuple[int, ...]:
    """Operations on a shortest cycle of a graph that deadlocks, each waiting for the next, the last for the first.

    Of a large graph, the first rows of each program are searched: some
    multiple of the fewest (by doubling) that have a cycle.
    """
    waits = wait_graph(rows_of(graph, _enough_rows(graph, model)), model)
    ops: list[int] = []
    for place in shortest_cycle(waits, cyclic_part(waits)):
        ops += [int(waits.after[place]), int(waits.before[place])]
    return tuple(dict.fromkeys(op_id for op_id in ops if op_id != NONE))


def _enough_rows(graph: OpGraph, model: ChannelModel) -> int | None:
    """How many rows of each program to search for a cycle; None: all."""
    if graph.num_ops <= _SEARCHED_WHOLE:
        return None
    longest = int(np.diff(graph.offsets).max())
    first = max(1, _SEARCHED_WHOLE // _PART // graph.num_ranks)
    while first < longest and not cyclic_part(wait_graph(rows_of(graph, first), model)).any():
        first *= 2
    return _FURTHER * first


def blamed(graph: OpGraph, declared: ChannelModel) -> tuple[ChannelModel, Fault]:
    """What makes a graph deadlock under the declared model: (the model to show it by, the promise at fault).

    The promise is ``connections`` or ``device`` where the deadlock goes
    without it alone, else ``queue``.
    """
    warm = replace(declared, connections="warm")
    if declared.connections == "lazy" and not deadlocks(graph, warm):
        return declared, "connections"
    if warm.queue == "device" and not deadlocks(graph, replace(warm, queue="rank")):
        return warm, "device"
    return warm, "queue"
