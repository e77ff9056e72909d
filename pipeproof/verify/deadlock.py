"""4xx: with no buffering beyond what the backend promises, every operation gets done.

Each operation has two events. *post* is when it is under way (the rank's host
has come to it, or its queue has), *done* when it has finished. What an event
follows:

- on one rank the post of an operation follows the done of the host operation
  before it; a transfer also follows the done of the transfer before it on its
  queue (one queue per rank and channel);
- where the backend's calls block the host, what comes next on the rank follows
  the done of a transfer, too;
- both ends of a matched pair are done after both posts (rendezvous); an eager
  send is done once it is posted;
- a collective is done, on every member, after the posts of all members, and
  never if one of them does not issue it;
- a WAIT is done after the transfer that it waits for.

The plan deadlocks if and only if these events have a cycle, or something that
never comes is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.comm.capabilities import BackendTable
from pipeproof.schedule.ops import SEND_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.schedule.optable import NONE, EdgeKind, OpGraph
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import CycleWitness, Finding, OpsWitness
from pipeproof.verify.matching import group_sequences, partner_of
from pipeproof.verify.subject import Rule, Subject, finding, missing_op

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
    """``follows[v]`` lists the events that event ``v`` follows; ``never`` those that cannot happen at all."""

    follows: tuple[tuple[int, ...], ...]
    never: frozenset[int]

    def nx(self, among: Iterable[int] | None = None) -> nx.DiGraph[int]:
        """The wait-for graph: an edge from each event to every event it waits for."""
        import networkx as nx

        nodes = set(range(len(self.follows)) if among is None else among)
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(nodes)
        graph.add_edges_from((v, u) for v in nodes for u in self.follows[v] if u in nodes)
        return graph


def events_of(graph: OpGraph, backend: BackendTable) -> Events:
    """The events of a graph under what the backend promises. Linear in operations."""
    follows: list[list[int]] = [[] for _ in range(2 * len(graph.ops))]
    never: set[int] = set()
    for op_id in range(len(graph.ops)):
        follows[done(op_id)].append(post(op_id))
    for rank in range(graph.num_ranks):
        blocked_by: int | None = None
        for op_id in graph.rank_ops(rank):
            if blocked_by is not None:
                follows[post(op_id)].append(done(blocked_by))
            if graph.ops[op_id].kind not in TRANSFER_KINDS or backend.host_blocks_on_post:
                blocked_by = op_id
    for before, after in graph.edges[EdgeKind.QUEUE].tolist():
        follows[post(after)].append(done(before))
    for transfer in np.flatnonzero(graph.channel != NONE).tolist():
        partner = graph.match_of.get(transfer)
        if graph.ops[transfer].kind in SEND_KINDS and backend.send_completes != "rendezvous":
            continue
        if partner is None:
            never.add(done(transfer))
        else:
            follows[done(transfer)].append(post(partner))
    for op_id, op in enumerate(graph.ops):
        if op.kind is OpKind.WAIT:
            target = int(graph.waits_for[op_id])
            if target == NONE:
                never.add(done(op_id))
            else:
                follows[done(op_id)].append(done(target))
    for members, group_size in _collectives(graph):
        if len(members) < group_size:
            never.update(map(done, members))
        for member in members:
            follows[done(member)] += [post(other) for other in members if other != member]
    return Events(tuple(map(tuple, follows)), frozenset(never))


def _collectives(graph: OpGraph) -> Iterator[tuple[list[int], int]]:
    """Each collective, that is the k-th calls of the ranks of a group, with the group's size."""
    for group, sequences in zip(graph.groups, group_sequences(graph), strict=True):
        for position in range(max(map(len, sequences.values()), default=0)):
            members = [calls[position] for calls in sequences.values() if position < len(calls)]
            yield members, len(group.ranks)


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


def shortest_cycle(events: Events, stuck: Sequence[int]) -> list[int] | None:
    """A shortest wait-for cycle among the stuck events; None if they only wait for what never comes."""
    if not stuck:  # the common case must not pay for networkx's import
        return None
    import networkx as nx

    graph = events.nx(stuck)
    best: list[int] | None = None
    for component in sorted(nx.strongly_connected_components(graph), key=min):
        if len(component) == 1:  # no event follows itself
            continue
        for start in sorted(component):
            cycle = _cycle_through(graph.subgraph(component), start, None if best is None else len(best))
            best = cycle or best
    return best


def _cycle_through(graph: nx.DiGraph[int], start: int, shorter_than: int | None) -> list[int] | None:
    """Breadth-first search for a cycle through ``start`` with fewer than ``shorter_than`` events."""
    parent = {start: start}
    frontier, length = [start], 0
    while frontier:
        length += 1
        if shorter_than is not None and length >= shorter_than:
            return None
        reached: list[int] = []
        for event in frontier:
            for waited in graph.successors(event):
                if waited == start:
                    path = [event]
                    while path[-1] != start:
                        path.append(parent[path[-1]])
                    return path[::-1]
                if waited not in parent:
                    parent[waited] = event
                    reached.append(waited)
        frontier = reached
    return None


CYCLE = RuleDoc(
    code="PP401",
    title="operations wait for each other in a cycle",
    severity="error",
    explanation=(
        "Under the declared backend's promises and no buffering beyond them, a set of ranks waits in a circle: "
        "the job hangs. Schedules that work because small messages are buffered hang when the messages grow, so "
        "buffering is not counted on. The witness is a shortest such cycle: each operation waits for the next, "
        "the last for the first."
    ),
    wrong="rank 0: send to 1, wait, recv from 1      rank 1: send to 0, wait, recv from 0",
    right="rank 0: send to 1, wait, recv from 1      rank 1: recv from 0, wait, send to 0",
)


def _check_cycle(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    events = events_of(graph, subject.backend)
    cycle = shortest_cycle(events, stuck_events(events))
    if cycle is None:
        return
    op_ids = list(dict.fromkeys(event // 2 for event in cycle))
    chain = [f"{graph.ops[i]} (rank {int(graph.rank[i])})" for i in op_ids]
    ranks = sorted({int(graph.rank[i]) for i in op_ids})
    yield finding(
        CYCLE,
        f"ranks {', '.join(map(str, ranks))} deadlock under {subject.backend.name}: "
        + " waits for ".join([*chain, chain[0]]),
        location=subject.locate("schedule"),
        help="reorder the operations of one of these ranks, so that one of them comes to its receive first",
        witness=CycleWitness(tuple(subject.witness_op(i) for i in op_ids)),
    )


NEVER = RuleDoc(
    code="PP402",
    title="a rank waits for something that never comes",
    severity="error",
    explanation=(
        "The transfer that is waited for has no counterpart, is posted only later in the program, or was waited "
        "for already; or a member of the group never issues the collective."
    ),
    wrong="rank 1: WAIT(1RECV_F0) 1RECV_F0 1F0",
    right="rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0",
)


def _check_never(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    for op_id, op in enumerate(graph.ops):
        if op.kind is not OpKind.WAIT or op.target is None:
            continue
        target, rank = int(graph.waits_for[op_id]), int(graph.rank[op_id])
        if target == NONE:
            yield finding(
                NEVER,
                f"rank {rank} runs {op}, but no {op.target} is under way there",
                help=f"post {op.target} before the wait, and wait for it once",
                witness=OpsWitness((subject.witness_op(op_id),)),
            )
        elif not _can_finish(subject, target):
            peer = int(graph.peer[target])
            partner = partner_of(op.target)
            yield finding(
                NEVER,
                f"rank {rank} waits for {op.target}, but rank {peer} never issues its counterpart {partner}",
                help=f"add {partner} to rank {peer}",
                witness=OpsWitness((subject.witness_op(op_id), missing_op(peer, partner))),
            )
    for group, sequences in zip(graph.groups, group_sequences(graph), strict=True):
        longest = max(sequences, key=lambda rank: len(sequences[rank]))
        for rank in group.ranks:
            if len(sequences[rank]) < len(sequences[longest]):
                waited = sequences[longest][len(sequences[rank])]
                yield finding(
                    NEVER,
                    f"rank {longest} issues {graph.ops[waited]} on {group.axis} group {list(group.ranks)}, but "
                    f"rank {rank} issues only {len(sequences[rank])} collectives there and never joins it",
                    help=f"add {graph.ops[waited]} to rank {rank}",
                    witness=OpsWitness((subject.witness_op(waited), missing_op(rank, graph.ops[waited]))),
                )


def _can_finish(subject: Subject, transfer: int) -> bool:
    """Whether a transfer has a counterpart, or is a send that the backend buffers."""
    buffered = subject.backend.send_completes != "rendezvous"
    is_send = subject.graph.ops[transfer].kind in SEND_KINDS
    return transfer in subject.graph.match_of or (is_send and buffered)


RULES = (Rule(CYCLE, _check_cycle), Rule(NEVER, _check_never))
