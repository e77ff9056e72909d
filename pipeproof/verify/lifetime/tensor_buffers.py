"""The buffers that the kinds of operations imply: the tensors of each stage and micro-batch, gradients, weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from pipeproof.schedule.columns import FREE, READ, WRITE
from pipeproof.schedule.derive import BoolColumn, look_up
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import COMPUTE_KINDS, COPY_KINDS, GATHER_KINDS, KIND_CODE, SLICE_KINDS, OpKind
from pipeproof.stages.describe.boundary import DirectEdge

READS, WRITES, FREES = 1 << READ, 1 << WRITE, 1 << FREE
"""Bits of an operation's effect on a buffer."""

Part = tuple[IntColumn, IntColumn, int]
"""(buffer, operation, bits): uses of one kind as columns."""

_RECVS = (OpKind.RECV_FORWARD, OpKind.RECV_BACKWARD)
_SENDS = (OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD)
_GATHERS = (OpKind.GATHER_FORWARD, OpKind.GATHER_BACKWARD)
_SLICES = (OpKind.SLICE_FORWARD, OpKind.SLICE_BACKWARD)
_FLOW_KINDS = COMPUTE_KINDS | COPY_KINDS | GATHER_KINDS | SLICE_KINDS | {*_RECVS, *_SENDS}
_BACKWARDS = (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)
_ADDERS = (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT)
_REDUCERS = (OpKind.REDUCE_GRAD, OpKind.SCALE_GRAD)

OUTPUT, INPUT_GRAD, KEPT, INPUT, OUTPUT_GRAD, HOST, RELOADED = range(7)
"""Tensors of a stage and micro-batch; INPUT and OUTPUT_GRAD only if they are gathered from slices.

HOST is the copy of KEPT in host memory, RELOADED the copy of HOST on the device: other memory than KEPT.
"""
_PER_PLACE = 7
GRADIENT, WEIGHTS = 0, 1
"""Tensors of a stage that last from step to step."""


class _Numbering:
    """Numbers 0, 1, .. for the keys that occur, in order; NONE for any other key."""

    def __init__(self, keys: IntColumn) -> None:
        room = int(keys.max(initial=NONE)) + 1
        self._table: IntColumn | None = None
        if room <= 8 * len(keys) + 2**20:
            present = np.zeros(room, dtype=bool)
            present[keys] = True
            self._table = np.where(present, np.cumsum(present) - 1, NONE)
            self.count = int(present.sum())
        else:
            self._keys = np.unique(keys)
            self.count = len(self._keys)

    def of(self, keys: IntColumn) -> IntColumn:
        """The numbers of keys, all of them >= 0."""
        if self._table is not None:
            inside = keys < len(self._table)
            return np.where(inside, self._table[np.where(inside, keys, 0)], NONE)
        return look_up(self._keys, np.arange(self.count), keys)


class StageTensors:
    """Uses of the tensors of each stage and micro-batch (``flow``), and of persistent ones (``persistent``).

    A *place* is a (rank, stage, micro-batch) that occurs in the graph. ``direct`` are the plan's direct edges.
    """

    def __init__(self, graph: OpGraph, direct: Sequence[DirectEdge] = ()) -> None:
        self._graph, self._direct_edges = graph, direct
        flows = graph.is_kind(_FLOW_KINDS) & (graph.work_item != NONE) & (graph.stage >= 0)
        self.rows = np.flatnonzero(flows)
        self._num_stages = int(graph.stage.max(initial=0)) + 1
        self._num_work_items = int(graph.work_item.max(initial=0)) + 1
        self._stages = _Numbering(self._stage_key(self.rows))
        stage = self._stages.of(self._stage_key(self.rows))
        self._places = _Numbering(stage * self._num_work_items + graph.work_item[self.rows])
        self.place = np.full(graph.num_ops, NONE, dtype=np.int64)
        self.place[self.rows] = self._places.of(stage * self._num_work_items + graph.work_item[self.rows])
        self._kind_of_row = graph.kind[self.rows]

    def _stage_key(self, rows: IntColumn, *, step: int = 0) -> IntColumn:
        """A key of (rank, stage + ``step``), from one before the first stage to one after the last."""
        graph = self._graph
        return graph.rank[rows] * (self._num_stages + 2) + graph.stage[rows] + step + 1

    def of_kind(self, *kinds: OpKind) -> IntColumn:
        """The operations of the given kinds that have a place, in program order."""
        expected = np.zeros(len(KIND_CODE), dtype=bool)
        expected[[KIND_CODE[kind] for kind in kinds]] = True
        return self.rows[expected[self._kind_of_row]]

    @property
    def num_places(self) -> int:
        """Number of (rank, stage, micro-batch) that occur."""
        return self._places.count

    def first_at(self, ops: IntColumn) -> IntColumn:
        """By place the first of ``ops`` (in program order), else NONE."""
        first_ops = np.full(self.num_places, NONE, dtype=np.int64)
        first_ops[self.place[ops[::-1]]] = ops[::-1]
        return first_ops

    def last_at(self, ops: IntColumn) -> IntColumn:
        """By place the last of ``ops`` (in program order), else NONE."""
        return self.first_at(ops[::-1])

    def neighbour(self, ops: IntColumn, step: int) -> IntColumn:
        """The place of the same micro-batch ``step`` stages behind, on the same rank; else NONE."""
        stage = self._stages.of(self._stage_key(ops, step=step))
        exists = stage != NONE
        key = np.where(exists, stage, 0) * self._num_work_items + self._graph.work_item[ops]
        return np.where(exists, self._places.of(key), NONE)

    @cached_property
    def _entry(self) -> IntColumn:
        """By operation that crosses the rank's boundary, a number for (place, direction, tensor, part).

        If several messages bring one tensor, each message writes a part.
        """
        graph = self._graph
        rows = self.of_kind(*_RECVS, *_SENDS, *_GATHERS, *_SLICES)
        forward = self._kind_is(rows, OpKind.RECV_FORWARD, OpKind.SEND_FORWARD, _GATHERS[0], _SLICES[0])
        stage = self._stages.of(self._stage_key(rows))
        key = (stage * (len(graph.tensors) + 1) + graph.tensor[rows] + 1) * 2 + forward
        kinds = _Numbering(key)
        key = kinds.of(key) * self._num_work_items + graph.work_item[rows]
        key = _Numbering(key).of(key) * (int(graph.start[rows].max(initial=0)) + 1) + self._part(rows)
        entry = np.full(graph.num_ops, NONE, dtype=np.int64)
        entry[rows] = _Numbering(key).of(key)
        return entry

    def _part(self, rows: IntColumn) -> IntColumn:
        """Offset in its tensor at which each receive begins to write, if no gather follows; else 0."""
        graph = self._graph
        gathered = np.unique(graph.tensor[self.of_kind(*_GATHERS)])
        alone = (self._kind_is(rows, *_RECVS) == 1) & ~np.isin(graph.tensor[rows], gathered)
        return np.where(alone, graph.start[rows], 0)

    def _kind_is(self, ops: IntColumn, *kinds: OpKind) -> IntColumn:
        return np.isin(self._graph.kind[ops], [KIND_CODE[kind] for kind in kinds]).astype(np.int64)

    @cached_property
    def num_buffers(self) -> int:
        """Number of buffers of ``flow``."""
        return self.num_places * _PER_PLACE + (int(self._entry.max(initial=NONE)) + 1)

    def _at(self, cell: IntColumn, name: int | IntColumn) -> IntColumn:
        return cell * _PER_PLACE + name

    def _boundary(self, ops: IntColumn) -> IntColumn:
        return self.num_places * _PER_PLACE + self._entry[ops]

    @cached_property
    def is_plain(self) -> bool:
        """True if all computation is in order on the compute queues and the program frees nothing."""
        graph = self._graph
        special = graph.is_kind(COPY_KINDS | {OpKind.FREE, OpKind.UNSHARD, OpKind.RESHARD})
        return not (special.any() or (graph.queue > 0).any() or (graph.batch != NONE).any())

    def flow(self) -> Iterator[Part]:
        """Uses of tensors that are fresh in every step."""
        yield from self._incoming(_RECVS[0], _GATHERS[0], INPUT, OpKind.FORWARD)
        yield from self._incoming(_RECVS[1], _GATHERS[1], OUTPUT_GRAD, *_BACKWARDS)
        yield from self._made(OUTPUT, _RECVS[0], -1, OpKind.FORWARD)
        yield from self._made(INPUT_GRAD, _RECVS[1], +1, *_BACKWARDS)
        yield from self._outgoing(_SENDS[0], _SLICES[0], OUTPUT)
        yield from self._outgoing(_SENDS[1], _SLICES[1], INPUT_GRAD)
        for edge in self._direct_edges:
            yield from self._direct(edge)
        if not self.is_plain:  # else a matter of program order alone, which other rules look at
            yield from self._kept()

    def _incoming(self, recv: OpKind, gather: OpKind, name: int, *consumers: OpKind) -> Iterator[Part]:
        recvs, gathers = self.of_kind(recv), self.of_kind(gather)
        yield self._boundary(recvs), recvs, WRITES
        gathered = np.isin(self._entry[recvs], self._entry[gathers]) if len(gathers) else np.zeros(len(recvs), bool)
        yield self._boundary(gathers), gathers, READS
        yield self._at(self.place[gathers], name), gathers, WRITES
        for users in self._users(consumers):
            for arrived, buffer in (
                (recvs[~gathered], self._boundary(recvs[~gathered])),
                (gathers, self._at(self.place[gathers], name)),
            ):
                user = users[self.place[arrived]]
                yield buffer[user != NONE], user[user != NONE], READS

    def _users(self, consumers: tuple[OpKind, ...]) -> Iterator[IntColumn]:
        """By place, the readers of an arriving tensor: its consumer, and the backward operations that need it again."""
        yield self.first_at(self.of_kind(*consumers))
        if not self.is_plain:
            later = _BACKWARDS if OpKind.FORWARD in consumers else ()
            yield from (self.first_at(self.of_kind(kind)) for kind in (*later, OpKind.BACKWARD_WEIGHT))

    def _made(self, name: int, recv: OpKind, step: int, *makers: OpKind) -> Iterator[Part]:
        made = self.of_kind(*makers)
        yield self._at(self.place[made], name), made, WRITES
        recvs = self.of_kind(recv)
        received = self.first_at(recvs[self._graph.index[recvs] == NONE]) != NONE
        alone = made[~received[self.place[made]]]
        source = self.neighbour(alone, step)
        computed = self.first_at(made) != NONE
        local = np.flatnonzero((source != NONE) & computed[source])
        yield self._at(source[local], name), alone[local], READS

    def _direct(self, edge: DirectEdge) -> Iterator[Part]:
        """Reads of a direct edge's tensor that is already on the rank, without a receive of their own stage."""
        graph, recvs = self._graph, self.of_kind(_RECVS[0])
        named = np.array([tensor.member == edge.name for tensor in graph.tensors])[graph.tensor[recvs]]
        received = self.first_at(recvs[named & (graph.index[recvs] == edge.producer)])
        forwards, made = self.of_kind(OpKind.FORWARD), self.first_at(self.of_kind(*_BACKWARDS))
        for user in edge.consumers:
            own = forwards[graph.stage[forwards] == user]
            own = own[received[self.place[own]] == NONE]
            for source in edge.consumers:
                there = self.neighbour(own, source - user)
                arrival = np.where(there == NONE, NONE, received[there])
                for users in self._users((OpKind.FORWARD,)):
                    reader = users[self.place[own]]
                    has_both = (arrival != NONE) & (reader != NONE)
                    yield self._boundary(arrival[has_both]), reader[has_both], READS
            home = self.neighbour(own, edge.producer - user)
            is_local = home != NONE
            yield self._at(home[is_local], OUTPUT), own[is_local], READS
            back = np.where(is_local & edge.has_gradient, made[home], NONE)
            yield self._at(self.place[own[back != NONE]], INPUT_GRAD), back[back != NONE], READS

    def _outgoing(self, send: OpKind, slicer: OpKind, name: int) -> Iterator[Part]:
        sends, slices = self.of_kind(send), self.of_kind(slicer)
        yield self._at(self.place[slices], name), slices, READS
        yield self._boundary(slices), slices, WRITES
        sliced = np.isin(self._entry[sends], self._entry[slices]) if len(slices) else np.zeros(len(sends), bool)
        yield self._boundary(sends[sliced]), sends[sliced], READS
        yield self._at(self.place[sends[~sliced]], name), sends[~sliced], READS

    def _kept(self) -> Iterator[Part]:
        """Uses of activations and their copies; a backward reads the reloaded copy, where there is one."""
        reloaded = self.first_at(self.of_kind(OpKind.RELOAD)) != NONE
        in_backward = np.where(reloaded, RELOADED, KEPT)
        for kind, name, bits in (
            (OpKind.FORWARD, KEPT, WRITES),
            (OpKind.OFFLOAD, KEPT, READS),
            (OpKind.OFFLOAD, HOST, WRITES),
            (OpKind.RELOAD, HOST, READS),
            (OpKind.RELOAD, RELOADED, WRITES),
            (OpKind.BACKWARD, in_backward, READS),
            (OpKind.BACKWARD_INPUT, in_backward, READS | WRITES),
            (OpKind.BACKWARD_WEIGHT, in_backward, READS),
        ):
            ops = self.of_kind(kind)
            cell = self.place[ops]
            yield self._at(cell, name if isinstance(name, int) else name[cell]), ops, bits

    def is_named(self, buffer: IntColumn, *names: int) -> BoolColumn:
        """Mask of the numbers that are buffers of ``flow`` with one of these names (KEPT, ..)."""
        return (buffer < self.num_places * _PER_PLACE) & np.isin(buffer % _PER_PLACE, names)

    @property
    def num_persistent(self) -> int:
        """Number of buffers of ``persistent``."""
        return 2 * self._graph.num_ranks * self._num_stages

    def persistent(self) -> Iterator[Part]:
        """Uses of each stage's gradients and weights, which the next step uses again."""
        if self.is_plain:
            return
        graph = self._graph
        sharded = bool(graph.is_kind(frozenset({OpKind.UNSHARD, OpKind.RESHARD})).any())
        for kinds, name, bits in (
            (_ADDERS, GRADIENT, READS | WRITES),
            (_REDUCERS, GRADIENT, READS | WRITES),
            ((OpKind.STEP,), GRADIENT, READS),
            (tuple(COMPUTE_KINDS), WEIGHTS, READS),
            ((OpKind.UNSHARD,), WEIGHTS, WRITES),
            ((OpKind.RESHARD,), WEIGHTS, FREES),
            (() if sharded else (OpKind.STEP,), WEIGHTS, WRITES),
            ((OpKind.GATHER_WEIGHT,), WEIGHTS, WRITES if sharded else READS | WRITES),
        ):
            ops = np.flatnonzero(graph.is_kind(frozenset(kinds)))
            yield self._of_stage(ops, name), ops, bits
        parent = graph.parent
        for kind, name in ((OpKind.REDUCE_GRAD, GRADIENT), (OpKind.GATHER_WEIGHT, WEIGHTS)):
            children = np.flatnonzero((parent != NONE) & (graph.kind[parent] == KIND_CODE[kind]))
            bits = WRITES if sharded and name == WEIGHTS else READS | WRITES
            yield self._of_stage(children, name), children, bits

    def _of_stage(self, ops: IntColumn, name: int) -> IntColumn:
        graph = self._graph
        return (graph.rank[ops] * self._num_stages + graph.stage[ops]) * 2 + name
