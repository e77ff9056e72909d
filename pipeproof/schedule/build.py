"""Builds the op table from rows: ids, channels, FIFO positions and edges, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from pipeproof.schedule.ops import (
    CHILD_KINDS,
    COLLECTIVE_KINDS,
    SEND_KINDS,
    TRANSFER_KINDS,
    Op,
    OpKind,
)
from pipeproof.schedule.optable import NONE, Channel, EdgeKind, Group, OpGraph, Row, TensorSpec


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


_COLUMNS = ("rank", "peer", "channel", "tensor", "start", "stop", "group", "position", "waits_for", "parent")


class _Builder:
    def __init__(self, tensors: tuple[TensorSpec, ...], groups: tuple[Group, ...], num_ranks: int) -> None:
        self._tensors, self._groups, self._num_ranks = tensors, groups, num_ranks
        self._ops: list[Op] = []
        self._reductions: list[str] = []
        self._offsets = [0]
        self._values: list[tuple[int, ...]] = []
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
            self._values.append(
                (rank, row.peer, channel, row.tensor, row.start, row.stop, row.group, position, waits_for, parent)
            )
            self._link(row.op, op_id, channel, waits_for, scope)
        self._offsets.append(len(self._ops))

    def _check(self, rank: int, row: Row) -> None:
        if row.tensor >= len(self._tensors):
            raise ValueError(f"rank {rank}, {row.op}: tensor {row.tensor}, but the graph has {len(self._tensors)}")
        if row.group >= len(self._groups):
            raise ValueError(f"rank {rank}, {row.op}: group {row.group}, but the graph has {len(self._groups)}")
        if row.op.kind in TRANSFER_KINDS and not 0 <= row.peer < self._num_ranks:
            raise ValueError(f"rank {rank}, {row.op}: peer {row.peer} is not a rank 0..{self._num_ranks - 1}")

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
        edges = {kind: np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2) for kind, pairs in self._edges.items()}
        return OpGraph(
            ops=tuple(self._ops),
            reductions=tuple(self._reductions),
            offsets=np.array(self._offsets, dtype=np.int64),
            tensors=self._tensors,
            channels=tuple(self._channels),
            groups=self._groups,
            edges=edges,
            **dict(
                zip(_COLUMNS, np.array(self._values, dtype=np.int64).reshape(-1, len(_COLUMNS)).T.copy(), strict=True)
            ),
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
        producers = []
        for name in _READS.get(op.kind, ()):
            producer = self._tensor_at.get((name, op.stage, op.micro_batch))
            if producer is not None and producer not in producers:
                producers.append(producer)
        for name in _WRITES.get(op.kind, ()):
            self._tensor_at[name, op.stage, op.micro_batch] = op_id
        return producers


_READS: Mapping[OpKind, tuple[str, ...]] = MappingProxyType(
    {
        OpKind.FORWARD: ("input",),
        OpKind.BACKWARD: ("output_grad", "kept"),
        OpKind.BACKWARD_INPUT: ("output_grad", "kept"),
        OpKind.BACKWARD_WEIGHT: ("kept",),
        OpKind.SLICE_FORWARD: ("output",),
        OpKind.SEND_FORWARD: ("output",),
        OpKind.GATHER_FORWARD: ("input",),
        OpKind.SLICE_BACKWARD: ("input_grad",),
        OpKind.SEND_BACKWARD: ("input_grad",),
        OpKind.GATHER_BACKWARD: ("output_grad",),
    }
)
"""What each kind reads of its stage and micro-batch; ``kept`` is what a forward keeps for its backward."""

_WRITES: Mapping[OpKind, tuple[str, ...]] = MappingProxyType(
    {
        OpKind.FORWARD: ("output", "kept"),
        OpKind.BACKWARD: ("input_grad",),
        OpKind.BACKWARD_INPUT: ("input_grad", "kept"),
        OpKind.SLICE_FORWARD: ("output",),
        OpKind.RECV_FORWARD: ("input",),
        OpKind.GATHER_FORWARD: ("input",),
        OpKind.SLICE_BACKWARD: ("input_grad",),
        OpKind.RECV_BACKWARD: ("output_grad",),
        OpKind.GATHER_BACKWARD: ("output_grad",),
    }
)
"""What each kind writes of its stage and micro-batch."""
