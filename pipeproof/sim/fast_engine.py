"""The fast engine: the times of the reference model as longest paths, on columns.

It gives the times of ``simpy_model.run_model``, to the last tick, by another
method. Almost every operation is at a known distance from another one, so the
walk, in Python or compiled, visits few *nodes*.

- A host reaches an operation at the sum of the durations before it on its rank
  (``work``) plus its idle time so far. It idles only in waits for transfers and
  in collectives, its *stops*.
- The value of a wait is the idle time at its end: the idle time at the stop before it or, if larger, the end of its
  transfer minus ``work``. Node 0 is the beginning of every rank.
- The value of a collective is the arrival time of its last member; its own
  duration is part of ``work``.
- With buffered sends a send is done when it is posted: one host posts in order, so its queue never delays it. A receive
  is done when it is posted and one latency has passed since its send, whichever is later; both times grow along the
  queue. Waits for sends are not stops.
- With rendezvous each message is a node too: its time after both posts and
  after the message before it on its channel.
- Reductions, gathers and copies on a named queue form a *track* of their own (``tracks``), and so do the exchanges of
  overlapped pairs with parts. A wait between two tracks is a stop, and so is a part behind an exchange on another
  track.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.schedule.columns import HOST_QUEUE, NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    COPY_KINDS,
    KIND_CODE,
    SEND_KINDS,
    TRANSFER_KINDS,
    UPDATE_KINDS,
    OpKind,
)
from pipeproof.sim.longest_paths import longest_paths
from pipeproof.sim.op_durations import Durations
from pipeproof.sim.outcome import Outcome

_SIDE_KINDS = UPDATE_KINDS | COLLECTIVE_KINDS | COPY_KINDS | {OpKind.WAIT}


_MOST_TICKS = 2**62
"""Bound of the sum of all times: the sum of two such times must fit into 64 bits."""


class NotTimedError(ValueError):
    """The program cannot finish, or only the reference model supports it."""


@dataclass(frozen=True, eq=False)
class Times:
    """Start and end of every operation in ticks, as int64 columns."""

    starts: IntColumn
    ends: IntColumn

    def outcome(self, graph: OpGraph) -> Outcome:
        """These times in the form of the reference model."""
        return Outcome(tuple(self.starts.tolist()), tuple(self.ends.tolist()), (None,) * graph.num_ranks)


def run_fast(graph: OpGraph, durations: Durations, model: ChannelModel, *, compiled: bool | None = None) -> Times:
    """Times of all operations, equal to the times from ``run_model``. Linear in operations, except sorting.

    ``compiled`` selects numba or Python for the walk; see ``longest_paths``.

    Raises:
        NotTimedError: the program cannot finish; times exceed 62 bits; a rank sends to itself; or a collective is
            called by a number of ranks that differs from the size of its group.
    """
    return _Run(graph, durations, model).times(compiled=compiled)


_Edges = tuple[IntColumn, IntColumn, IntColumn]
"""Edges into nodes of one kind: the number of edges of each node, and the source and weight of each edge."""


class _Run:
    def __init__(self, graph: OpGraph, durations: Durations, model: ChannelModel) -> None:
        self._graph, self._model, self._durations = graph, model, durations
        self._rendezvous = model.completes == "rendezvous"
        self._is_transfer = graph.is_kind(TRANSFER_KINDS)
        self._is_send = graph.is_kind(SEND_KINDS)
        self._require_supported()
        self._pairs = _pairs_that_run(durations)
        self._duration = self._durations_on_hosts(durations)
        self._work = self._before_on_track(self._duration)
        self._calls = np.flatnonzero(graph.is_kind(COLLECTIVE_KINDS) & (graph.group != NONE))
        self._waits, self._awaited = self._waiting_stops()
        self._sync_node, self._num_sync_nodes = self._sync_nodes()
        self._sends = self._messages() if self._rendezvous else np.empty(0, dtype=np.int64)
        self._node_before, self._shift_before = self._last_stops()

    def times(self, *, compiled: bool | None) -> Times:
        edges = self._into_waits(), self._into_sync_nodes(), self._into_messages()
        counts, source, weight = map(np.concatenate, zip(*edges, strict=True))
        value = longest_paths(np.concatenate([[0, 0], np.cumsum(counts)]), source, weight, compiled=compiled)
        if value is None:
            raise NotTimedError("operations wait for each other")
        starts = value[self._node_before] + self._shift_before + self._work
        ends = starts + self._duration
        stopped_until = value[1 : 1 + len(self._waits)] + self._work[self._waits]
        ends[self._waits] = stopped_until + self._duration[self._waits]
        is_part = self._graph.part_before[self._waits] != NONE
        starts[self._waits[is_part]] = stopped_until[is_part]
        ends[self._calls] = value[self._sync_node] + self._duration[self._calls]
        behind, parts = self._calls[self._behind_parts], self._graph.part_before[self._calls[self._behind_parts]]
        starts[behind] = np.maximum(starts[behind], ends[parts])
        self._fill_transfers(starts, ends, value)
        first, second = self._pairs
        starts[second], ends[second] = starts[first], ends[first]
        inside = np.flatnonzero(self._graph.parent != NONE)
        np.maximum.at(ends, self._graph.parent[inside], ends[inside])
        return Times(starts, ends)

    @cached_property
    def _message_ticks(self) -> IntColumn:
        """Ticks of each message at its send."""
        by_send, latency = self._durations.message_ticks, self._durations.latency_ticks
        return np.full(self._graph.num_ops, latency) if by_send is None else np.array(by_send, dtype=np.int64)

    def _require_supported(self) -> None:
        graph, model = self._graph, self._model
        if model.queue != "directed_edge" or model.completes == "slots" or model.eager_bytes is not None:
            raise NotTimedError(f"the engine has no channel model {model}")
        if (
            (model.host_blocks and (graph.queue > HOST_QUEUE).any())
            or not self._named_queues_only_reduce_or_copy()
            or (graph.queue != NONE)[self._is_transfer].any()
        ):
            raise NotTimedError("operations are on named queues other than reductions and copies")
        if self._durations.collective_slowdown and (graph.part_before != NONE).any():
            raise NotTimedError("computations are slowed down by exchanges")
        if (graph.batch != NONE)[~graph.is_kind(COMPUTE_KINDS)].any():
            raise NotTimedError("operations are called in batches")
        if self._durations.recv_slowdown and self._computes_during_receives():
            raise NotTimedError("computations are slowed down by pending receives")
        if self._overtaken():
            raise NotTimedError("messages of one channel take different times")
        if (graph.peer == graph.rank)[self._is_transfer].any():
            raise NotTimedError("a rank sends to itself")
        needs_partner = self._is_transfer if self._rendezvous else self._is_transfer & ~self._is_send
        if (graph.match[needs_partner] == NONE).any():
            raise NotTimedError("a transfer has no counterpart")

    def _named_queues_only_reduce_or_copy(self) -> bool:
        """True if named queues hold only reductions, gathers, copies and waits, and the host never delays them."""
        graph = self._graph
        named = np.flatnonzero(graph.queue > HOST_QUEUE)
        waits = named[graph.is_kind(frozenset({OpKind.WAIT}))[named]]
        awaited = graph.waits_for[waits]
        kinds_fit = graph.is_kind(_SIDE_KINDS)[named].all() and not (len(named) and (graph.queue == HOST_QUEUE).any())
        return bool(kinds_fit and not graph.is_kind(TRANSFER_KINDS)[awaited[awaited != NONE]].any())

    @cached_property
    def _track(self) -> IntColumn:
        """Track of each operation: a rank's host with its transfers is one, each queue of another name is another."""
        return packed(self._graph.rank, np.where(self._graph.queue > HOST_QUEUE, self._graph.queue, NONE))

    @cached_property
    def _order(self) -> IntColumn:
        """Operation ids sorted by track, in program order within a track."""
        return np.argsort(self._track, kind="stable")

    @cached_property
    def _position(self) -> IntColumn:
        """Position of each operation in ``_order``."""
        position = np.empty_like(self._order)
        position[self._order] = np.arange(len(position))
        return position

    @cached_property
    def _begins(self) -> IntColumn:
        """Positions in ``_order`` at which tracks begin."""
        return np.flatnonzero(np.diff(self._track[self._order], prepend=NONE))

    def _before_on_track(self, durations: IntColumn) -> IntColumn:
        """Sum of the durations that precede each operation on its track."""
        ordered = durations[self._order]
        so_far = np.cumsum(ordered) - ordered
        lengths = np.diff(np.append(self._begins, len(ordered)))
        result = np.empty_like(so_far)
        result[self._order] = so_far - np.repeat(so_far[self._begins], lengths)
        return result

    def _overtaken(self) -> bool:
        """True if a buffered message may be faster than the message before it on its channel."""
        if self._rendezvous or self._durations.message_ticks is None:
            return False
        sends = self._messages()
        ticks, channel = self._message_ticks[sends], self._graph.channel[sends]
        return bool(((ticks[1:] < ticks[:-1]) & (channel[1:] == channel[:-1])).any())

    def _computes_during_receives(self) -> bool:
        """True if a rank computes between the post of a receive and the wait for it, or never waits for it."""
        graph = self._graph
        receives = self._is_transfer & ~self._is_send
        change = receives.astype(np.int64)
        waits = np.flatnonzero(graph.waits_for != NONE)
        waits = waits[receives[graph.waits_for[waits]]]
        _, first = np.unique(graph.waits_for[waits], return_index=True)
        change[waits[first]] -= 1
        pending = np.cumsum(change)
        before = np.concatenate([[0], pending])[graph.offsets[graph.rank]]
        if self._model.host_blocks:
            return False
        return bool(((pending > before) & graph.is_kind(COMPUTE_KINDS | {OpKind.STEP})).any())

    def _durations_on_hosts(self, durations: Durations) -> IntColumn:
        """Ticks for which each operation occupies its host, without idle time."""
        messages = durations.message_ticks or (durations.latency_ticks,)
        most = sum(durations.ticks) + max(messages) * (1 + int(self._is_send.sum()))
        if most >= _MOST_TICKS:
            raise NotTimedError("its times exceed 64 bits when they are scaled to a common tick")
        ticks = np.array(durations.ticks, dtype=np.int64)
        ticks[self._is_transfer | self._graph.is_kind(frozenset({OpKind.WAIT}))] = 0
        ticks[self._pairs[1]] = 0
        return ticks

    def _waiting_stops(self) -> tuple[IntColumn, IntColumn]:
        """(operations at which a host may idle, operations that they await), in order: transfers and other tracks."""
        graph = self._graph
        awaited = np.where(graph.kind == KIND_CODE[OpKind.WAIT], graph.waits_for, np.arange(graph.num_ops))
        is_part = (graph.kind == KIND_CODE[OpKind.PART]) & (graph.part_before != NONE)
        awaited = np.where(is_part, graph.part_before, awaited)
        if (awaited == NONE).any():
            raise NotTimedError("a wait has no posted target")
        stops = self._is_transfer[awaited]
        if not self._model.host_blocks:
            stops &= ~self._is_transfer
        if not self._rendezvous:
            stops &= ~self._is_send[awaited]
        stops |= ~self._is_transfer[awaited] & (self._track[awaited] != self._track)
        rows = np.flatnonzero(stops)
        return rows, awaited[rows]

    def _sync_nodes(self) -> tuple[IntColumn, int]:
        """(node of each call's collective, number of collectives); their nodes follow the waits' nodes."""
        if not len(self._calls):
            return self._calls, 0
        graph = self._graph
        key = packed(graph.group[self._calls], graph.position[self._calls])
        _, example, number, counts = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
        sizes = np.array([len(group.ranks) for group in graph.groups])
        if (counts != sizes[graph.group[self._calls[example]]]).any():
            raise NotTimedError("a collective is called by a number of ranks that differs from the size of its group")
        return number + 1 + len(self._waits), len(counts)

    def _messages(self) -> IntColumn:
        """The sends by channel and position: one message each; their nodes are the last ones."""
        sends = np.flatnonzero(self._is_send)
        return sends[np.argsort(self._graph.channel[sends], kind="stable")]

    def _last_stops(self) -> tuple[IntColumn, IntColumn]:
        """(node of the last stop before each operation on its host, idle time minus the value of that node)."""
        num_ops, order, begins = self._graph.num_ops, self._order, self._begins
        node, shift = np.zeros(num_ops + 1, dtype=np.int64), np.zeros(num_ops + 1, dtype=np.int64)
        stop_row = np.zeros(num_ops + 1, dtype=np.int64)
        waits, calls = self._position[self._waits], self._position[self._calls]
        node[waits + 1] = np.arange(1, 1 + len(waits))
        node[calls + 1] = self._sync_node
        shift[calls + 1] = -self._work[self._calls]
        for rows in (waits, calls):
            stop_row[rows + 1] = rows + 1
        node[begins], shift[begins], stop_row[begins] = 0, 0, begins
        last = np.maximum.accumulate(stop_row[:num_ops])
        node_before, shift_before = np.empty_like(last), np.empty_like(last)
        node_before[order], shift_before[order] = node[last], shift[last]
        return node_before, shift_before

    def _arrival(self, rows: IntColumn) -> tuple[IntColumn, IntColumn]:
        """(node, offset to its value) of the times at which hosts reach ``rows``."""
        return self._node_before[rows], self._shift_before[rows] + self._work[rows]

    def _end(self, rows: IntColumn) -> tuple[IntColumn, IntColumn]:
        """(node, offset to its value) of the end times of ``rows``, which are not transfers."""
        node, shift = self._arrival(rows)
        own, since = np.zeros((2, self._graph.num_ops), dtype=np.int64)
        own[self._waits], since[self._waits] = np.arange(1, 1 + len(self._waits)), self._work[self._waits]
        own[self._calls] = self._sync_node
        has_own = own[rows] > 0
        return np.where(has_own, own[rows], node), np.where(has_own, since[rows], shift) + self._duration[rows]

    def _into_waits(self) -> _Edges:
        rows, work = self._waits, self._work[self._waits]
        if self._rendezvous:
            done, since = self._node_of_message(self._awaited), -work
        else:
            done, since = self._arrival(self._graph.match[self._awaited])
            since = since + self._message_ticks[self._graph.match[self._awaited]] - work
        other_track = np.flatnonzero(~self._is_transfer[self._awaited])
        if len(other_track):
            done[other_track], since[other_track] = self._end(self._awaited[other_track])
            since[other_track] -= work[other_track]
        source = np.stack([self._node_before[rows], done], axis=1)
        weight = np.stack([self._shift_before[rows], since], axis=1)
        return np.full(len(rows), 2), source.ravel(), weight.ravel()

    def _into_sync_nodes(self) -> _Edges:
        node, since = self._arrival(self._calls)
        parts, since_parts = self._end(self._graph.part_before[self._calls[self._behind_parts]])
        sync_node = np.concatenate([self._sync_node, self._sync_node[self._behind_parts]])
        order = np.argsort(sync_node, kind="stable")
        counts = np.bincount(sync_node - 1 - len(self._waits), minlength=self._num_sync_nodes)
        return counts, np.concatenate([node, parts])[order], np.concatenate([since, since_parts])[order]

    @cached_property
    def _behind_parts(self) -> BoolColumn:
        """Mask of the calls that follow a part on another track."""
        before = self._graph.part_before[self._calls]
        track = self._track
        return np.asarray((before != NONE) & (track[before] != track[self._calls]))

    def _into_messages(self) -> _Edges:
        sends = self._sends
        sent, sent_after = self._arrival(sends)
        met, met_after = self._arrival(self._graph.match[sends])
        before = np.where(self._follows(), self._first_message + np.arange(-1, len(sends) - 1), 0)
        source = np.stack([sent, met, before], axis=1)
        weight = np.stack([sent_after, met_after, np.zeros_like(before)], axis=1)
        weight += self._message_ticks[sends][:, None]
        return np.full(len(sends), 3), source.ravel(), weight.ravel()

    @property
    def _first_message(self) -> int:
        return 1 + len(self._waits) + self._num_sync_nodes

    def _follows(self) -> BoolColumn:
        """Mask of the messages that have a predecessor on their channel."""
        channel = self._graph.channel[self._sends]
        follows = np.zeros(len(channel), dtype=bool)
        follows[1:] = channel[1:] == channel[:-1]
        return follows

    def _node_of_message(self, transfers: IntColumn) -> IntColumn:
        node = np.zeros(self._graph.num_ops, dtype=np.int64)
        node[self._sends] = self._first_message + np.arange(len(self._sends))
        node[self._graph.match[self._sends]] = node[self._sends]
        return node[transfers]

    def _fill_transfers(self, starts: IntColumn, ends: IntColumn, value: IntColumn) -> None:
        """Replace the times of posts, which ``starts`` holds so far, by the times of the transfers."""
        graph = self._graph
        if self._rendezvous:
            done = value[self._first_message :]
            for rows in (self._sends, graph.match[self._sends]):
                ends[rows] = done
                self._start_behind(rows, starts, ends)
            return
        receives = np.flatnonzero(self._is_transfer & ~self._is_send)
        receives = receives[np.argsort(graph.channel[receives], kind="stable")]
        sends = graph.match[receives]
        ends[receives] = np.maximum(starts[receives], starts[sends] + self._message_ticks[sends])
        self._start_behind(receives, starts, ends)

    def _start_behind(self, rows: IntColumn, starts: IntColumn, ends: IntColumn) -> None:
        """Let each transfer start when its predecessor in the queue is done; ``rows`` are sorted by queue."""
        behind, ahead = rows[1:], rows[:-1]
        same = self._graph.channel[behind] == self._graph.channel[ahead]
        starts[behind[same]] = np.maximum(starts[behind[same]], ends[ahead[same]])


def _pairs_that_run(durations: Durations) -> tuple[IntColumn, IntColumn]:
    """The overlapped pairs as two columns; the second of a pair is never the first of another."""
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for first in sorted(durations.overlapped):
        if first not in taken:
            pairs[first] = durations.overlapped[first]
            taken.add(pairs[first])
    return np.array([*pairs], dtype=np.int64), np.array([*pairs.values()], dtype=np.int64)
