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

from pipeproof.schedule.ops import COLLECTIVE_KINDS, SEND_KINDS, TRANSFER_KINDS, OpKind
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


class _Model:
    def __init__(self, graph: OpGraph, durations: Durations, rules: TransferRules) -> None:
        self._graph, self._durations, self._rules = graph, durations, rules
        self._env = simpy.Environment(initial_time=0)
        self._starts: list[int | None] = [None] * len(graph.ops)
        self._ends: list[int | None] = [None] * len(graph.ops)
        self._stuck_at: list[int | None] = [None] * graph.num_ranks
        transfers = [op_id for op_id, op in enumerate(graph.ops) if op.kind in TRANSFER_KINDS]
        self._posted = {op_id: self._env.event() for op_id in transfers}
        self._begun = {op_id: self._env.event() for op_id in transfers}
        """The queue has come to the transfer."""
        self._done = {op_id: self._env.event() for op_id in transfers}
        self._queues: dict[tuple[int, int], list[int]] = {}
        for op_id in transfers:
            self._queues.setdefault((int(graph.rank[op_id]), int(graph.channel[op_id])), []).append(op_id)
        self._meetings: dict[tuple[int, int], tuple[simpy.Event, list[int]]] = {}

    def run(self) -> Outcome:
        for rank in range(self._graph.num_ranks):
            self._env.process(self._host(rank))
        for transfers in self._queues.values():
            self._env.process(self._queue(transfers))
        self._env.run()
        return Outcome(tuple(self._starts), tuple(self._ends), tuple(self._stuck_at))

    def _host(self, rank: int) -> _Process:
        for op_id in self._graph.rank_ops(rank):
            self._stuck_at[rank] = op_id
            kind = self._graph.ops[op_id].kind
            if kind in TRANSFER_KINDS:
                self._posted[op_id].succeed()
                if self._rules.host_blocks_on_post:
                    yield self._done[op_id]
                continue
            if self._ends[op_id] is not None:
                continue  # it ran beside the first of its pair
            self._start(op_id)
            if kind is OpKind.WAIT:
                yield self._completion(int(self._graph.waits_for[op_id]))
            elif kind in COLLECTIVE_KINDS:
                yield self._meeting(op_id)
            else:
                yield from self._compute(op_id)
            self._end(op_id)
        self._stuck_at[rank] = None

    def _compute(self, op_id: int) -> _Process:
        other = self._durations.beside.get(op_id)
        if other is not None:
            self._start(other)
        if self._durations.ticks[op_id]:
            yield self._env.timeout(self._durations.ticks[op_id])
        if other is not None:
            self._end(other)

    def _queue(self, transfers: list[int]) -> _Process:
        carry_out = self._rendezvous if self._rules.rendezvous else self._buffered
        for op_id in transfers:
            yield self._posted[op_id]
            self._start(op_id)
            self._begun[op_id].succeed(int(self._env.now))
            yield from carry_out(op_id)
            self._end(op_id)
            self._done[op_id].succeed()

    def _buffered(self, op_id: int) -> _Process:
        if self._graph.ops[op_id].kind in SEND_KINDS:
            return
        sent = yield self._beginning_of_partner(op_id)
        arrival = sent + self._durations.latency_ticks
        if arrival > self._env.now:
            yield self._env.timeout(arrival - self._env.now)

    def _rendezvous(self, op_id: int) -> _Process:
        yield self._beginning_of_partner(op_id)
        if self._durations.latency_ticks:
            yield self._env.timeout(self._durations.latency_ticks)

    def _beginning_of_partner(self, transfer: int) -> simpy.Event:
        partner = self._graph.match_of.get(transfer)
        return self._begun[partner] if partner is not None else self._never()

    def _completion(self, target: int) -> simpy.Event:
        if target == NONE:
            return self._never()
        return self._done.get(target) or self._env.timeout(0)  # whatever is no transfer, the host has done itself

    def _meeting(self, op_id: int) -> simpy.Event:
        """Come to a collective; the event that its last member has come."""
        group = int(self._graph.group[op_id])
        if group == NONE:  # of its own rank alone
            return self._env.timeout(0)
        key = (group, int(self._graph.position[op_id]))
        met, members = self._meetings.setdefault(key, (self._env.event(), []))
        members.append(op_id)
        if len(members) == len(self._graph.groups[group].ranks):
            met.succeed()
        return met

    def _never(self) -> simpy.Event:
        return self._env.event()

    def _start(self, op_id: int) -> None:
        self._starts[op_id] = int(self._env.now)

    def _end(self, op_id: int) -> None:
        self._ends[op_id] = int(self._env.now)
