"""Reference model of a training step in SimPy: start and end of each operation.

``comm.channel_models`` gives the predecessors of each operation of a rank under a
channel model: which operations share a FIFO, which block the host. An operation
*starts* as soon as all of them are done. Then, by its kind:

- a computation takes its duration. Two overlapped computations start and end
  together;
- a message *begins* when its send is executed: with buffered sends at once, or
  as soon as its buffer has room; with rendezvous when both ends have started. It
  arrives after its time, for any number of pending messages;
- a buffered send is done when its message begins, a rendezvous send when it
  arrives. A receive is done when it has started and its message has arrived;
- a WAIT is done when all members of its target's call are done;
- a collective is done when its duration has passed since its last member
  started; the k-th calls of all members of a group are one collective;
- a computation is slowed down while a receive of its rank is pending (posted and not done), on devices whose receives
  spin, and while an exchange of an overlapped pair with parts is under way, from the start of its last member.

The collectives inside a computation follow it in its program, and so do its
parts if it alternates. The computation ends with the last of them.

The model never chooses between two possible events, so all times follow from
the graph alone. The k-th send of a channel matches its k-th receive. The model
uses bare SimPy events, one for each interval of time: a process for each queue
would take most of the run time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import simpy

from pipeproof.comm.channel_models import ChannelModel, EntryOrder, awaited_by_sends, done, post
from pipeproof.schedule.columns import HOST_QUEUE
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, KINDS, SEND_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.sim.op_durations import Durations
from pipeproof.sim.outcome import Outcome

# Computations slowed down by transfers: a pending receive spins on some devices, and a collective holds processors.


@dataclass(slots=True, eq=False)
class _Running:
    """A running computation.

    ``left`` is the remaining work in ticks of the undisturbed duration, ``since`` the time of the last speed change.
    """

    op_id: int
    left: Fraction
    since: int
    ends_at: int = -1


RECEIVE, EXCHANGE = 0, 1
"""Causes of slower computations: a receive that is under way, and a collective on a queue of its own."""


class SlowedWork:
    """Runs computations; while a transfer of their rank is under way, each takes longer.

    It takes 1 + the sum of the ``slowdowns`` of the kinds that are under way, RECEIVE and EXCHANGE, times as long,
    however many there are of a kind. A computation ends with the tick in which its work is done.
    """

    def __init__(
        self,
        env: simpy.Environment,
        num_ranks: int,
        slowdowns: tuple[Fraction, Fraction],
        finished: Callable[[int], None],
    ) -> None:
        self._env, self._finished, self._slowdowns = env, finished, slowdowns
        self._pending = [[0, 0] for _ in range(num_ranks)]
        self._running: list[list[_Running]] = [[] for _ in range(num_ranks)]

    def begin(self, rank: int, op_id: int, ticks: int) -> None:
        """Start a computation; call ``finished(op_id)`` when it ends."""
        work = _Running(op_id, Fraction(ticks), int(self._env.now))
        self._running[rank].append(work)
        self._aim(rank, work)

    def transfer_starts(self, rank: int, kind: int) -> None:
        """Record that a transfer of ``rank`` begins now."""
        if self._pending[rank][kind]:
            self._pending[rank][kind] += 1
        else:
            self._change(rank, kind, +1)

    def transfer_ends(self, rank: int, kind: int) -> None:
        """Record that a transfer of ``rank`` ends now."""
        if self._pending[rank][kind] > 1:
            self._pending[rank][kind] -= 1
        else:
            self._change(rank, kind, -1)

    def _change(self, rank: int, kind: int, by: int) -> None:
        """Change the number of pending transfers of a kind, and with it the speed."""
        if not self._slowdowns[kind]:
            self._pending[rank][kind] += by
            return
        now = int(self._env.now)
        for work in self._running[rank]:
            work.left -= (now - work.since) / self._pace(rank)
            work.since = now
        self._pending[rank][kind] += by
        for work in self._running[rank]:
            self._aim(rank, work)

    def _pace(self, rank: int) -> Fraction:
        pending = zip(self._slowdowns, self._pending[rank], strict=True)
        return 1 + sum((slowdown for slowdown, number in pending if number), Fraction(0))

    def _aim(self, rank: int, work: _Running) -> None:
        """Schedule the end of a computation; a change of speed before then replaces it."""
        now = int(self._env.now)
        work.ends_at = now + max(0, ceil(work.left * self._pace(rank)))

        def over(_: Any) -> None:
            if work.ends_at == int(self._env.now) and work in self._running[rank]:
                self._running[rank].remove(work)
                self._finished(work.op_id)

        self._env.timeout(work.ends_at - now).callbacks.append(over)


def run_model(graph: OpGraph, durations: Durations, model: ChannelModel) -> Outcome:
    """Run until no event is left; connections are open before the step. Linear in operations."""
    return _Model(graph, durations, model).run()


class _Model:
    def __init__(self, graph: OpGraph, durations: Durations, model: ChannelModel) -> None:
        self._graph, self._durations = graph, durations
        self._rendezvous = model.completes == "rendezvous"
        self._env = simpy.Environment(initial_time=0)
        self._first_of_pair = {second: first for first, second in durations.overlapped.items()}
        self._order = EntryOrder(graph, model)
        actions = [self._action_of(kind) for kind in KINDS]
        self._act = [actions[code] for code in graph.kind.tolist()]
        self._match, self._target, self._rank = graph.match.tolist(), graph.waits_for.tolist(), graph.rank.tolist()
        self._group, self._position = graph.group.tolist(), graph.position.tolist()
        self._starts: list[int | None] = [None] * graph.num_ops
        self._ends: list[int | None] = [None] * graph.num_ops
        """End of each operation, before its children are counted."""
        self._missing = [0] * (2 * graph.num_ops)
        """Number of unfinished predecessors of each event."""
        self._followers: list[list[int]] = [[] for _ in range(graph.num_ops)]
        """Events that follow the end of each operation."""
        self._can_happen: deque[int] = deque()
        self._begun: dict[int, int] = {}
        """Start times of messages by their sends."""
        self._awaited = awaited_by_sends(graph, model)
        self._held: dict[int, list[int]] = defaultdict(list)
        """Sends that wait for buffer room, by the receive that frees it."""
        self._met: dict[tuple[int, int], list[int]] = defaultdict(list)
        slowdowns = durations.recv_slowdown, durations.collective_slowdown
        self._work = SlowedWork(self._env, graph.num_ranks, slowdowns, self._computed) if any(slowdowns) else None
        slows_down = bool(durations.collective_slowdown)
        self._is_exchange = (slows_down & (graph.part_before != NONE) & (graph.queue > HOST_QUEUE)).tolist()

    def run(self) -> Outcome:
        for rank in range(self._graph.num_ranks):
            for entry, follows in self._order.entries(rank):
                self._follow(post(entry[-1]), [event // 2 for event in follows])
        self._settle()
        self._env.run()
        return Outcome(tuple(self._starts), self._ends_with_children(), self._stuck_at())

    def _follow(self, event: int, op_ids: Sequence[int]) -> None:
        """Make an event happen when the last of these operations is done."""
        for op_id in op_ids:
            if self._ends[op_id] is None:
                self._missing[event] += 1
                self._followers[op_id].append(event)
        if not self._missing[event]:
            self._can_happen.append(event)

    def _settle(self) -> None:
        now = int(self._env.now)
        while self._can_happen:
            op_id, is_done = divmod(self._can_happen.popleft(), 2)
            if is_done:
                self._done(op_id)
                continue
            for member in self._order.members(op_id):
                if self._starts[member] is None:
                    self._starts[member] = now
                    self._act[member](member)
                else:  # the second of an overlapped pair ends with the first
                    self._follow(done(member), [self._first_of_pair[member]])

    def _done(self, op_id: int) -> None:
        self._ends[op_id] = int(self._env.now)
        missing = self._missing
        for event in self._followers[op_id]:
            missing[event] -= 1
            if not missing[event]:
                self._can_happen.append(event)

    def _later(self, ticks: int, then: Callable[[int], None], op_id: int) -> None:
        """Call ``then(op_id)`` after ``ticks``, then process the events that it enables."""
        if not ticks:
            then(op_id)
            return

        def happened(_: Any) -> None:
            then(op_id)
            self._settle()

        self._env.timeout(ticks).callbacks.append(happened)

    def _action_of(self, kind: OpKind) -> Callable[[int], None]:
        if kind is OpKind.WAIT:
            return self._wait
        if kind in SEND_KINDS:
            return self._send
        if kind in TRANSFER_KINDS:
            return self._receive
        return self._call if kind in COLLECTIVE_KINDS else self._compute

    def _compute(self, op_id: int) -> None:
        second, ticks = self._durations.overlapped.get(op_id), self._durations.ticks[op_id]
        if second is not None:
            self._starts[second] = self._starts[op_id]
        if self._work is not None and ticks:
            self._work.begin(self._rank[op_id], op_id, ticks)
        else:
            self._later(ticks, self._done, op_id)

    def _computed(self, op_id: int) -> None:
        self._done(op_id)
        self._settle()

    def _wait(self, op_id: int) -> None:
        target = self._target[op_id]
        if target != NONE:  # otherwise it never ends
            self._follow(done(op_id), self._order.members(target))

    def _call(self, op_id: int) -> None:
        group = self._group[op_id]
        if group == NONE:  # a collective of one rank
            self._later(self._durations.ticks[op_id], self._done, op_id)
            return
        met = self._met[group, self._position[op_id]]
        met.append(op_id)
        if len(met) < len(self._graph.groups[group].ranks):
            return
        for member in met:
            then = self._done
            if self._work is not None and self._is_exchange[member]:
                self._work.transfer_starts(self._rank[member], EXCHANGE)
                then = self._exchanged
            self._later(self._durations.ticks[member], then, member)

    def _exchanged(self, op_id: int) -> None:
        assert self._work is not None
        self._work.transfer_ends(self._rank[op_id], EXCHANGE)
        self._done(op_id)

    def _send(self, op_id: int) -> None:
        receive, awaited = self._match[op_id], self._awaited.get(op_id)
        if self._meets(op_id):
            if receive != NONE and self._starts[receive] is not None:
                self._begin(op_id)
            return
        if awaited is None or (awaited != NONE and self._ends[awaited] is not None):
            self._begin(op_id)
        else:
            self._held[awaited].append(op_id)

    def _meets(self, send: int) -> bool:
        """True if a message begins when both ends have started: with rendezvous, or without a buffer for it."""
        return self._rendezvous or (send in self._awaited and self._awaited[send] == self._match[send] != NONE)

    def _receive(self, op_id: int) -> None:
        if self._work is not None:
            self._work.transfer_starts(self._rank[op_id], RECEIVE)
        send = self._match[op_id]
        if send == NONE:
            return
        if self._meets(send):
            if self._starts[send] is not None:
                self._begin(send)
        elif send in self._begun:
            arrival = self._begun[send] + self._durations.message(send)
            self._later(max(0, arrival - int(self._env.now)), self._received, op_id)

    def _begin(self, send: int) -> None:
        self._begun[send] = int(self._env.now)
        receive, meets = self._match[send], self._meets(send)
        if not meets:
            self._done(send)
        if meets:
            self._later(self._durations.message(send), self._met_message, send)
        elif receive != NONE and self._starts[receive] is not None:
            self._later(self._durations.message(send), self._received, receive)

    def _met_message(self, send: int) -> None:
        self._done(send)
        self._received(self._match[send])

    def _received(self, op_id: int) -> None:
        if self._work is not None:
            self._work.transfer_ends(self._rank[op_id], RECEIVE)
        self._done(op_id)
        for send in self._held.pop(op_id, ()):
            self._begin(send)

    def _ends_with_children(self) -> tuple[int | None, ...]:
        """End of each operation, including the collectives inside it."""
        ends = list(self._ends)
        parents = self._graph.parent
        for child in (parents != NONE).nonzero()[0].tolist():
            child_end, parent = ends[child], int(parents[child])
            parent_end = ends[parent]
            ends[parent] = None if child_end is None or parent_end is None else max(child_end, parent_end)
        return tuple(ends)

    def _stuck_at(self) -> tuple[int | None, ...]:
        return tuple(
            next(
                (i for i in self._graph.rank_ops(rank) if self._ends[i] is None and self._order.goes_with_host(i)), None
            )
            for rank in range(self._graph.num_ranks)
        )
