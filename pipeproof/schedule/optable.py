"""The op table: every operation of every rank as one row of columns, with its edges.

This is the one object that is verified, simulated and executed. Op ids are
row numbers; the rows of a rank are contiguous and in host program order, that
is the order in which the rank's process comes to them. Transfers are posted
there and run on a queue of their own (one per rank and channel); everything
else runs on the rank's compute queue and blocks it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeproof.schedule.ops import (
    CHILD_KINDS,
    COLLECTIVE_KINDS,
    GATHER_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    SLICE_KINDS,
    TRANSFER_KINDS,
    Op,
    OpKind,
)

if TYPE_CHECKING:
    import networkx as nx

IntColumn = NDArray[np.int64]

NONE = -1
"""In an integer column: this row has no such thing."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as one rank holds it: what crosses a stage boundary, on one of its sides.

    ``shape`` is local, in elements; ``placement`` is over the ``tp`` axis in
    its text form; ``dims`` names the dims (``sbh``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    dims: str

    @property
    def numel(self) -> int:
        """Number of elements of the local tensor."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Channel:
    """A FIFO from one rank to another on one communicator; no tags, the k-th send meets the k-th recv."""

    communicator: str
    src: int
    dst: int

    def __str__(self) -> str:
        return f"{self.communicator} {self.src}->{self.dst}"


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one communicator along one mesh axis, in group order."""

    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One row before it has an id. Users and tests write, drop, double and swap these.

    ``peer`` is the other rank of a transfer; ``tensor`` indexes the graph's
    tensors; ``start`` and ``stop`` are the half-open range of that tensor's
    flattened elements that the operation reads (send, slice, gather) or
    writes (recv), or 0 and the element count that a child collective puts in;
    ``group`` indexes the graph's groups.
    """

    op: Op
    peer: int = NONE
    tensor: int = NONE
    start: int = 0
    stop: int = 0
    group: int = NONE
    reduction: str = ""


class EdgeKind(StrEnum):
    """Why one operation comes after another."""

    HOST = "host"
    """Next on the rank's compute queue."""
    POST = "post"
    """A transfer is posted after the host operation before it."""
    QUEUE = "queue"
    """Next on the same transfer queue."""
    MATCH = "match"
    """The k-th send of a channel to its k-th recv."""
    WAIT = "wait"
    """A transfer to the wait for it."""
    DATA = "data"
    """Producer to consumer of a tensor within a rank."""


@dataclass(frozen=True, eq=False)
class OpGraph:
    """All operations of one training step as columns, with edges by kind.

    Columns have one entry per op id. ``peer``, ``channel``, ``tensor``,
    ``group``, ``waits_for`` (op id that a WAIT waits for) and ``parent`` (op id
    that a child collective belongs to) are ``NONE`` where they do not apply.
    ``position`` counts a transfer's place in its channel, and a collective's
    place among those that its rank issues on its group.
    """

    ops: tuple[Op, ...]
    reductions: tuple[str, ...]
    rank: IntColumn
    peer: IntColumn
    channel: IntColumn
    tensor: IntColumn
    start: IntColumn
    stop: IntColumn
    group: IntColumn
    position: IntColumn
    waits_for: IntColumn
    parent: IntColumn
    offsets: IntColumn
    """``offsets[r] : offsets[r + 1]`` are the op ids of rank r."""
    tensors: tuple[TensorSpec, ...]
    channels: tuple[Channel, ...]
    groups: tuple[Group, ...]
    edges: Mapping[EdgeKind, IntColumn]
    """Arrays of shape [num_edges, 2] of (source, target) op ids."""

    @property
    def num_ranks(self) -> int:
        """Number of global ranks."""
        return len(self.offsets) - 1

    def rank_ops(self, rank: int) -> range:
        """Op ids of ``rank`` in host program order."""
        return range(int(self.offsets[rank]), int(self.offsets[rank + 1]))

    def rows(self) -> list[list[Row]]:
        """The rows of each rank, from which ``build_graph`` makes an equal graph."""
        return [[self.row(op_id) for op_id in self.rank_ops(rank)] for rank in range(self.num_ranks)]

    def row(self, op_id: int) -> Row:
        """One row in the form that people edit."""
        return Row(
            self.ops[op_id],
            int(self.peer[op_id]),
            int(self.tensor[op_id]),
            int(self.start[op_id]),
            int(self.stop[op_id]),
            int(self.group[op_id]),
            self.reductions[op_id],
        )

    @cached_property
    def match_of(self) -> dict[int, int]:
        """Send to recv and recv to send, by FIFO position on their channel."""
        pairs = self.edges[EdgeKind.MATCH]
        return {int(a): int(b) for a, b in (*pairs, *pairs[:, ::-1])}

    @cached_property
    def nx(self) -> nx.DiGraph[int]:
        """The networkx graph over op ids: nodes carry ``rank`` and ``op``, edges a tuple ``kinds``."""
        import networkx as nx

        graph: nx.DiGraph[int] = nx.DiGraph()
        for op_id, op in enumerate(self.ops):
            graph.add_node(op_id, rank=int(self.rank[op_id]), op=str(op))
        kinds: dict[tuple[int, int], list[str]] = {}
        for kind, pairs in self.edges.items():
            for source, target in pairs.tolist():
                kinds.setdefault((source, target), []).append(kind.value)
        for (source, target), names in kinds.items():
            graph.add_edge(source, target, kinds=tuple(names))
        return graph


def build_graph(
    rows_by_rank: Sequence[Sequence[Row]], tensors: Iterable[TensorSpec], groups: Iterable[Group]
) -> OpGraph:
    """Give every row an id and derive channels, FIFO positions and edges. Linear in rows.

    Nothing is judged here: unmatched transfers simply have no match edge, a
    wait for a transfer that is not there waits for ``NONE``.

    Raises:
        ValueError: a row names a tensor or group that is not in the lists, or a transfer has no peer.
    """
    builder = _Builder(tuple(tensors), tuple(groups), len(rows_by_rank))
    for rank, rows in enumerate(rows_by_rank):
        builder.add_rank(rank, rows)
    return builder.finish()


class _Builder:
    def __init__(self, tensors: tuple[TensorSpec, ...], groups: tuple[Group, ...], num_ranks: int) -> None:
        self._tensors, self._groups, self._num_ranks = tensors, groups, num_ranks
        self._ops: list[Op] = []
        self._reductions: list[str] = []
        self._offsets = [0]
        names = ("rank", "peer", "channel", "tensor", "start", "stop", "group", "position", "waits_for", "parent")
        self._columns: dict[str, list[int]] = {name: [] for name in names}
        self._channels: dict[Channel, int] = {}
        self._sends: list[list[int]] = []
        self._recvs: list[list[int]] = []
        self._edges: dict[EdgeKind, list[tuple[int, int]]] = {kind: [] for kind in EdgeKind}

    def add_rank(self, rank: int, rows: Sequence[Row]) -> None:
        scope = _RankScope()
        for row in rows:
            self._check(rank, row)
            op_id = len(self._ops)
            self._ops.append(row.op)
            self._reductions.append(row.reduction)
            channel, position = self._place(rank, row, op_id, scope)
            waits_for, parent = scope.resolve(row.op)
            values = (
                rank, row.peer, channel, row.tensor, row.start, row.stop, row.group, position, waits_for, parent,
            )  # fmt: skip
            for column, value in zip(self._columns.values(), values, strict=True):
                column.append(value)
            self._link(row.op, op_id, channel, waits_for, scope)
        self._offsets.append(len(self._ops))

    def _check(self, rank: int, row: Row) -> None:
        where = f"rank {rank}, {row.op}"
        if row.tensor >= len(self._tensors):
            raise ValueError(f"{where}: tensor {row.tensor}, but the graph has {len(self._tensors)}")
        if row.group >= len(self._groups):
            raise ValueError(f"{where}: group {row.group}, but the graph has {len(self._groups)}")
        if row.op.kind in TRANSFER_KINDS and not 0 <= row.peer < self._num_ranks:
            raise ValueError(f"{where}: peer {row.peer} is not a rank 0..{self._num_ranks - 1}")

    def _place(self, rank: int, row: Row, op_id: int, scope: _RankScope) -> tuple[int, int]:
        """(channel, FIFO position) of a transfer; (NONE, place on its group) of a collective."""
        kind = row.op.kind
        if kind in COLLECTIVE_KINDS:
            return NONE, scope.next_on_group(row.group)
        if kind not in TRANSFER_KINDS:
            return NONE, NONE
        sends = kind in SEND_KINDS
        ends = (rank, row.peer) if sends else (row.peer, rank)
        channel = Channel("forward" if row.op.is_forward else "backward", *ends)
        index = self._channels.setdefault(channel, len(self._channels))
        if index == len(self._sends):
            self._sends.append([])
            self._recvs.append([])
        fifo = (self._sends if sends else self._recvs)[index]
        fifo.append(op_id)
        return index, len(fifo) - 1

    def _link(self, op: Op, op_id: int, channel: int, waits_for: int, scope: _RankScope) -> None:
        if op.kind in TRANSFER_KINDS:
            if scope.last_host != NONE:
                self._edges[EdgeKind.POST].append((scope.last_host, op_id))
            previous = scope.last_on_channel.get((channel, op.kind in SEND_KINDS))
            if previous is not None:
                self._edges[EdgeKind.QUEUE].append((previous, op_id))
            scope.last_on_channel[channel, op.kind in SEND_KINDS] = op_id
        else:
            if scope.last_host != NONE:
                self._edges[EdgeKind.HOST].append((scope.last_host, op_id))
            scope.last_host = op_id
            if waits_for != NONE:
                self._edges[EdgeKind.WAIT].append((waits_for, op_id))
        self._edges[EdgeKind.DATA] += [(producer, op_id) for producer in scope.flow(op, op_id)]

    def finish(self) -> OpGraph:
        for sends, recvs in zip(self._sends, self._recvs, strict=True):
            self._edges[EdgeKind.MATCH] += list(zip(sends, recvs, strict=False))
        edges = {
            kind: np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2) for kind, pairs in self._edges.items()
        }
        return OpGraph(
            ops=tuple(self._ops),
            reductions=tuple(self._reductions),
            offsets=np.array(self._offsets, dtype=np.int64),
            tensors=self._tensors,
            channels=tuple(self._channels),
            groups=self._groups,
            edges=edges,
            **{name: np.array(values, dtype=np.int64) for name, values in self._columns.items()},
        )


class _RankScope:
    """What one rank's rows so far mean for the next one."""

    def __init__(self) -> None:
        self.last_host = NONE
        self.last_on_channel: dict[tuple[int, bool], int] = {}
        self._unwaited: dict[Op, list[int]] = {}
        self._last_of: dict[Op, int] = {}
        self._group_counts: dict[int, int] = {}
        self._tensor_at: dict[tuple[str, int, int | None], int] = {}

    def next_on_group(self, group: int) -> int:
        count = self._group_counts.get(group, 0)
        self._group_counts[group] = count + 1
        return count

    def resolve(self, op: Op) -> tuple[int, int]:
        """(op id that a WAIT waits for, op id of a child's parent)."""
        if op.kind is OpKind.WAIT:
            assert op.target is not None
            pending = self._unwaited.get(op.target)
            return (pending.pop(0) if pending else NONE), NONE
        if op.kind in CHILD_KINDS:
            assert op.target is not None
            return NONE, self._last_of.get(op.target, NONE)
        return NONE, NONE

    def flow(self, op: Op, op_id: int) -> list[int]:
        """Record what ``op`` reads and writes; the producers of what it reads, each once."""
        if op.kind in TRANSFER_KINDS:
            self._unwaited.setdefault(op, []).append(op_id)
        elif op.kind not in CHILD_KINDS:
            self._last_of[op] = op_id
        reads, writes = _flows(op)
        producers = [self._tensor_at[key] for key in reads if key in self._tensor_at]
        for key in writes:
            self._tensor_at[key] = op_id
        return list(dict.fromkeys(producers))


_TensorKey = tuple[str, int, int | None]


def _flows(op: Op) -> tuple[tuple[_TensorKey, ...], tuple[_TensorKey, ...]]:
    """(tensors read, tensors written) by ``op`` among its stage's input, output and their gradients."""
    stage, micro_batch = op.stage, op.micro_batch

    def keys(*names: str) -> tuple[_TensorKey, ...]:
        return tuple((name, stage, micro_batch) for name in names)

    if op.kind is OpKind.FORWARD:
        return keys("input"), keys("output", "kept")
    if op.kind is OpKind.BACKWARD:
        return keys("output_grad", "kept"), keys("input_grad")
    if op.kind is OpKind.BACKWARD_INPUT:
        return keys("output_grad", "kept"), keys("input_grad", "kept")
    if op.kind is OpKind.BACKWARD_WEIGHT:
        return keys("kept"), ()
    outgoing, incoming = ("output", "input") if op.is_forward else ("input_grad", "output_grad")
    if op.kind in SEND_KINDS:
        return keys(outgoing), ()
    if op.kind in SLICE_KINDS:
        return keys(outgoing), keys(outgoing)
    if op.kind in RECV_KINDS:
        return (), keys(incoming)
    if op.kind in GATHER_KINDS:
        return keys(incoming), keys(incoming)
    return (), ()
