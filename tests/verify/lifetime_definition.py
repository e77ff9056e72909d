"""The definition of happens-before and races, on networkx; the columns must agree with it.

Each operation has two events, *start* and *done*. The order of events:

- done(x) after start(x);
- a queue runs its entries in order: start(x) comes after the done of all
  members of the entry before x's on its queue. An entry is one operation, or the part of one batch (adjacent operations
  of the program) on that queue;
- a transfer on its default queue starts after the compute-queue operation
  before it in the program, or before its batch;
- an operation that the host waits for is done before anything issued later starts. So is a
  transfer, where the backend's posts hold the host;
- done(WAIT(x)) after done(x);
- start of a PART, or of a collective between PARTs, after the done of the one
  before it of the same computation;
- done(receive) after start(send) of its pair; where a send is done with its
  receive, also done(send) after start(receive);
- a collective's dones come after all its starts;
- a child collective runs inside its parent: on the parent's queue and in its
  batch, unless its own row names one.

A use of a buffer lasts from the start of its operation to the done of it, or,
where a collective uses memory of another rank, to the done of that rank's
member. Two uses *conflict* if at least one of them writes or frees the buffer
and they are not members of one collective (each member has its part); they *race* if neither has ended before the other
starts, in every run that the events allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, SEND_KINDS

if TYPE_CHECKING:
    import networkx as nx

Event = tuple[str, int]


def event_graph(graph: OpGraph, backend: BackendTable) -> nx.DiGraph[Event]:
    """The events of one step; an edge leads from an event to one that comes after it."""
    import networkx as nx

    events: nx.DiGraph[Event] = nx.DiGraph()
    events.add_edges_from((("start", op), ("done", op)) for op in range(graph.num_ops))
    for rank in range(graph.num_ranks):
        events.add_edges_from(_order_on_rank(graph, backend, rank))
    for op in range(graph.num_ops):
        target, partner = int(graph.waits_for[op]), int(graph.match[op])
        if target != NONE:
            events.add_edge(("done", target), ("done", op))
        if graph.part_before[op] != NONE:
            events.add_edge(("done", int(graph.part_before[op])), ("start", op))
        if partner != NONE and (graph.ops[op].kind in SEND_KINDS or backend.send_completes == "rendezvous"):
            events.add_edge(("start", op), ("done", partner))
        if graph.ops[op].kind in COLLECTIVE_KINDS:
            events.add_edges_from((("start", op), ("done", member)) for member in graph.members_of(op))
    return events


def _order_on_rank(graph: OpGraph, backend: BackendTable, rank: int) -> Iterable[tuple[Event, Event]]:
    calls = _calls(graph, rank)
    queues: dict[object, list[list[int]]] = {}
    for call in calls:
        on_queue: dict[object, list[int]] = {}
        for op in call:
            on_queue.setdefault(_queue_of(graph, op), []).append(op)
        for queue, entry in on_queue.items():
            queues.setdefault(queue, []).append(entry)
    for entries in queues.values():
        for entry, following in pairwise(entries):
            yield from ((("done", a), ("start", b)) for a in entry for b in following)
    computed: list[int] = []
    held: list[int] = []
    for call in calls:
        for op in call:
            if _queue_number(graph, op) == NONE:
                yield from ((("done", a), ("start", op)) for a in computed)
            yield from ((("done", a), ("start", op)) for a in held)
        computed = [op for op in call if _queue_number(graph, op) == COMPUTE_QUEUE] or computed
        held = [op for op in call if _holds_host(graph, backend, op)] or held


def _calls(graph: OpGraph, rank: int) -> list[list[int]]:
    """The rank's program as it is issued: one operation at a time, or a batch."""
    calls: list[list[int]] = []
    for op in graph.rank_ops(rank):
        batch = _batch_of(graph, op)
        if calls and batch != NONE and _batch_of(graph, calls[-1][-1]) == batch:
            calls[-1].append(op)
        else:
            calls.append([op])
    return calls


def _batch_of(graph: OpGraph, op: int) -> int:
    parent = int(graph.parent[op])
    own = int(graph.batch[op])
    return int(graph.batch[parent]) if own == NONE and parent != NONE else own


def _queue_number(graph: OpGraph, op: int) -> int:
    parent = int(graph.parent[op])
    inside = parent != NONE and not graph.row(op).queue
    return int(graph.queue[parent if inside else op])


def _queue_of(graph: OpGraph, op: int) -> object:
    """Identity of a queue of the rank: a number, or the channel and its end."""
    number = _queue_number(graph, op)
    return (int(graph.channel[op]), graph.ops[op].kind in SEND_KINDS) if number == NONE else number


def _holds_host(graph: OpGraph, backend: BackendTable, op: int) -> bool:
    queue = _queue_number(graph, op)
    return queue == HOST_QUEUE or (queue == NONE and backend.host_blocks_on_post)


@dataclass(frozen=True, slots=True)
class Use:
    """One use: ``changes`` is True if it writes or frees the buffer; it ends with the done of ``end``."""

    buffer: int
    op: int
    end: int
    changes: bool


def racing_pairs(graph: OpGraph, events: nx.DiGraph[Event], uses: Iterable[Use]) -> set[tuple[int, int, int]]:
    """(buffer, operation, operation) of each race among ``uses``."""
    import networkx as nx

    def ends_before(a: Use, b: Use) -> bool:
        return nx.has_path(events, ("done", a.end), ("start", b.op))

    return {
        (a.buffer, a.op, b.op)
        for a, b in combinations(sorted(uses, key=lambda use: (use.buffer, use.op)), 2)
        if a.buffer == b.buffer
        and (a.changes or b.changes)
        and b.op not in graph.members_of(a.op)
        and not ends_before(a, b)
        and not ends_before(b, a)
    }
