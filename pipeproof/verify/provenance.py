"""Provenance of every element that a receiver holds, as ranges.

Every element of a sent tensor has an identity (source rank, index in that
rank's flattened local tensor). The identities are pushed through the lowered
operations: a send carries a range, a receive places it, a gather joins the
received ranges of its group's members. The work grows with the number of ranges,
never with the number of elements.

Messages that end in one tensor, or that one gather joins, are an *event*.
Micro-batches and replicas repeat the same events; ``events`` groups equal
events into ``classes``, and each class is examined once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.derive import look_up, packed
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import GATHER_KINDS, KIND_CODE, OpKind

DATA_RECEIVES = frozenset({OpKind.RECV_FORWARD, OpKind.RECV_BACKWARD})
DATA_SENDS = frozenset({OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD})
"""Transfers of boundary tensors; exchanges of shapes carry no elements."""


@dataclass(frozen=True, slots=True)
class Places:
    """Position of each rank of a graph in its tensor-parallel group, one entry per rank.

    ``index`` of ``size`` ranks; ranks with the same ``team`` are one group,
    and ranks with the same ``data_group`` work on the same micro-batches and parts
    of sequences, on any stage. A rank represents ``copies`` ranks of
    its group, ``index`` and those after it (1, unless the graph is folded).
    """

    index: IntColumn
    size: IntColumn
    team: IntColumn
    data_group: IntColumn
    copies: IntColumn


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``start .. stop`` of a receiver's flattened tensor, filled from ``source_start`` of ``source_rank``.

    ``source_copy`` is the number among the ranks that ``source_rank`` represents; 0 for itself.
    """

    start: int
    stop: int
    source_rank: int
    source_start: int
    source_copy: int = 0

    def moved(self, start: int, stop: int, by: int) -> Segment | None:
        """The part that lies in ``start .. stop``, moved by ``by`` positions; None if none does."""
        low, high = max(self.start, start), min(self.stop, stop)
        if low >= high:
            return None
        source_start = self.source_start + low - self.start
        return Segment(low + by, high + by, self.source_rank, source_start, self.source_copy)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One boundary tensor in the receiver's memory when its consumer starts.

    ``receive`` is the op id of its first RECV, ``sender`` the rank that sent
    this message; ``copy`` is the number among the ranks that the
    receiver represents. ``segments`` are sorted by position; positions in no segment
    were never written.
    """

    receive: int
    sender: int
    segments: tuple[Segment, ...]
    copy: int = 0


def gathers_of_receives(graph: OpGraph) -> IntColumn:
    """For each op id: the GATHER that joins the data of this RECV, ``NONE`` for other operations."""
    result = np.full(graph.num_ops, NONE, dtype=np.int64)
    receives, gathers = np.flatnonzero(graph.is_kind(DATA_RECEIVES)), np.flatnonzero(graph.is_kind(GATHER_KINDS))
    keys = _tensor_keys(graph, np.concatenate([receives, gathers]))
    sorted_keys, first = np.unique(keys[len(receives) :], return_index=True)
    result[receives] = look_up(sorted_keys, gathers[first], keys[: len(receives)])
    return result


def _tensor_keys(graph: OpGraph, rows: IntColumn) -> IntColumn:
    """Equal for operations of one rank that write the same tensor of the same micro-batch."""
    backward = np.isin(graph.kind[rows], [KIND_CODE[OpKind.RECV_BACKWARD], KIND_CODE[OpKind.GATHER_BACKWARD]])
    columns = (graph.rank, graph.stage, graph.work_item, graph.tensor)
    return packed(*(column[rows] for column in columns), backward.astype(np.int64))


@dataclass(frozen=True, eq=False)
class Events:
    """The events of a graph: which messages end together, and which events are equal.

    Items are sorted by event; event ``e`` has the items
    ``offsets[e] : offsets[e + 1]``. ``receive`` and ``gather`` are op ids,
    ``NONE`` if an item has none. ``classes[e]`` is equal for events that differ
    only in their micro-batch and replica; events in which a receive has no
    matching send have class ``NONE``.
    """

    graph: OpGraph
    receive: IntColumn
    gather: IntColumn
    offsets: IntColumn
    classes: IntColumn

    def deliveries(self, event: int, places: Places | None = None) -> Iterator[Delivery]:
        """Deliveries of one event, one per receiver; with ``places``, one for each rank that a rank represents."""
        items = range(int(self.offsets[event]), int(self.offsets[event + 1]))
        receives = [int(self.receive[i]) for i in items if self.receive[i] != NONE]
        gathers = sorted({int(self.gather[i]) for i in items if self.gather[i] != NONE})
        copies = 1 if places is None else int(places.copies[self.graph.rank[(receives or gathers)[0]]])
        by_rank = grouped((int(self.graph.rank[receive]), receive) for receive in receives)
        joined = tuple(self._joined(gathers, by_rank, copies)) if gathers else None
        for selected in by_rank.values():
            sender = int(self.graph.rank[self.graph.match[selected[0]]])
            for copy in range(copies):
                segments = joined
                if segments is None:
                    segments = tuple(sorted(self._received(selected, copy), key=lambda s: s.start))
                yield Delivery(selected[0], sender, segments, copy)

    def _received(self, receives: list[int], copy: int) -> Iterator[Segment]:
        graph = self.graph
        for receive in receives:
            send = int(graph.match[receive])
            start = int(graph.start[receive] + copy * graph.shift[receive])
            source_start = int(graph.start[send] + copy * graph.shift[send])
            length = min(int(graph.stop[receive] - graph.start[receive]), int(graph.stop[send] - graph.start[send]))
            if length > 0:
                yield Segment(start, start + length, int(graph.rank[send]), source_start, copy)

    def _joined(self, gathers: list[int], receives: dict[int, list[int]], copies: int) -> Iterator[Segment]:
        """A gather concatenates: member after member, in group order."""
        graph = self.graph
        by_rank = {int(graph.rank[gather]): gather for gather in gathers}
        written = 0
        for rank in graph.groups[int(graph.group[gathers[0]])].ranks:
            for copy in range(copies) if rank in by_rank else ():
                gather = by_rank[rank]
                start, stop = (int(end[gather] + copy * graph.shift[gather]) for end in (graph.start, graph.stop))
                for segment in self._received(receives.get(rank, []), copy):
                    part = segment.moved(start, stop, written - start)
                    if part is not None:
                        yield part
                written += stop - start


def events(graph: OpGraph, places: Places) -> Events:
    """Group the messages of a graph by their final tensor, and classify these events. No Python work per row."""
    receives, gathers = np.flatnonzero(graph.is_kind(DATA_RECEIVES)), np.flatnonzero(graph.is_kind(GATHER_KINDS))
    gather_of = gathers_of_receives(graph)[receives]
    bare = np.setdiff1d(gathers, gather_of)  # gathers whose rank receives nothing for them
    receive = np.concatenate([receives, np.full(len(bare), NONE)])
    gather = np.concatenate([gather_of, bare])
    row = np.where(receive == NONE, gather, receive)
    # One event per tensor that receives write, and one per call of a gather.
    alone = _tensor_keys(graph, row)
    calls = packed(graph.group[gather], graph.position[gather])
    key = np.where(gather == NONE, alone, -2 - calls)
    send = np.where(receive == NONE, NONE, graph.match[receive])
    send[~graph.is_kind(DATA_SENDS)[send] & (send != NONE)] = NONE  # a shape announcement is not a tensor
    order = np.lexsort((graph.start[row], send, graph.rank[row], key))
    receive, gather, send, row, key = (column[order] for column in (receive, gather, send, row, key))
    begins = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.empty(0, dtype=np.int64)
    offsets = np.append(begins, len(key))
    lengths = np.diff(offsets)
    codes = _code(_item_columns(graph, places, receive, gather, send, row, np.repeat(begins, lengths)))
    classes = _code_runs(codes, offsets)
    unmatched = np.add.reduceat((receive != NONE) & (send == NONE), begins) if len(key) else begins
    return Events(graph, receive, gather, offsets, np.where(unmatched > 0, NONE, classes))


def _item_columns(
    graph: OpGraph,
    places: Places,
    receive: IntColumn,
    gather: IntColumn,
    send: IntColumn,
    row: IntColumn,
    first: IntColumn,
) -> list[IntColumn]:
    """All properties of an item that its event's outcome depends on; ranks only by their position in their group."""
    forms: dict[object, int] = {}
    form_of = [forms.setdefault((t.shape, t.dims, t.placement), len(forms)) for t in graph.tensors]
    form = np.array([*form_of, NONE], dtype=np.int64)[graph.tensor]
    columns = []
    for ids, ends in ((receive, True), (send, True), (gather, False)):
        there = ids != NONE
        columns += [np.where(there, column[ids], NONE) for column in (graph.start, graph.stop, graph.shift)]
        if ends:
            rank = graph.rank[ids]
            columns += [np.where(there, column, NONE) for column in (form[ids], places.index[rank])]
            columns += [np.where(there, places.size[rank], NONE)]
    ours, theirs = graph.rank[row], graph.rank[send]
    columns.append((send != NONE) & (places.data_group[ours] != places.data_group[theirs]))
    columns.append(
        (send != NONE) & (send[first] != NONE) & (places.team[theirs] != places.team[graph.rank[send[first]]])
    )
    columns.append(places.team[ours] != places.team[graph.rank[row[first]]])
    columns.append(ours == graph.rank[row[first]])
    columns.append(_places_in_group(graph, gather))
    return [np.asarray(column, dtype=np.int64) for column in columns]


def _places_in_group(graph: OpGraph, calls: IntColumn) -> IntColumn:
    """For each collective (or ``NONE``) the position of its rank in its group."""
    group = np.where(calls == NONE, NONE, graph.group[calls])
    used = [int(g) for g in np.unique(group) if g != NONE]
    if not used:
        return group
    members = [(g, rank, position) for g in used for position, rank in enumerate(graph.groups[g].ranks)]
    table = np.array(sorted(members), dtype=np.int64)
    key = packed(np.append(group, table[:, 0]), np.append(graph.rank[calls], table[:, 1]))
    return look_up(key[len(calls) :], table[:, 2], key[: len(calls)])


_FACTOR = np.int64(-7046029254386353131)  # 2^64 / golden ratio, as a signed number: Fibonacci hashing


def _mixed(key: IntColumn, column: IntColumn) -> IntColumn:
    with np.errstate(over="ignore"):
        key = (key ^ column) * _FACTOR
    return key ^ (key >> np.int64(29))


def _code(columns: list[IntColumn]) -> IntColumn:
    """One small number per row, equal if and only if all columns are equal.

    Rows are sorted by a hash of 64 bits; rows with equal hashes are then compared column by column.
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        key = _mixed(key, column)
    _, first, code = np.unique(key, return_index=True, return_inverse=True)
    if all(np.array_equal(column, column[first[code]]) for column in columns):
        return code
    return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)


def _code_runs(codes: IntColumn, offsets: IntColumn) -> IntColumn:
    """One small number per run ``offsets[i] : offsets[i + 1]``, equal exactly for equal runs."""
    begins, lengths = offsets[:-1], np.diff(offsets)
    if not len(begins):
        return begins
    position = np.arange(len(codes)) - np.repeat(begins, lengths)
    with np.errstate(over="ignore"):
        key = _mixed(np.add.reduceat(_mixed(_mixed(np.zeros_like(codes), position), codes), begins), lengths)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    same = np.repeat(begins[first[inverse]], lengths) + position
    if np.array_equal(lengths[first[inverse]], lengths) and np.array_equal(codes[same], codes):
        return inverse
    runs = [tuple(codes[a:b].tolist()) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    number = {run: i for i, run in enumerate(dict.fromkeys(runs))}
    return np.array([number[run] for run in runs], dtype=np.int64)
