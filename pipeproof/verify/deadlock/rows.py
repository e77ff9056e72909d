"""The rows of a graph that can block, as columns: what the waits under every model are made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeproof.comm.calls import calls_of
from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE, NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn, is_kind, packed
from pipeproof.schedule.ops import COLLECTIVE_KINDS, SEND_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.schedule.optable import OpGraph


@dataclass(frozen=True, eq=False)
class Rows:
    """Transfers, collectives over a group, WAITs, what they wait for, and members of calls; compute has no part.

    ``op`` are op ids in order; the other columns have an entry for each of
    them. ``place`` is the op id of the last member of the row's call, its own
    without one. ``call`` is of every operation of the graph, as ``calls_of``
    says; ``here`` says of each whether it is among the rows.
    """

    graph: OpGraph
    call: IntColumn
    op: IntColumn
    here: BoolColumn
    rank: IntColumn
    place: IntColumn
    is_transfer: BoolColumn
    is_send: BoolColumn
    is_call: BoolColumn
    is_wait: BoolColumn
    by_default: BoolColumn
    """On the default queue of a transfer."""
    on_host: BoolColumn
    named: BoolColumn
    """On a queue of another name."""
    batched: BoolColumn


def rows_of(graph: OpGraph, first: int | None = None) -> Rows:
    """The rows that take part; with ``first``, among that many rows of each rank."""
    calls = calls_of(graph)
    among = _beginnings(graph, calls, first)
    kind, group = graph.kind[among], graph.group[among]
    transfer, wait = is_kind(kind, TRANSFER_KINDS), is_kind(kind, frozenset({OpKind.WAIT}))
    call = is_kind(kind, COLLECTIVE_KINDS) & (group != NONE)
    here = np.zeros(graph.num_ops, dtype=bool)
    here[among] = transfer | call | wait | (calls[among] != NONE)
    target = graph.waits_for[among[wait]]
    here[target[target != NONE]] = True
    chosen = here[among]
    op, queue = among[chosen], graph.queue[among[chosen]]
    return Rows(
        graph=graph,
        call=calls,
        op=op,
        here=here,
        rank=graph.rank[op],
        place=_places(graph, calls, op),
        is_transfer=transfer[chosen],
        is_send=is_kind(kind[chosen], SEND_KINDS),
        is_call=call[chosen],
        is_wait=wait[chosen],
        by_default=queue == NONE,
        on_host=queue == HOST_QUEUE,
        named=(queue != NONE) & (queue != COMPUTE_QUEUE) & (queue != HOST_QUEUE),
        batched=calls[op] != NONE,
    )


def early_transfers(rows: Rows) -> tuple[IntColumn, IntColumn]:
    """(early transfers, those whose messages are just before theirs on their channels) as op ids.

    A transfer is early if the call that has the message before its own is
    closed behind it; ``comm.entry_order`` says what comes of that.
    """
    moved = np.flatnonzero(rows.is_transfer)
    if not rows.batched[moved].any():
        return rows.op[:0], rows.op[:0]
    end = 2 * rows.graph.channel[rows.op[moved]] + rows.is_send[moved]
    order = np.argsort(end, kind="stable")
    end, moved = end[order], moved[order]
    early = (end[1:] == end[:-1]) & (rows.place[moved[1:]] < rows.place[moved[:-1]])
    return rows.op[moved[1:][early]], rows.op[moved[:-1][early]]


def _beginnings(graph: OpGraph, calls: IntColumn, first: int | None) -> IntColumn:
    """Op ids of the first rows of each rank, fewer where a call would be cut; with None, of all."""
    if first is None:
        return np.arange(graph.num_ops)
    starts, stops = graph.offsets[:-1], np.minimum(graph.offsets[:-1] + first, graph.offsets[1:])
    batched = np.flatnonzero(calls != NONE)
    call = packed(graph.rank[batched], calls[batched])
    while True:
        goes_on = np.isin(call, call[batched >= stops[graph.rank[batched]]])
        cut = batched[goes_on & (batched < stops[graph.rank[batched]])]
        if not len(cut):
            break
        np.minimum.at(stops, graph.rank[cut], cut)
    return np.concatenate([np.arange(a, b) for a, b in zip(starts, stops, strict=True)])


def _places(graph: OpGraph, calls: IntColumn, op: IntColumn) -> IntColumn:
    members = np.flatnonzero(calls[op] != NONE)
    if not len(members):
        return op
    place, rows = op.copy(), op[members]
    _, number = np.unique(packed(graph.rank[rows], calls[rows]), return_inverse=True)
    last = np.zeros(int(number.max()) + 1, dtype=np.int64)
    np.maximum.at(last, number, rows)
    place[members] = last[number]
    return place
