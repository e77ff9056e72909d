"""The definition of a deadlock, written to be read: post and done events, and the events that each of them follows.

Each operation has two events, *post* when it is under way and *done* when it
has finished. ``comm.channel_models`` defines what a post follows; in addition

- the opening of a connection holds everything that the rank issues later;
- done follows post;
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
never comes is waited for. ``wait_columns`` has the same for whole columns.

Two steps in a row deadlock if and only if one does, where every channel and
every group is balanced (which PP301, PP306 and PP402 demand): the k-th send
then meets a receive of its own step, so no event of the first step follows
one of the second, and the second step has the waits of the first among its own events, or fewer, since slots may be
free and connections open.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.comm.channel_models import ChannelModel, EntryOrder, Host, done, message_bytes, post
from pipeproof.schedule.columns import NONE
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import SEND_KINDS, OpKind

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Events:
    """``follows[v]`` lists the events that event ``v`` follows; ``never`` lists events that cannot happen at all.

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


class _Writing(EntryOrder):
    def __init__(self, graph: OpGraph, model: ChannelModel) -> None:
        super().__init__(graph, model)
        self.follows: list[list[int]] = [[] for _ in range(2 * graph.num_ops)]
        self.never: set[int] = set()
        self._bytes = message_bytes(graph)
        self._openings: dict[tuple[str, int], int] = {}
        self._came: dict[tuple[str, int], set[int]] = defaultdict(set)

    def order(self, rank: int) -> None:
        """Predecessors of the posts of one rank."""
        for entry, before in self.entries(rank):
            for op_id in entry:
                self.follows[post(op_id)] += before
                self.follows[done(op_id)].append(post(op_id))

    def _follows(self, entry: Sequence[int], host: Host) -> list[int]:
        self._open(entry, host)
        return super()._follows(entry, host)

    def _open(self, entry: Sequence[int], host: Host) -> None:
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
            if self.is_transfer(op_id):
                yield "channel", int(self.graph.channel[op_id])
            elif self.is_call(op_id):
                yield "group", int(self.graph.group[op_id])

    def complete_transfers(self) -> None:
        """Predecessors of the dones of transfers."""
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
        """Index of the receive of the channel that must be done before the send at ``place``; None if none."""
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
        """Predecessors of the dones of collectives."""
        calls: dict[tuple[int, int], list[int]] = defaultdict(list)
        for op_id in filter(self.is_call, range(self.graph.num_ops)):
            calls[int(self.graph.group[op_id]), int(self.graph.position[op_id])].append(op_id)
        for (group, _), members in calls.items():
            if not self._all_there(group, {int(self.graph.rank[member]) for member in members}):
                self.never.update(map(done, members))
            for member in members:
                self.follows[done(member)] += [post(other) for other in members if other != member]

    def _all_there(self, group: int, ranks: set[int]) -> bool:
        return ranks >= set(self.graph.groups[group].ranks)

    def complete_waits(self) -> None:
        """Predecessors of the dones of WAITs."""
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
