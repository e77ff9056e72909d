"""Verdict on a graph: deadlock under the declared channel model, under others only, or under none."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from pipeproof.comm.channel_models import MODELS, ChannelModel, Connections, declared_model, message_bytes
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.op_table import OpGraph
from pipeproof.verify.deadlock.wait_columns import Rows, WaitGraph, rows_of, wait_graph
from pipeproof.verify.subject import Subject

_MOST_STEPS = 100_000
"""Waits that the search for a shortest cycle may look at, in large knots of waits."""


def cyclic_part(waits: WaitGraph) -> BoolColumn:
    """Mask of the waits that may be on a cycle: empty if and only if there is no cycle. Linear in waits.

    All waits on cycles are in it, and perhaps some on paths from one cycle to another.
    """
    if not len(waits.source):
        return np.zeros(0, dtype=bool)
    used = np.zeros(int(max(waits.source.max(), waits.target.max())) + 1, dtype=bool)
    used[waits.source] = used[waits.target] = True
    number = np.cumsum(used) - 1
    source, target, num_nodes = number[waits.source], number[waits.target], int(number[-1]) + 1
    after_cycles = _never_freed(source, target, num_nodes)
    part: BoolColumn = after_cycles[source]
    if part.any():
        part = part & _never_freed(target, source, num_nodes)[target]
    return part


def _never_freed(source: IntColumn, target: IntColumn, num_nodes: int) -> BoolColumn:
    """Nodes that remain after repeatedly removing nodes that wait for nothing, with their waits."""
    waiting = np.bincount(target, minlength=num_nodes)
    order = np.argsort(source, kind="stable")
    followers = target[order].tolist()
    begins = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=num_nodes))]).tolist()
    ready = deque(np.flatnonzero(waiting == 0).tolist())
    count = waiting.tolist()
    while ready:
        node = ready.popleft()
        for follower in followers[begins[node] : begins[node + 1]]:
            count[follower] -= 1
            if count[follower] == 0:
                ready.append(follower)
    return np.array(count, dtype=np.int64) > 0


def shortest_cycle(waits: WaitGraph, part: BoolColumn) -> list[int]:
    """The waits of a cycle with as few waits as possible, each waiting for the next, as indices into ``waits``.

    ``part`` is the cyclic part, with a cycle in it. If a knot of waits is too
    large to search, the shortest cycle that was met.
    """
    short = _one_or_two_waits(waits, np.flatnonzero(part))
    if short:
        return short
    held_by: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for edge in np.flatnonzero(part).tolist():
        held_by[int(waits.target[edge])].append((int(waits.source[edge]), edge))
    best: list[int] = []
    steps = 0
    for start in sorted(held_by):
        cycle, looked_at = _cycle_through(held_by, start, len(best))
        best = cycle or best
        steps += looked_at
        del held_by[start]  # no other cycle through it is shorter
        if len(best) == 3 or (best and steps > _MOST_STEPS):
            break
    assert best, "the cyclic part has no cycle"
    return best


def _one_or_two_waits(waits: WaitGraph, part: IntColumn) -> list[int]:
    """The waits of two nodes for each other, or of one for itself; empty if there are none."""
    source, target = waits.source[part], waits.target[part]
    itself = np.flatnonzero(source == target)
    if len(itself):
        return [int(part[itself[0]])]
    size = int(max(source.max(), target.max())) + 1
    there, first = np.unique(source * size + target, return_index=True)
    back = target[first] * size + source[first]
    index = np.searchsorted(there, back)
    index[index == len(there)] = 0
    mutual = np.flatnonzero(there[index] == back)
    if not len(mutual):
        return []
    one = mutual[np.argmin(part[first[mutual]])]
    return [int(part[first[one]]), int(part[first[index[one]]])]


def _cycle_through(held_by: dict[int, list[tuple[int, int]]], start: int, shorter_than: int) -> tuple[list[int], int]:
    """(waits of a shortest cycle through a node, empty if none is short enough; waits looked at); 0: any length."""
    came_by = {start: (start, NONE)}
    frontier, length, steps = [start], 0, 0
    while frontier:
        length += 1
        if shorter_than and length >= shorter_than:
            break
        reached = []
        for node in frontier:
            for held, edge in held_by.get(node, ()):
                steps += 1
                if held == start:
                    path = [edge]
                    while node != start:
                        node, edge = came_by[node]
                        path.append(edge)
                    return path[::-1], steps
                if held not in came_by:
                    came_by[held] = (node, edge)
                    reached.append(held)
        frontier = reached
    return [], steps


Fault = Literal["queue", "device", "connections"]
"""Promise of the declared model that causes a deadlock."""

_SEARCHED_WHOLE = 20_000
"""Operations up to which a whole graph is searched for its shortest cycle."""

_FURTHER = 4
"""The first cycle is often a long one around all ranks; this many times its rows include short ones."""

_PART = 16
"""In a large graph, this part of each rank's program is searched first: most deadlocks are there."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a graph: deadlock under the declared model, else the models of ``MODELS`` under which it deadlocks."""

    declared: bool
    failing: tuple[ChannelModel, ...]


class DeadlockChecker:
    """Deadlock check of one graph under several models; columns that do not depend on the model are made once."""

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
        """Return True if the waits under a model have a cycle. Linear in operations."""
        return self._deadlocks_early(model) or bool(cyclic_part(wait_graph(self._all, model)).any())

    def _deadlocks_early(self, model: ChannelModel) -> bool:
        """Return True if there is a cycle among the first rows of each rank of a large graph."""
        return self._beginning is not None and bool(cyclic_part(wait_graph(self._beginning, model)).any())

    def verdict(self, declared: ChannelModel) -> Verdict:
        """The verdict under all models, from the strictest down; under the declared one alone if that deadlocks."""
        safe: list[ChannelModel] = []
        failing: list[ChannelModel] = []
        for model in MODELS:
            if self._covered(safe, model):
                continue
            if not self.deadlocks(model):
                safe.append(model)
                continue
            if not failing and self._deadlocks_early(declared):
                return Verdict(declared=True, failing=())  # the others take long in a large graph
            failing.append(model)
        if not self._covered(safe, declared) and self.deadlocks(declared):
            return Verdict(declared=True, failing=())
        return Verdict(declared=False, failing=tuple(failing))

    def _covered(self, safe: list[ChannelModel], model: ChannelModel) -> bool:
        """Return True if a model that is known to be safe has all waits of this one.

        An eager buffer with room for any one message delays a send no longer
        than one slot does.
        """
        if any(other.covers(model) for other in safe):
            return True
        if model.eager_bytes is None or model.eager_bytes < self._largest_message:
            return False
        slot = replace(model, completes="slots", slots=1, eager_bytes=None)
        return any(other.covers(slot) for other in safe)

    @cached_property
    def _largest_message(self) -> int:
        return int(message_bytes(self._graph).max(initial=0))


def deadlocks(graph: OpGraph, model: ChannelModel) -> bool:
    """Return True if a graph's waits under a model have a cycle."""
    return DeadlockChecker(graph).deadlocks(model)


def cycle_of(graph: OpGraph, model: ChannelModel) -> tuple[int, ...]:
    """Operations on a shortest cycle of a graph that deadlocks, each waiting for the next, the last for the first.

    Of a large graph, the first rows of each program are searched: some
    multiple of the fewest (by doubling) that have a cycle.
    """
    waits = wait_graph(rows_of(graph, _enough_rows(graph, model)), model)
    ops: list[int] = []
    for edge in shortest_cycle(waits, cyclic_part(waits)):
        ops += [int(waits.after[edge]), int(waits.before[edge])]
    return tuple(dict.fromkeys(op_id for op_id in ops if op_id != NONE))


def _enough_rows(graph: OpGraph, model: ChannelModel) -> int | None:
    """Number of rows of each program to search for a cycle; None: all."""
    if graph.num_ops <= _SEARCHED_WHOLE:
        return None
    longest = int(np.diff(graph.offsets).max())
    first = max(1, _SEARCHED_WHOLE // _PART // graph.num_ranks)
    while first < longest and not cyclic_part(wait_graph(rows_of(graph, first), model)).any():
        first *= 2
    return _FURTHER * first


def blamed(graph: OpGraph, declared: ChannelModel) -> tuple[ChannelModel, Fault]:
    """Cause of a deadlock under the declared model: (model of the witness, promise at fault).

    The promise is ``connections`` or ``device`` if the deadlock disappears
    without it, else ``queue``.
    """
    warm = replace(declared, connections="warm")
    if declared.connections == "lazy" and not deadlocks(graph, warm):
        return declared, "connections"
    if warm.queue == "device" and not deadlocks(graph, replace(warm, queue="rank")):
        return warm, "device"
    return warm, "queue"


def promised(subject: Subject) -> ChannelModel:
    """The model that the subject's backend and plan declare; connections are warm by default."""
    stated = "warm" if subject.lowered is None else subject.lowered.spec.transport.connections
    connections: Connections = "warm" if stated == "warm" else "lazy"
    return declared_model(subject.backend, connections)


def _verdict(subject: Subject) -> Verdict:
    return DeadlockChecker(subject.graph).verdict(promised(subject))


def declared_deadlock(subject: Subject) -> tuple[ChannelModel, Fault] | None:
    """The deadlock under the declared model, if there is one: see ``blamed``."""
    return blamed(subject.graph, promised(subject)) if subject.once(_verdict).declared else None


def conditions(subject: Subject) -> tuple[ChannelModel, ...]:
    """The models under which a subject deadlocks; none if it already deadlocks as declared."""
    verdict = subject.once(_verdict)
    return () if verdict.declared else verdict.failing


def opened_late(subject: Subject) -> ChannelModel | None:
    """The declared model with connections opened at first use, if it deadlocks and nothing rules it out."""
    if subject.lowered is not None or subject.once(_verdict).declared:
        return None
    model = replace(promised(subject), connections="lazy")
    return model if deadlocks(subject.graph, model) else None
