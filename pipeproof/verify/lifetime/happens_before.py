"""Happens-before in columns: the events that definitely come before an event.

``tests/verify/lifetime_definition.py`` has the definition, on networkx. Here the
same order is in arrays: ``Order.definitely_before`` answers for whole columns of
pairs and knows the common cases (program order on one queue, a wait between two
operations); ``Order.before`` is exact and walks the events from one operation
until it meets the other, for the few pairs that remain open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, SEND_KINDS

Adjacency = tuple[IntColumn, IntColumn]
"""The neighbours of all events in one column, grouped by event, and the offset of each event."""


def meet(followers: Adjacency, start: int, leaders: Adjacency, goal: int, *, near: tuple[int, int]) -> bool:
    """Return True if there is a path from ``start`` to ``goal``; events in the range ``near`` are tried first.

    The two walks alternate: without a path, the smaller side determines the cost.
    """
    ahead, back = _Walk(followers, start), _Walk(leaders, goal)
    while True:
        for walk, other in ((ahead, back), (back, ahead)):
            if walk.event in other.seen:
                return True
            if not walk.advance(near):
                return False


def adjacency(tails: IntColumn, heads: IntColumn, num_events: int) -> Adjacency:
    """The heads of all edges in one column, grouped by tail event, and the offset of each event."""
    by_tail = np.argsort(tails, kind="stable")
    last = max(num_events - 1, int(tails.max(initial=0)), int(heads.max(initial=0)))
    return heads[by_tail], np.searchsorted(tails[by_tail], np.arange(last + 2))


class _Walk:
    """A depth-first walk over events, first over operations between the two ends."""

    def __init__(self, graph: Adjacency, start: int) -> None:
        self._heads, self._first = graph
        self.event = start
        self.seen = {start}
        self._near: list[int] = []
        self._far: list[int] = []

    def advance(self, near: tuple[int, int]) -> bool:
        """Advance to the next event; False at the end of the walk."""
        event = self.event
        for neighbour in self._heads[self._first[event] : self._first[event + 1]].tolist():
            if neighbour not in self.seen:
                self.seen.add(neighbour)
                (self._near if near[0] <= neighbour <= near[1] else self._far).append(neighbour)
        if not self._near and not self._far:
            return False
        self.event = self._near.pop() if self._near else self._far.pop()
        return True


_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Order:
    """The order of events of one step, or of several steps in sequence. All columns have one entry per operation.

    ``rank``, ``queue``, ``channel``, ``waits_for``, ``match``, ``group`` and
    ``position`` are as in ``OpGraph`` (``group`` of collectives only). ``run``
    is equal for the operations of one batch, which have no order among them,
    except that parts of a computation follow each other (``part_before``).
    ``home`` is the operation's id in the graph of one step, and ``step``
    counts from 0.
    """

    rank: IntColumn
    queue: IntColumn
    channel: IntColumn
    is_send: BoolColumn
    run: IntColumn
    waits_for: IntColumn
    part_before: IntColumn
    match: IntColumn
    group: IntColumn
    position: IntColumn
    home: IntColumn
    step: IntColumn
    rendezvous: bool
    blocking: bool
    """True if a post holds the host until the transfer is done."""

    @property
    def num_ops(self) -> int:
        """Operations over all ranks and steps."""
        return len(self.rank)

    @cached_property
    def fifo(self) -> IntColumn:
        """The FIFO that each operation runs on, as a number: a queue of its rank, or one end of a channel."""
        end = np.where(self.queue == NONE, self.channel * 2 + self.is_send, NONE)
        return packed(self.rank, self.queue, end)

    @cached_property
    def call(self) -> IntColumn:
        """A number that is equal for the members of one collective; NONE for other operations."""
        called = self.group != NONE
        number = packed(self.group, np.where(called, self.position, NONE), self.step)
        return np.where(called, number, NONE)

    @cached_property
    def wait_on_rank(self) -> IntColumn:
        """For each operation the first wait for it that holds the compute queue or the host; else beyond the end."""
        return self._first_wait((self.queue == COMPUTE_QUEUE) | (self.queue == HOST_QUEUE))

    @cached_property
    def wait_on_host(self) -> IntColumn:
        """For each operation the first wait for it that holds the host; else beyond the end."""
        return self._first_wait(self.queue == HOST_QUEUE)

    def _first_wait(self, where: BoolColumn) -> IntColumn:
        waits = np.flatnonzero(where & (self.waits_for != NONE))[::-1]
        batched = np.flatnonzero(np.diff(self.run) == 0)
        if len(batched):
            waits = waits[~np.isin(waits, [batched, batched + 1])]
        first = np.full(self.num_ops, _NEVER, dtype=np.int64)
        first[self.waits_for[waits]] = waits
        return first

    def definitely_before(self, earlier: IntColumn, later: IntColumn) -> BoolColumn:
        """Mask of the pairs whose first is done before the second starts, for a common reason; True is never wrong.

        Both columns hold operation ids, each ``earlier`` before its ``later``
        in the program of one rank.
        """
        follows_compute = self.queue[later] <= COMPUTE_QUEUE
        ordered = (self.queue[earlier] == COMPUTE_QUEUE) & follows_compute
        open_pairs = np.flatnonzero(~ordered)
        if len(open_pairs):
            a, b = earlier[open_pairs], later[open_pairs]
            same_end = (self.channel[a] == self.channel[b]) & (self.is_send[a] == self.is_send[b])
            synced = self._synced[b]
            ordered[open_pairs] = (
                ((self.wait_on_rank[a] < b) & follows_compute[open_pairs])
                | (self.wait_on_host[a] < b)
                | (self.queue[a] == HOST_QUEUE)
                | ((self.queue[a] == self.queue[b]) & ((self.queue[a] != NONE) | same_end))
                | (synced == a)
                | ((synced > a) & (self.queue[a] == COMPUTE_QUEUE) & (self.run[synced] != self.run[a]))
            )
            if self.blocking:
                ordered[open_pairs] |= self.queue[a] == NONE
        return np.asarray(ordered & (self.run[earlier] != self.run[later]))

    @cached_property
    def _synced(self) -> IntColumn:
        """For operations on queues of other names: the last compute operation that their queue has waited for."""
        synced = np.full(self.num_ops, NONE, dtype=np.int64)
        rows = np.flatnonzero(self.queue > HOST_QUEUE)
        if len(rows):
            rows = rows[np.argsort(self.fifo[rows], kind="stable")]
            target = self.waits_for[rows]
            target = np.where((target != NONE) & (self.queue[target] == COMPUTE_QUEUE), target, NONE)
            begins = np.flatnonzero(np.diff(self.fifo[rows], prepend=NONE))
            for first, last in zip(begins, [*begins[1:], len(rows)], strict=True):  # one FIFO at a time
                before = np.maximum.accumulate(target[first:last])[:-1]
                selected = rows[first:last]
                synced[selected[1:]] = np.where(self.run[selected[1:]] != self.run[selected[:-1]], before, NONE)
        return synced

    def before(self, earlier: int, later: int) -> bool:
        """Return True if ``earlier`` is done before ``later`` starts, in every run."""
        low, high = sorted((earlier, later))
        return meet(self._followers, 2 * earlier + 1, self._leaders, 2 * later, near=(2 * low, 2 * high + 1))

    @cached_property
    def _edges(self) -> IntColumn:
        return event_edges(self)

    @cached_property
    def _followers(self) -> Adjacency:
        return adjacency(self._edges[:, 0], self._edges[:, 1], 2 * self.num_ops)

    @cached_property
    def _leaders(self) -> Adjacency:
        return adjacency(self._edges[:, 1], self._edges[:, 0], 2 * self.num_ops)


def order_of(graph: OpGraph, backend: BackendTable, *, num_steps: int = 1) -> Order:
    """The order of a graph's events by the backend's promises, over ``num_steps`` consecutive steps.

    Steps follow each other on every queue, as if the programs were written
    ``num_steps`` times in a row. A child collective runs inside its parent:
    on its queue, in its batch, unless its own row names one.
    """
    queue, batch = graph.queue, graph.batch
    run = np.arange(graph.num_ops)
    if (queue > COMPUTE_QUEUE).any() or (batch != NONE).any():
        inside = (graph.parent != NONE) & (graph.columns.values["queue"] == NONE)
        queue = np.where(inside, queue[graph.parent], queue)
        batch = np.where((graph.parent != NONE) & (batch == NONE), batch[graph.parent], batch)
        begins = (batch == NONE) | (np.diff(batch, prepend=NONE) != 0) | (np.diff(graph.rank, prepend=NONE) != 0)
        run = np.cumsum(begins)
    one = Order(
        rank=graph.rank,
        queue=queue,
        channel=graph.channel,
        is_send=graph.is_kind(SEND_KINDS),
        run=run,
        waits_for=graph.waits_for,
        part_before=graph.part_before,
        match=graph.match,
        group=np.where(graph.is_kind(COLLECTIVE_KINDS), graph.group, NONE),
        position=graph.position,
        home=np.arange(graph.num_ops),
        step=np.zeros(graph.num_ops, dtype=np.int64),
        rendezvous=backend.send_completes == "rendezvous",
        blocking=backend.host_blocks_on_post,
    )
    return one if num_steps == 1 else _repeated(one, graph.offsets, num_steps)


def _repeated(one: Order, offsets: IntColumn, num_steps: int) -> Order:
    """The order of several steps: each rank's operations repeated ``num_steps`` times."""
    first, length = offsets[one.rank], np.diff(offsets)[one.rank]
    ids = [one.home + (num_steps - 1) * first + step * length for step in range(num_steps)]
    origin = np.argsort(np.concatenate(ids), kind="stable")
    home, step = origin % max(one.num_ops, 1), origin // max(one.num_ops, 1)

    def moved(column: IntColumn) -> IntColumn:
        """A column of operations, in the same step."""
        target = column[home]
        return np.where(target == NONE, NONE, np.stack(ids)[step, target])

    return replace(
        one,
        **{name: getattr(one, name)[home] for name in ("rank", "queue", "channel", "is_send", "group", "position")},
        run=one.run[home] + step * (int(one.run.max(initial=0)) + 1),
        waits_for=moved(one.waits_for),
        part_before=moved(one.part_before),
        match=moved(one.match),
        home=home,
        step=step,
    )


def event_edges(order: Order) -> IntColumn:
    """Edges of the event graph, shape [n, 2]: start of operation i is event 2i, its done 2i + 1.

    Events beyond those represent "all members of a queue's entry are done" and
    "all members of a collective have started".
    """
    op = np.arange(order.num_ops)
    entry_of, followed = _entries(order)
    entry_done = 2 * order.num_ops
    call_begun = entry_done + int(entry_of.max(initial=NONE)) + 1
    members = np.flatnonzero(order.call != NONE)
    _, call = np.unique(order.call[members], return_inverse=True)
    held_done = call_begun + int(call.max(initial=NONE)) + 1
    later = np.flatnonzero(followed != NONE)
    waits = np.flatnonzero(order.waits_for != NONE)
    parts_later = np.flatnonzero(order.part_before != NONE)
    matched = np.flatnonzero((order.match != NONE) & (order.is_send | order.rendezvous))
    parts = (
        (2 * op, 2 * op + 1),
        (2 * op + 1, entry_done + entry_of),
        (entry_done + followed[later], 2 * later),
        (2 * order.waits_for[waits] + 1, 2 * waits + 1),
        (2 * order.part_before[parts_later] + 1, 2 * parts_later),
        (2 * matched, 2 * order.match[matched] + 1),
        (2 * members, call_begun + call),
        (call_begun + call, 2 * members + 1),
        _posts(order, entry_of, entry_done),
        *_after_host(order, held_done),
    )
    return np.stack([np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts])], axis=1)


def _entries(order: Order) -> tuple[IntColumn, IntColumn]:
    """(entry of each operation, entry before it on its fifo): an entry is one operation, or a batch's on that fifo."""
    by_fifo = np.argsort(order.fifo, kind="stable")
    fifo, run = order.fifo[by_fifo], order.run[by_fifo]
    new_fifo = np.diff(fifo, prepend=NONE) != 0
    number = np.cumsum(new_fifo | (np.diff(run, prepend=NONE) != 0)) - 1
    first_of_fifo = np.maximum.accumulate(np.where(new_fifo, number, 0)) if len(number) else number
    entry_of, previous = np.empty_like(number), np.empty_like(number)
    entry_of[by_fifo] = number
    previous[by_fifo] = np.where(number > first_of_fifo, number - 1, NONE)
    return entry_of, previous


def _last_before(order: Order, rows: IntColumn, which: BoolColumn) -> IntColumn:
    """For each of ``rows``, the last operation of its rank in ``which`` before its batch."""
    begins = np.flatnonzero(np.diff(order.run, prepend=NONE))
    first_of_run = begins[np.searchsorted(begins, rows, side="right") - 1]
    places = np.where(which, np.arange(order.num_ops), NONE)
    last = np.concatenate([[NONE], np.maximum.accumulate(places)])[first_of_run] if len(places) else rows
    return np.where(order.rank[last] == order.rank[rows], last, NONE)


def _posts(order: Order, entry_of: IntColumn, entry_done: int) -> tuple[IntColumn, IntColumn]:
    """A transfer on its default queue starts after the compute operation before it, or before its batch."""
    posted = np.flatnonzero(order.queue == NONE)
    last = _last_before(order, posted, order.queue == COMPUTE_QUEUE)
    follows = last != NONE
    return entry_done + entry_of[last[follows]], 2 * posted[follows]


def _after_host(order: Order, held_done: int) -> tuple[tuple[IntColumn, IntColumn], tuple[IntColumn, IntColumn]]:
    """Edges from operations that hold the host (all of a batch) to all that the host issues later."""
    holds = (order.queue == HOST_QUEUE) | (order.blocking & (order.queue == NONE))
    holding, rows = np.flatnonzero(holds), np.arange(order.num_ops)
    last = _last_before(order, rows, holds)
    held = np.flatnonzero(last != NONE)
    return (2 * holding + 1, held_done + order.run[holding]), (held_done + order.run[last[held]], 2 * held)
