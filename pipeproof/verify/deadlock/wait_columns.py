"""The waits of a graph on whole columns, for graphs of any size.

The definition of the waits is in ``tests/verify/deadlock_definition.py``.

Compute cannot block and has no node, except parts next to a collective. The
rest is contracted: the two ends of a pair at rendezvous are done together and
share a node, as do the members of a collective; a post has a node (a *gate*)
only if several dones follow it. Everything is numpy on columns, linear in rows but for sorts.

Nodes are numbers in blocks as long as the graph has operations: done of an
operation, gate of an entry, close of a batch (all members done), then the
gate, the close and the middle of openings of connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.comm.channel_models import ChannelModel, awaited_receives, calls_of
from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE, NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn, is_kind, packed
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, SEND_KINDS, TRANSFER_KINDS, OpKind


@dataclass(frozen=True, eq=False)
class Rows:
    """Transfers, collectives over a group, WAITs and their targets, members of calls, and parts next to collectives.

    ``op`` are op ids in order; the other columns have an entry for each op id.
    ``place`` is the op id of the last member of the row's call, or its own.
    ``call`` is the result of ``calls_of`` for every operation of the graph;
    ``here`` is the mask of the operations that are rows.
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
    mask = np.zeros(graph.num_ops, dtype=bool)
    part_before = graph.part_before[among]
    mask[among] = transfer | call | wait | (calls[among] != NONE) | (part_before != NONE)
    mask[part_before[part_before != NONE]] = True
    target = graph.waits_for[among[wait]]
    mask[target[target != NONE]] = True
    chosen = mask[among]
    op, queue = among[chosen], graph.queue[among[chosen]]
    return Rows(
        graph=graph,
        call=calls,
        op=op,
        here=mask,
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
    """(early transfers, the transfers whose messages are just before theirs on their channels) as op ids.

    A transfer is early if the call with the message before its own is closed
    after it; ``comm.channel_models`` describes the consequence.
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
    """Op ids of the first rows of each rank, fewer if a call would be cut; with None, all rows."""
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
    last_member, rows = op.copy(), op[members]
    _, number = np.unique(packed(graph.rank[rows], calls[rows]), return_inverse=True)
    last = np.zeros(int(number.max()) + 1, dtype=np.int64)
    np.maximum.at(last, number, rows)
    last_member[members] = last[number]
    return last_member


_Waits = tuple[IntColumn, IntColumn, IntColumn, IntColumn]
"""Columns of equal length: source, target, before and after."""


class WaitGraph:
    """Waits as edges between nodes: ``target`` waits for ``source``.

    ``after`` and ``before`` are the operations of an edge, as a person reads
    it: ``after`` waits for ``before``. NONE if the node at that end is not an
    operation, but the begin or end of a call.
    """

    def __init__(self, parts: Sequence[_Waits]) -> None:
        self._parts = parts
        self.source, self.target = self._column(0), self._column(1)

    def _column(self, which: int) -> IntColumn:
        return np.concatenate([part[which] for part in self._parts])

    @cached_property
    def before(self) -> IntColumn:
        """The operation that is waited for, by wait."""
        return self._column(2)

    @cached_property
    def after(self) -> IntColumn:
        """The operation that waits, by wait."""
        return self._column(3)


def wait_graph(rows: Rows, model: ChannelModel) -> WaitGraph:
    """The waits among rows under a model. Every cycle among the first rows of each rank is one of the whole graph."""
    return _Writing(rows, model).finish()


@dataclass(frozen=True, eq=False)
class _Entries:
    """Entries of all ranks in the order in which they are issued, openings included, as columns.

    ``into`` leads to an entry: the node that its predecessors point to.
    ``out`` is the node that its successors come from; ``op`` is the operation
    that represents an entry, NONE for a batch and an opening.
    """

    rank: IntColumn
    into: IntColumn
    out: IntColumn
    op: IntColumn
    opens: BoolColumn


class _Writing:
    def __init__(self, rows: Rows, model: ChannelModel) -> None:
        self.rows, self.graph, self.model = rows, rows.graph, model
        self._blocks = [np.int64(block * rows.graph.num_ops) for block in range(6)]
        self._parts: list[_Waits] = []
        self.holds = rows.on_host | rows.is_transfer if model.host_blocks else rows.on_host
        self.with_host = ~(rows.named | rows.by_default) | self.holds
        self.node = self._merged()
        self.opened, self.connection = self._first_uses()
        self.plain = not len(self.opened) and not rows.batched.any()
        """True if each row is an entry of its own and there are no other entries."""
        self.entries = self._make_entries()
        self.entry = np.arange(len(rows.op)) if self.plain else np.searchsorted(self._at, 2 * rows.place + 1)

    def _merged(self) -> IntColumn:
        """By operation: the node of its done. The first member represents a call, the send for a pair at rendezvous."""
        graph, rows = self.graph, self.rows
        node = np.arange(graph.num_ops, dtype=np.int64)
        calls = rows.op[rows.is_call]
        if len(calls):
            key = packed(graph.group[calls], graph.position[calls])
            _, leader, number = np.unique(key, return_index=True, return_inverse=True)
            node[calls] = calls[leader[number]]
        if self.model.completes == "rendezvous":
            receives = rows.op[rows.is_transfer & ~rows.is_send]
            partner = graph.match[receives]
            there = (partner != NONE) & rows.here[partner]
            node[receives[there]] = partner[there]
        return node

    def _first_uses(self) -> tuple[IntColumn, IntColumn]:
        """(rows that open a connection, as indices into ``rows``; its number), if connections are lazy."""
        rows, graph = self.rows, self.graph
        if self.model.connections == "warm":
            return rows.op[:0], rows.op[:0]
        using = np.flatnonzero(rows.is_transfer | rows.is_call)
        used = rows.op[using]
        number = np.where(rows.is_transfer[using], graph.channel[used], len(graph.channels) + graph.group[used])
        order = np.lexsort((used, rows.place[using]))
        _, first = np.unique(packed(number, rows.rank[using])[order], return_index=True)
        chosen = np.sort(order[first])
        return using[chosen], number[chosen]

    def _make_entries(self) -> _Entries:
        """Entries in program order; an opening is just before the entry that needs it."""
        graph, rows, (_, gate, close, opens, opened, _) = self.graph, self.rows, self._blocks
        buffered = self.model.completes != "rendezvous"
        if self.plain:
            node = self.node[rows.op]
            into = np.where(rows.is_send, gate + rows.op, node) if buffered else node
            return _Entries(rows.rank, into, node, rows.op, np.zeros(len(node), dtype=bool))
        at = self._at = np.unique(np.concatenate([2 * rows.place + 1, 2 * rows.place[self.opened]]))
        last_member, opening = at >> 1, at % 2 == 0
        batch = rows.call[last_member] != NONE
        gated = batch | is_kind(graph.kind[last_member], SEND_KINDS) if buffered else batch
        node = self.node[last_member]
        return _Entries(
            rank=graph.rank[last_member],
            into=np.where(opening, opens + last_member, np.where(gated, gate + last_member, node)),
            out=np.where(opening, opened + last_member, np.where(batch, close + last_member, node)),
            op=np.where(opening | batch, NONE, last_member),
            opens=opening,
        )

    def finish(self) -> WaitGraph:
        """All waits."""
        self._order_hosts()
        self._order_queues()
        self._order_parts()
        self._complete_calls()
        self._complete_waits()
        self._complete_sends()
        self._complete_openings()
        return WaitGraph(self._parts)

    def _add(self, source: IntColumn, target: IntColumn, before: IntColumn, after: IntColumn) -> None:
        self._parts.append((source, target, before, after))

    def _link(self, earlier: IntColumn, later: IntColumn) -> None:
        """The posts of entries follow the dones of others."""
        entries = self.entries
        self._add(entries.out[earlier], entries.into[later], entries.op[earlier], entries.op[later])

    def _chain(self, key: IntColumn, entry: IntColumn) -> None:
        """Entries with the same key follow each other."""
        order = np.argsort(key, kind="stable") if self.plain else np.lexsort((entry, key))
        key, entry = key[order], entry[order]
        next_one = (key[1:] == key[:-1]) & (entry[1:] != entry[:-1])
        self._link(entry[:-1][next_one], entry[1:][next_one])

    def _order_hosts(self) -> None:
        """The order in which hosts issue, and the entries that follow it."""
        openings = np.flatnonzero(self.entries.opens)
        issued = self._distinct(self.entry[self.with_host], openings)
        same_rank = self.entries.rank[issued[1:]] == self.entries.rank[issued[:-1]]
        self._link(issued[:-1][same_rank], issued[1:][same_rank])
        self._follow_last(issued, self.entry[self.rows.by_default & ~self.holds])
        named = self.rows.named & ~self.holds
        if named.any():
            self._follow_last(self._distinct(self.entry[self.holds], openings), self.entry[named])

    def _distinct(self, entry: IntColumn, openings: IntColumn) -> IntColumn:
        """Entries of rows, and openings, in order and each once."""
        return entry if self.plain else np.union1d(entry, openings)

    def _follow_last(self, among: IntColumn, entry: IntColumn) -> None:
        """Entries follow the last of ``among`` before them on their rank."""
        last = np.searchsorted(among, entry) - 1
        there = last >= 0
        entry, last = entry[there], among[last[there]]
        same_rank = self.entries.rank[last] == self.entries.rank[entry]
        self._link(last[same_rank], entry[same_rank])

    def _order_queues(self) -> None:
        """Queues of other names, and the FIFOs of the model."""
        graph, rows, entry = self.graph, self.rows, self.entry
        if rows.named.any():
            self._chain(packed(rows.rank[rows.named], graph.queue[rows.op[rows.named]]), entry[rows.named])
        placed = (rows.is_transfer & ~rows.by_default).any()  # on a queue that its row names
        if placed or self.model.queue == "directed_edge":
            ends = 2 * graph.channel[rows.op[rows.is_transfer]] + rows.is_send[rows.is_transfer]
            self._chain(ends, entry[rows.is_transfer])
        early, ahead = early_transfers(rows)
        after, before = (entry[np.searchsorted(rows.op, op)] for op in (early, ahead))
        self._add(self.entries.out[before], self.entries.into[after], ahead, early)
        if self.model.queue == "directed_edge":
            return
        selected = rows.is_transfer | rows.is_call if self.model.queue == "device" else rows.by_default
        chosen, rank = rows.op[selected], rows.rank[selected]
        match self.model.queue:
            case "device" | "rank":
                key = rank
            case "direction":
                key = 2 * rank + rows.is_send[selected]
            case "communicator":
                names = [channel.communicator for channel in graph.channels]
                codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
                key = packed(rank, np.array([codes[name] for name in names], dtype=np.int64)[graph.channel[chosen]])
            case "pair":
                key = packed(rank, graph.peer[chosen])
        self._chain(key, entry[selected])

    def _order_parts(self) -> None:
        """Parts of a computation, and the collectives between them, follow each other."""
        before = self.graph.part_before[self.rows.op]
        later = np.flatnonzero(before != NONE)
        self._link(self.entry[np.searchsorted(self.rows.op, before[later])], self.entry[later])

    def _complete_calls(self) -> None:
        """A batch: its members begin together, and it is done when all of them are."""
        _, gate, close, *_ = self._blocks
        op, last_member = self.rows.op[self.rows.batched], self.rows.place[self.rows.batched]
        none = np.full(len(op), NONE)
        self._add(gate + last_member, self.node[op], none, op)
        self._add(self.node[op], close + last_member, op, none)

    def _complete_waits(self) -> None:
        waits = self.rows.op[self.rows.is_wait]
        waits = waits[self.graph.waits_for[waits] != NONE]
        target = self.entry[np.searchsorted(self.rows.op, self.graph.waits_for[waits])]
        self._add(self.entries.out[target], self.node[waits], self.entries.op[target], waits)

    def _complete_sends(self) -> None:
        """Waits of receives and full buffers, if a send need not meet its receive."""
        if self.model.completes == "rendezvous":
            return
        rows, graph, gate = self.rows, self.graph, self._blocks[1]
        op, last_member = rows.op[rows.is_send], rows.place[rows.is_send]
        alone = op[rows.call[op] == NONE]
        self._add(gate + alone, alone, np.full(len(alone), NONE), alone)
        receive = graph.match[op]
        there = (receive != NONE) & rows.here[receive]
        self._add(gate + last_member[there], receive[there], op[there], receive[there])
        sends, receives = awaited_receives(graph, self.model)
        both = rows.here[sends] & rows.here[receives]
        self._add(receives[both], sends[both], receives[both], sends[both])

    def _complete_openings(self) -> None:
        if not len(self.opened):
            return
        *_, opens, opened, middle = self._blocks
        op, last_member = self.rows.op[self.opened], self.rows.place[self.opened]
        none = np.full(len(op), NONE)
        self._add(opens + last_member, middle + self.connection, none, op)
        self._add(middle + self.connection, opened + last_member, op, none)
