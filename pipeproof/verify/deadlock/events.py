"""The definition of a deadlock, written to be read: post and done events, and what each of them follows.

Each operation has two events. *post* is when it is under way (the rank's host
has come to it, or its queue has), *done* when it has finished. What an event
follows, under a channel model:

- done follows post;
- rows of one rank with a common batch are one call, an *entry*, which stands
  where its last row stands; any other row is an entry of its own. An entry's
  posts follow the dones of all members of the entry before it, in every order
  below; its members have no order among themselves;
- the compute queue is also the order in which the host issues. Its entries
  follow each other. A transfer on its default queue follows the entry of the
  compute queue before it;
- what runs on the ``host`` queue, a transfer whose post holds the host and
  the opening of a connection hold everything that the rank issues later;
- entries of a queue of another name follow each other;
- transfers follow the one before them on their channel end and, on default
  queues, on the model's FIFO; with one FIFO for the device, all communication
  of the rank is one order;
- a receive is done after the post of its send. A send at rendezvous is done
  after the post of its receive; with N slots, the k-th send of a channel after
  the done of its (k-N)-th receive; eager up to N bytes, after the done of the
  last receive that must be over for the bytes in between to fit;
- a collective is done, on every member, after the posts of all members, and
  never if one of the group's ranks does not issue it;
- a WAIT is done after every member of its target's entry (a group call
  completes as a whole), and never if nothing of that name is under way;
- where connections are opened at first use, the first transfer of a channel
  on each side, and the first collective of each member on a group, come after
  the opening, which comes after all these hosts have come to it. First uses
  in one batch are opened together.

The plan deadlocks if and only if these events have a cycle, or something that
never comes is waited for. ``columns`` says the same of whole columns at once.

Two steps in a row deadlock if and only if one does, where every channel and
every group is balanced (which PP301, PP306 and PP402 demand): the k-th send
then meets a receive of its own step, so no event of the first step follows
one of the second, and the second step's waits among its own events are those
of the first, or fewer, since slots may be free and connections open.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE, NONE
from pipeproof.schedule.ops import COLLECTIVE_KINDS, SEND_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.schedule.optable import OpGraph
from pipeproof.verify.deadlock.buffering import message_bytes
from pipeproof.verify.deadlock.models import ChannelModel

if TYPE_CHECKING:
    import networkx as nx


def post(op_id: int) -> int:
    """The event "this operation is under way" as an integer."""
    return 2 * op_id


def done(op_id: int) -> int:
    """The event "this operation has finished" as an integer."""
    return 2 * op_id + 1


@dataclass(frozen=True)
class Events:
    """``follows[v]`` lists the events that event ``v`` follows; ``never`` those that cannot happen at all.

    Events from twice the number of operations on are openings of connections.
    """

    follows: tuple[tuple[int, ...], ...]
    never: frozenset[int]

    def nx(self) -> nx.DiGraph[int]:
        """The wait-for graph: an edge from each event to every event it waits for."""
        import networkx as nx

        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_edges_from((v, u) for v, before in enumerate(self.follows) for u in before)
        return graph


def events_of(graph: OpGraph, model: ChannelModel) -> Events:
    """The events of a graph under a channel model. For graphs to be read; ``wait_graph`` is for large ones."""
    writing = _Writing(graph, model)
    for rank in range(graph.num_ranks):
        writing.order(rank)
    writing.complete_transfers()
    writing.complete_collectives()
    writing.complete_waits()
    writing.complete_openings()
    return Events(tuple(map(tuple, writing.follows)), frozenset(writing.never))


def stuck_events(events: Events) -> list[int]:
    """Events that can never happen, because they are on a cycle, behind one, or behind ``never``."""
    waiting = [len(before) for before in events.follows]
    followers: list[list[int]] = [[] for _ in events.follows]
    for event, before in enumerate(events.follows):
        for earlier in before:
            followers[earlier].append(event)
    ready = deque(e for e, count in enumerate(waiting) if count == 0 and e not in events.never)
    happened = bytearray(len(waiting))
    while ready:
        event = ready.popleft()
        happened[event] = 1
        for follower in followers[event]:
            waiting[follower] -= 1
            if waiting[follower] == 0 and follower not in events.never:
                ready.append(follower)
    return [event for event, flag in enumerate(happened) if not flag]


@dataclass
class _Host:
    """Where one rank's host is: the events that what it issues next has to follow."""

    issued: list[int] = field(default_factory=list)
    """Of the compute queue's last entry, for what goes with its order."""
    held: list[int] = field(default_factory=list)
    """Of the last entry that held the host, for everything."""
    last: dict[Hashable, list[int]] = field(default_factory=dict)
    """Of the last entry of each queue and FIFO."""


class _Writing:
    def __init__(self, graph: OpGraph, model: ChannelModel) -> None:
        self.graph, self.model = graph, model
        self.follows: list[list[int]] = [[] for _ in range(2 * graph.num_ops)]
        self.never: set[int] = set()
        self._bytes = message_bytes(graph)
        self._batch_of: dict[tuple[int, int], list[int]] = defaultdict(list)
        for op_id in np.flatnonzero(graph.batch != NONE).tolist():
            self._batch_of[int(graph.rank[op_id]), int(graph.batch[op_id])].append(op_id)
        self._openings: dict[tuple[str, int], int] = {}
        self._came: dict[tuple[str, int], set[int]] = defaultdict(set)

    def members(self, op_id: int) -> list[int]:
        """The rows of an operation's entry."""
        return self._batch_of.get((int(self.graph.rank[op_id]), int(self.graph.batch[op_id])), [op_id])

    def order(self, rank: int) -> None:
        """What the posts of one rank follow."""
        host = _Host()
        for op_id in self.graph.rank_ops(rank):
            entry = self.members(op_id)
            if op_id == entry[-1]:
                self._open(entry, host)
                self._post(entry, host)

    def _open(self, entry: list[int], host: _Host) -> None:
        """Openings of the connections that an entry is the first of its rank to use."""
        first_uses = [c for op_id in entry for c in self._connection(op_id)]
        opened = []
        for connection in dict.fromkeys(first_uses):
            rank = int(self.graph.rank[entry[0]])
            if rank in self._came[connection]:
                continue
            self._came[connection].add(rank)
            if connection not in self._openings:
                self._openings[connection] = len(self.follows)
                self.follows.append([])
            opening = self._openings[connection]
            self.follows[opening] += host.issued
            opened.append(opening)
        if opened:
            host.issued = host.held = opened

    def _connection(self, op_id: int) -> Iterator[tuple[str, int]]:
        if self.model.connections == "lazy":
            if self._is_transfer(op_id):
                yield "channel", int(self.graph.channel[op_id])
            elif self._is_call(op_id):
                yield "group", int(self.graph.group[op_id])

    def _post(self, entry: list[int], host: _Host) -> None:
        dones = [done(op_id) for op_id in entry]
        before: list[int] = []
        keys = list(dict.fromkeys(key for op_id in entry for key in self._queues(op_id)))
        if any(self._goes_with_host(op_id) or self._by_default(op_id) for op_id in entry):
            before += host.issued
        before += host.held
        for key in keys:
            before += host.last.get(key, [])
            host.last[key] = dones
        if any(self._goes_with_host(op_id) for op_id in entry):
            host.issued = dones
        if any(self._holds_host(op_id) for op_id in entry):
            host.held = dones
        for op_id in entry:
            self.follows[post(op_id)] += before
            self.follows[done(op_id)].append(post(op_id))

    def _goes_with_host(self, op_id: int) -> bool:
        """Whether an operation is part of the order in which its host issues."""
        return int(self.graph.queue[op_id]) in (COMPUTE_QUEUE, HOST_QUEUE) or self._holds_host(op_id)

    def _holds_host(self, op_id: int) -> bool:
        blocking = self.model.host_blocks and self._is_transfer(op_id)
        return blocking or int(self.graph.queue[op_id]) == HOST_QUEUE

    def _by_default(self, op_id: int) -> bool:
        return int(self.graph.queue[op_id]) == NONE

    def _is_transfer(self, op_id: int) -> bool:
        return self.graph.ops[op_id].kind in TRANSFER_KINDS

    def _is_call(self, op_id: int) -> bool:
        return self.graph.ops[op_id].kind in COLLECTIVE_KINDS and int(self.graph.group[op_id]) != NONE

    def _queues(self, op_id: int) -> Iterator[Hashable]:
        """The orders of its rank, beside the host's, in which an operation stands."""
        if int(self.graph.queue[op_id]) not in (NONE, COMPUTE_QUEUE, HOST_QUEUE):
            yield "queue", int(self.graph.queue[op_id])
        if self._is_transfer(op_id):
            is_send = self.graph.ops[op_id].kind in SEND_KINDS
            channel = int(self.graph.channel[op_id])
            yield "end", channel, is_send
            if self._by_default(op_id):
                match self.model.queue:
                    case "rank":
                        yield "rank"
                    case "direction":
                        yield "direction", is_send
                    case "communicator":
                        yield "communicator", self.graph.channels[channel].communicator
                    case "pair":
                        yield "pair", int(self.graph.peer[op_id])
        if self.model.queue == "device" and (self._is_transfer(op_id) or self._is_call(op_id)):
            yield "device"

    def complete_transfers(self) -> None:
        """What the dones of transfers follow."""
        for channel in range(len(self.graph.channels)):
            ends = np.flatnonzero(self.graph.channel == channel).tolist()
            sends = [op_id for op_id in ends if self.graph.ops[op_id].kind in SEND_KINDS]
            receives = [op_id for op_id in ends if self.graph.ops[op_id].kind not in SEND_KINDS]
            for place, receive in enumerate(receives):
                self._follow_or_never(receive, post(sends[place]) if place < len(sends) else None)
            for place, send in enumerate(sends):
                if self.model.completes == "rendezvous":
                    self._follow_or_never(send, post(receives[place]) if place < len(receives) else None)
                    continue
                awaited = self._awaited(sends, place)
                if awaited is not None:
                    self._follow_or_never(send, done(receives[awaited]) if awaited < len(receives) else None)

    def _awaited(self, sends: list[int], place: int) -> int | None:
        """Which receive of the channel must be over before the send at ``place`` is done; None if none."""
        if self.model.completes == "slots":
            return place - self.model.slots if place >= self.model.slots else None
        if self.model.eager_bytes is None:
            return None
        size = 0
        for earlier in range(place, -1, -1):
            size += int(self._bytes[sends[earlier]])
            if size > self.model.eager_bytes:
                return earlier
        return None

    def _follow_or_never(self, op_id: int, event: int | None) -> None:
        if event is None:
            self.never.add(done(op_id))
        else:
            self.follows[done(op_id)].append(event)

    def complete_collectives(self) -> None:
        """What the dones of collectives follow."""
        calls: dict[tuple[int, int], list[int]] = defaultdict(list)
        for op_id in filter(self._is_call, range(self.graph.num_ops)):
            calls[int(self.graph.group[op_id]), int(self.graph.position[op_id])].append(op_id)
        for (group, _), members in calls.items():
            if not self._all_there(group, {int(self.graph.rank[member]) for member in members}):
                self.never.update(map(done, members))
            for member in members:
                self.follows[done(member)] += [post(other) for other in members if other != member]

    def _all_there(self, group: int, ranks: set[int]) -> bool:
        return ranks >= set(self.graph.groups[group].ranks)

    def complete_waits(self) -> None:
        """What the dones of WAITs follow."""
        for op_id, op in enumerate(self.graph.ops):
            if op.kind is OpKind.WAIT:
                target = int(self.graph.waits_for[op_id])
                if target == NONE:
                    self.never.add(done(op_id))
                else:
                    self.follows[done(op_id)] += map(done, self.members(target))

    def complete_openings(self) -> None:
        """A connection that one of its members never uses is never opened."""
        for (what, number), opening in self._openings.items():
            came = self._came[what, number]
            if what == "group":
                complete = self._all_there(number, came)
            else:
                channel = self.graph.channels[number]
                complete = came >= {channel.src, channel.dst}
            if not complete:
                self.never.add(opening)
