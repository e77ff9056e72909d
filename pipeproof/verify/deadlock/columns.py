"""The same waits as in ``events``, on whole columns: what the rules run, whatever the size of the graph.

Compute cannot block, so it has no node. What remains is contracted: the two
ends of a pair at rendezvous are done together and share a node, as do the
members of a collective; a post has a node (a *gate*) only where more than one
done follows it. Everything is numpy on columns, linear in rows but for sorts.

Nodes are numbers in blocks as long as the graph has operations: done of an
operation, gate of an entry, close of a batch (all members done), then the
gate, the close and the middle of openings of connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.comm.buffering import awaited_receives
from pipeproof.comm.channel_models import ChannelModel
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn, is_kind, packed
from pipeproof.schedule.ops import SEND_KINDS
from pipeproof.verify.deadlock.rows import Rows, early_transfers

_Waits = tuple[IntColumn, IntColumn, IntColumn, IntColumn]
"""Columns of equal length: source, target, before and after."""


class WaitGraph:
    """Waits as edges between nodes: ``target`` waits for ``source``.

    ``after`` and ``before`` are the operations that an edge is about, as a
    person reads it: ``after`` waits for ``before``. NONE where the node at
    that end is no operation, but the begin or end of a call.
    """

    def __init__(self, parts: Sequence[_Waits]) -> None:
        self._parts = parts
        self.source, self.target = self._column(0), self._column(1)

    def _column(self, which: int) -> IntColumn:
        return np.concatenate([part[which] for part in self._parts])

    @cached_property
    def before(self) -> IntColumn:
        """What is waited for, by wait."""
        return self._column(2)

    @cached_property
    def after(self) -> IntColumn:
        """What waits, by wait."""
        return self._column(3)


def wait_graph(rows: Rows, model: ChannelModel) -> WaitGraph:
    """The waits among rows under a model. Every cycle among the first rows of each rank is one of the whole graph."""
    return _Writing(rows, model).finish()


@dataclass(frozen=True, eq=False)
class _Entries:
    """Entries of all ranks in the order in which they are issued, openings included, as columns.

    ``into`` and ``out`` are the nodes that what it follows leads to and that
    what follows it comes from; ``op`` is the operation that stands for an
    entry, NONE for a batch and an opening.
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
        """Whether each row is an entry of its own and nothing else is one."""
        self.entries = self._make_entries()
        self.entry = np.arange(len(rows.op)) if self.plain else np.searchsorted(self._at, 2 * rows.place + 1)

    def _merged(self) -> IntColumn:
        """By operation: the node of its done. The first member stands for a call, the send for a pair at rendezvous."""
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
        """(rows, as places in ``rows``, that open a connection; its number), where connections are lazy."""
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
        """Entries in order of place; openings stand just before the entry that needs them."""
        graph, rows, (_, gate, close, opens, opened, _) = self.graph, self.rows, self._blocks
        buffered = self.model.completes != "rendezvous"
        if self.plain:
            node = self.node[rows.op]
            into = np.where(rows.is_send, gate + rows.op, node) if buffered else node
            return _Entries(rows.rank, into, node, rows.op, np.zeros(len(node), dtype=bool))
        at = self._at = np.unique(np.concatenate([2 * rows.place + 1, 2 * rows.place[self.opened]]))
        place, opening = at >> 1, at % 2 == 0
        batch = rows.call[place] != NONE
        gated = batch | is_kind(graph.kind[place], SEND_KINDS) if buffered else batch
        node = self.node[place]
        return _Entries(
            rank=graph.rank[place],
            into=np.where(opening, opens + place, np.where(gated, gate + place, node)),
            out=np.where(opening, opened + place, np.where(batch, close + place, node)),
            op=np.where(opening | batch, NONE, place),
            opens=opening,
        )

    def finish(self) -> WaitGraph:
        """All waits."""
        self._order_hosts()
        self._order_queues()
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
        """The order in which hosts issue, and what follows it."""
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
        """Entries follow the last before them among some of their rank."""
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
        mine = rows.is_transfer | rows.is_call if self.model.queue == "device" else rows.by_default
        chosen, rank = rows.op[mine], rows.rank[mine]
        match self.model.queue:
            case "device" | "rank":
                key = rank
            case "direction":
                key = 2 * rank + rows.is_send[mine]
            case "communicator":
                names = [channel.communicator for channel in graph.channels]
                codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
                key = packed(rank, np.array([codes[name] for name in names], dtype=np.int64)[graph.channel[chosen]])
            case "pair":
                key = packed(rank, graph.peer[chosen])
        self._chain(key, entry[mine])

    def _complete_calls(self) -> None:
        """A batch: its members begin together, and it is done when all of them are."""
        _, gate, close, *_ = self._blocks
        op, place = self.rows.op[self.rows.batched], self.rows.place[self.rows.batched]
        none = np.full(len(op), NONE)
        self._add(gate + place, self.node[op], none, op)
        self._add(self.node[op], close + place, op, none)

    def _complete_waits(self) -> None:
        waits = self.rows.op[self.rows.is_wait]
        waits = waits[self.graph.waits_for[waits] != NONE]
        target = self.entry[np.searchsorted(self.rows.op, self.graph.waits_for[waits])]
        self._add(self.entries.out[target], self.node[waits], self.entries.op[target], waits)

    def _complete_sends(self) -> None:
        """Where a send need not meet its receive: what receives and full buffers wait for."""
        if self.model.completes == "rendezvous":
            return
        rows, graph, gate = self.rows, self.graph, self._blocks[1]
        op, place = rows.op[rows.is_send], rows.place[rows.is_send]
        alone = op[rows.call[op] == NONE]
        self._add(gate + alone, alone, np.full(len(alone), NONE), alone)
        receive = graph.match[op]
        there = (receive != NONE) & rows.here[receive]
        self._add(gate + place[there], receive[there], op[there], receive[there])
        sends, receives = awaited_receives(graph, self.model)
        both = rows.here[sends] & rows.here[receives]
        self._add(receives[both], sends[both], receives[both], sends[both])

    def _complete_openings(self) -> None:
        if not len(self.opened):
            return
        *_, opens, opened, middle = self._blocks
        op, place = self.rows.op[self.opened], self.rows.place[self.opened]
        none = np.full(len(op), NONE)
        self._add(opens + place, middle + self.connection, none, op)
        self._add(middle + self.connection, opened + place, op, none)
