"""The reference model of a training step, as SimPy processes. Read it from top to bottom.

- Every rank has a *host*, which walks the rank's operations in program order.
  Compute takes its duration; everything else takes no time of its own. What a
  program puts on queues of other names the host does in its place. The two
  computations of an overlapped pair begin and end together.
- Every rank has a *queue* per channel. The host posts a transfer, which takes
  it no time, and the queue carries transfers out one after the other, in the
  order in which they were posted. The k-th send of a channel meets its k-th
  receive.
- *Buffered* messages: a send is done as soon as its queue comes to it. The
  message arrives one latency later, however many are under way; a receive is
  done when its queue has come to it and the message has arrived.
- *Rendezvous*: a transfer begins when both queues have come to it and takes
  one latency; then both sides are done.
- A WAIT holds its host until the transfer is done.
- A collective holds the hosts of its members until the last one has come; the
  k-th call of each member on a group is one collective.

Nothing here chooses between two things that could happen, so all times follow
from the graph alone. SimPy orders what happens at one time by (time, priority,
sequence), so that two runs also do the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

from pipeproof.schedule.ops import COLLECTIVE_KINDS, KINDS, SEND_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.schedule.optable import NONE, OpGraph
from pipeproof.sim.costs import Durations

_Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class TransferRules:
    """How messages behave: with ``rendezvous`` a send is done with its receive, else it is buffered.

    ``host_blocks_on_post`` holds the host until the transfer that it posted is done.
    """

    rendezvous: bool
    host_blocks_on_post: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Start and end of each operation in ticks, None for what never started or never ended.

    ``stuck_at[rank]`` is the operation in which the host of ``rank`` waits
    for ever; None where it came to its end.
    """

    starts: tuple[int | None, ...]
    ends: tuple[int | None, ...]
    stuck_at: tuple[int | None, ...]


def run_model(graph: OpGraph, durations: Durations, rules: TransferRules) -> Outcome:
    """Run every host and queue until nothing more can happen. Linear in operations."""
    return _Model(graph, durations, rules).run()


class _Moments:
    """When something happened to each operation; an event only where a process waits for what is yet to come.

    Most of what processes ask for has happened before they ask. Events for all of it would take half of the time.
    """

    def __init__(self, env: simpy.Environment, num_ops: int) -> None:
        self._env = env
        self._awaited: dict[int, simpy.Event] = {}
        self.at: list[int | None] = [None] * num_ops

    def happens(self, op_id: int) -> None:
        """It happens to ``op_id`` now."""
        self.at[op_id] = int(self._env.now)
        event = self._awaited.pop(op_id, None)
        if event is not None:
            event.succeed()

    def coming(self, op_id: int) -> simpy.Event:
        """The event that it happens to ``op_id``, to which it has not happened yet."""
        return self._awaited.setdefault(op_id, self._env.event())


class _Model:
    def __init__(self, graph: OpGraph, durations: Durations, rules: TransferRules) -> None:
        self._graph, self._durations, self._rules = graph, durations, rules
        self._env = simpy.Environment(initial_time=0)
        self._kinds = [KINDS[code] for code in graph.kind.tolist()]
        self._match, self._waits_for = graph.match.tolist(), graph.waits_for.tolist()
        self._group, self._position = graph.group.tolist(), graph.position.tolist()
        self._starts, self._posts, self._ends = (_Moments(self._env, graph.num_ops) for _ in range(3))
        """A transfer starts when its queue has come to it."""
        self._stuck_at: list[int | None] = [None] * graph.num_ranks
        self._queues: dict[tuple[int, int], list[int]] = {}
        for op_id, (kind, *queue) in enumerate(
            zip(self._kinds, graph.rank.tolist(), graph.channel.tolist(), strict=True)
        ):
            if kind in TRANSFER_KINDS:
                self._queues.setdefault((queue[0], queue[1]), []).append(op_id)
        self._meetings: dict[tuple[int, int], tuple[simpy.Event, list[int]]] = {}

    def run(self) -> Outcome:
        for rank in range(self._graph.num_ranks):
            self._env.process(self._host(rank))
        for transfers in self._queues.values():
            self._env.process(self._queue(transfers))
        self._env.run()
        return Outcome(tuple(self._starts.at), tuple(self._ends.at), tuple(self._stuck_at))

    def _host(self, rank: int) -> _Process:
        for op_id in self._graph.rank_ops(rank):
            self._stuck_at[rank] = op_id
            kind = self._kinds[op_id]
            if kind in TRANSFER_KINDS:
                self._posts.happens(op_id)
                if self._rules.host_blocks_on_post:
                    yield from self._until_done(op_id)
                continue
            if self._ends.at[op_id] is not None:
                continue  # it ran beside the first of its pair
            self._starts.happens(op_id)
            if kind is OpKind.WAIT:
                yield from self._until_done(self._waits_for[op_id])
            elif kind in COLLECTIVE_KINDS:
                yield from self._until_met(op_id)
            else:
                yield from self._compute(op_id)
            self._ends.happens(op_id)
        self._stuck_at[rank] = None

    def _compute(self, op_id: int) -> _Process:
        other = self._durations.beside.get(op_id)
        if other is not None:
            self._starts.happens(other)
        if self._durations.ticks[op_id]:
            yield self._env.timeout(self._durations.ticks[op_id])
        if other is not None:
            self._ends.happens(other)

    def _queue(self, transfers: list[int]) -> _Process:
        carry_out = self._rendezvous if self._rules.rendezvous else self._buffered
        for op_id in transfers:
            if self._posts.at[op_id] is None:
                yield self._posts.coming(op_id)
            self._starts.happens(op_id)
            yield from carry_out(op_id)
            self._ends.happens(op_id)

    def _buffered(self, op_id: int) -> _Process:
        if self._kinds[op_id] in SEND_KINDS:
            return
        yield from self._until_begun(self._match[op_id])
        sent = self._starts.at[self._match[op_id]]
        assert sent is not None
        arrival = sent + self._durations.latency_ticks
        if arrival > self._env.now:
            yield self._env.timeout(arrival - self._env.now)

    def _rendezvous(self, op_id: int) -> _Process:
        yield from self._until_begun(self._match[op_id])
        if self._durations.latency_ticks:
            yield self._env.timeout(self._durations.latency_ticks)

    def _until_begun(self, transfer: int) -> _Process:
        if transfer == NONE:
            yield self._env.event()  # which never happens
        if self._starts.at[transfer] is None:
            yield self._starts.coming(transfer)

    def _until_done(self, target: int) -> _Process:
        if target == NONE:
            yield self._env.event()  # which never happens
        if self._kinds[target] in TRANSFER_KINDS and self._ends.at[target] is None:
            yield self._ends.coming(target)  # whatever is no transfer, the host has done itself

    def _until_met(self, op_id: int) -> _Process:
        """Come to a collective, and stay until its last member has come."""
        group = self._group[op_id]
        if group == NONE:  # of its own rank alone
            return
        key = (group, self._position[op_id])
        met, members = self._meetings.setdefault(key, (self._env.event(), []))
        members.append(op_id)
        if len(members) == len(self._graph.groups[group].ranks):
            met.succeed()
        yield met
