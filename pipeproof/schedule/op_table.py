"""The op table: every operation of every rank as one row of columns, with its edges.

This is the one object that is verified, simulated and executed. Op ids are
row numbers; the rows of a rank are contiguous and in host program order, that
is the order in which the rank's process comes to them. Transfers are posted
there and run on a queue of their own (one per rank and channel end);
everything else runs on the rank's compute queue and blocks it, unless its row
names another queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.columns import (
    COMPUTE_QUEUE,
    HOST_QUEUE,
    NONE,
    Columns,
    IntColumn,
    Row,
    columns_of,
    rank_column,
    work_item_text,
    work_of,
)
from pipeproof.schedule.derive import (
    BoolColumn,
    chain_edges,
    channel_columns,
    data_edges,
    is_kind,
    match_column,
    packed,
    parent_column,
    part_before_column,
    position_column,
    sorted_edges,
    waits_for_column,
    with_children,
)
from pipeproof.schedule.op_parts import (
    Accesses,
    BoundaryPosition,
    Channel,
    EdgeKind,
    EdgesByKind,
    Group,
    OpsById,
    TensorSpec,
)
from pipeproof.schedule.ops import (
    COMPUTE_KINDS,
    KIND_CODE,
    KINDS,
    SEND_KINDS,
    STEP_OF_TRANSFER,
    TRANSFER_KINDS,
    Op,
    OpKind,
)

if TYPE_CHECKING:
    import networkx as nx


__all__ = [
    "NONE",
    "Accesses",
    "BoundaryPosition",
    "Channel",
    "EdgeKind",
    "Group",
    "IntColumn",
    "OpGraph",
    "Row",
    "TensorSpec",
]


class OpGraph:
    """All operations of one training step as columns, with edges by kind. Frozen: nothing changes it.

    Columns are int64 arrays with one entry per op id: ``kind`` (an index into ``ops.KINDS``), ``stage``, ``work_item``
    (a micro-batch, or one split of its sequences), ``rank``, ``peer``, ``channel``, ``tensor``, ``start``, ``stop``,
    ``shift``, ``group``, ``reduction``, ``queue``, ``batch``, ``scale``, ``origin`` as ``Row`` has them, and what
    follows from the rows:

    - ``position``: a transfer's position in its channel, or a collective's among its rank's collectives on its group;
    - ``match``: the op id of a transfer's other end;
    - ``waits_for``: the op id that a WAIT waits for, or the last collective below that operation;
    - ``parent``: the op id that a child collective or a part belongs to;
    - ``part_before``: for a PART or collective of a computation with PARTs, its predecessor in the same computation,
      which may be on another queue.

    ``NONE`` means that there is no such value. ``offsets[r] : offsets[r + 1]``
    are the op ids of rank r. ``global_rank[r]`` is the rank of the mesh that
    rank r of this graph is, or represents.
    """

    def __init__(
        self,
        columns: Columns,
        tensors: tuple[TensorSpec, ...],
        groups: tuple[Group, ...],
        global_rank: tuple[int, ...] | None = None,
    ) -> None:
        values = columns.values
        self.columns = columns
        self.tensors, self.groups = tensors, groups
        self.offsets = columns.offsets
        self.rank = rank_column(columns.offsets)
        self.global_rank = tuple(range(self.num_ranks)) if global_rank is None else global_rank
        self.kind, self.stage, self.work_item = values["kind"], values["stage"], values["work_item"]
        self.axis, self.target_kind, self.index = values["axis"], values["target_kind"], values["index"]
        self.peer, self.tensor, self.group = values["peer"], values["tensor"], values["group"]
        self.start, self.stop, self.shift = values["start"], values["stop"], values["shift"]
        self.reduction, self.scale = values["reduction"], values["scale"]
        self.batch, self.origin = values["batch"], values["origin"]
        default = np.where(self.is_kind(TRANSFER_KINDS), NONE, COMPUTE_QUEUE)
        self.queue = np.where(values["queue"] == NONE, default, values["queue"])
        self.channel, ends = channel_columns(columns, self.rank)
        self.channels = tuple(Channel(columns.communicators[c], src, dst) for c, src, dst in ends)
        self.position = position_column(columns, self.rank, self.channel)
        self.match = match_column(self.kind, self.channel, self.position)
        self.parent = parent_column(columns, self.rank)
        self.part_before = part_before_column(columns, self.parent)
        self.waits_for = with_children(waits_for_column(columns, self.rank), self.parent)
        self.ops: Sequence[Op] = OpsById(columns)
        self.edges: Mapping[EdgeKind, IntColumn] = EdgesByKind(self._edges_of)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in this graph."""
        return len(self.offsets) - 1

    @property
    def num_ops(self) -> int:
        """Number of operations over all ranks."""
        return self.columns.num_rows

    @property
    def queues(self) -> tuple[str, ...]:
        """Names by the values of the ``queue`` column."""
        return self.columns.queues

    @property
    def scales(self) -> tuple[str, ...]:
        """Factors by the values of the ``scale`` column."""
        return self.columns.scales

    @property
    def reduction_names(self) -> tuple[str, ...]:
        """Names by the values of the ``reduction`` column."""
        return self.columns.reductions

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that rows name; a name is of one rank."""
        return self.columns.buffers

    @cached_property
    def accesses(self) -> Accesses:
        """Accesses of rows to buffers; empty if the kinds imply them all."""
        op, buffer, mode = self.columns.accesses.T
        return Accesses(op, buffer, mode)

    @property
    def num_splits(self) -> int:
        """Number of sequence splits of each micro-batch; 0 if sequences are not split."""
        return self.columns.num_splits

    def work_item_text(self, work_item: int) -> str:
        """A work item as operations name it: ``3``, or ``3.s1``."""
        return work_item_text(work_item, self.num_splits)

    def op_of(self, kind: OpKind, stage: int, work_item: int) -> Op:
        """The operation of this kind for a stage and a work item."""
        micro_batch, split = work_of(work_item, self.num_splits)
        return Op(kind, stage, micro_batch, split=split)

    def is_kind(self, kinds: frozenset[OpKind]) -> BoolColumn:
        """Return a mask of the operations that are in ``kinds``."""
        return is_kind(self.kind, kinds)

    def partner_stage(self, rows: IntColumn) -> IntColumn:
        """The stage at the other end of each of some transfers of tensors."""
        towards = np.zeros(len(KINDS), dtype=np.int64)
        for kind, step in STEP_OF_TRANSFER.items():
            towards[KIND_CODE[kind]] = step
        return np.where(self.index[rows] == NONE, self.stage[rows] + towards[self.kind[rows]], self.index[rows])

    def rank_ops(self, rank: int) -> range:
        """Op ids of ``rank`` in host program order."""
        return range(int(self.offsets[rank]), int(self.offsets[rank + 1]))

    def rows(self) -> list[list[Row]]:
        """The rows of each rank, from which ``build_graph`` makes an equal graph."""
        return [[self.row(op_id) for op_id in self.rank_ops(rank)] for rank in range(self.num_ranks)]

    def row(self, op_id: int) -> Row:
        """One row in the form that people edit."""
        queue, communicator = (int(self.columns.values[name][op_id]) for name in ("queue", "communicator"))
        return Row(
            op=self.ops[op_id],
            peer=int(self.peer[op_id]),
            tensor=int(self.tensor[op_id]),
            start=int(self.start[op_id]),
            stop=int(self.stop[op_id]),
            group=int(self.group[op_id]),
            reduction=self.reduction_names[int(self.reduction[op_id])],
            shift=int(self.shift[op_id]),
            communicator="" if communicator == NONE else self.columns.communicators[communicator],
            queue="" if queue == NONE else self.queues[queue],
            batch=int(self.batch[op_id]),
            scale=self.scales[int(self.scale[op_id])],
            origin=int(self.origin[op_id]),
            **self._names_of(op_id),
        )

    def _names_of(self, op_id: int) -> dict[str, tuple[str, ...]]:
        if not len(self.columns.accesses):
            return {}
        accesses = self.columns.accesses[self.accesses.op == op_id]
        return {
            name: tuple(self.buffers[b] for _, b, m in accesses.tolist() if m == mode)
            for mode, name in enumerate(("reads", "writes", "frees"))
        }

    def members_of(self, op_id: int) -> list[int]:
        """A collective's op ids on all ranks that issue it, in group order; empty for any other operation."""
        if self.group[op_id] == NONE:
            return []
        same = (self.group == self.group[op_id]) & (self.position == self.position[op_id])
        by_rank = {int(self.rank[i]): int(i) for i in same.nonzero()[0]}
        return [by_rank[rank] for rank in self.groups[int(self.group[op_id])].ranks if rank in by_rank]

    @cached_property
    def match_of(self) -> dict[int, int]:
        """Send to recv and recv to send, as a dict for code that walks a small graph; see ``match``."""
        matched = np.flatnonzero(self.match != NONE)
        return dict(zip(matched.tolist(), self.match[matched].tolist(), strict=True))

    def _edges_of(self, kind: EdgeKind) -> IntColumn:
        by_default = self.queue == NONE
        on_compute = (self.queue == COMPUTE_QUEUE) | (self.queue == HOST_QUEUE)
        match kind:
            case EdgeKind.HOST:
                rows = np.flatnonzero(on_compute)
                return chain_edges(rows, self.rank[rows])
            case EdgeKind.POST:
                last = np.maximum.accumulate(np.where(on_compute, np.arange(self.num_ops), NONE))
                rows = np.flatnonzero(by_default)
                rows = rows[last[rows] >= self.offsets[self.rank[rows]]]
                return sorted_edges(last[rows], rows)
            case EdgeKind.QUEUE:
                rows = np.flatnonzero(~on_compute)
                side = self.is_kind(SEND_KINDS)[rows].astype(np.int64)
                own = np.where(by_default[rows], self.channel[rows] * 2 + side, NONE)
                return chain_edges(rows, packed(self.rank[rows], self.queue[rows], own))
            case EdgeKind.MATCH:
                sends = np.flatnonzero(self.is_kind(SEND_KINDS) & (self.match != NONE))
                return sorted_edges(sends, self.match[sends])
            case EdgeKind.WAIT:
                waits = np.flatnonzero(self.waits_for != NONE)
                return sorted_edges(self.waits_for[waits], waits)
            case EdgeKind.DATA:
                of_tensors = data_edges(self.kind, self.rank, self.stage, self.work_item)
                later = np.flatnonzero(self.part_before != NONE)
                if not len(later):
                    return of_tensors
                between = np.concatenate([of_tensors, np.stack([self.part_before[later], later], axis=1)])
                return sorted_edges(between[:, 0], between[:, 1])

    @cached_property
    def pairs(self) -> IntColumn:
        """The overlapped pairs: two computations of one batch that follow each other on a rank; shape [n, 2]."""
        computes = np.flatnonzero(self.is_kind(COMPUTE_KINDS) & (self.batch != NONE))
        first, second = computes[:-1], computes[1:]
        same = (self.batch[first] == self.batch[second]) & (self.rank[first] == self.rank[second])
        return np.stack([first[same], second[same]], axis=1)

    @cached_property
    def nx(self) -> nx.DiGraph[int]:
        """The networkx graph over op ids: nodes carry ``rank`` and ``op``, edges a tuple ``kinds``.

        Nodes of transfers also carry a ``channel``, nodes of collectives a ``group``, as indices into the graph's
        tables.
        """
        import networkx as nx

        graph: nx.DiGraph[int] = nx.DiGraph()
        for op_id, op in enumerate(self.ops):
            meets = {"channel": int(self.channel[op_id]), "group": int(self.group[op_id])}
            attributes = {name: index for name, index in meets.items() if index != NONE}
            graph.add_node(op_id, rank=int(self.rank[op_id]), op=str(op), **attributes)
        edges = ((pair, kind.value) for kind, pairs in self.edges.items() for pair in map(tuple, pairs.tolist()))
        for (source, target), names in grouped(edges).items():
            graph.add_edge(source, target, kinds=tuple(names))
        return graph


def build_graph(
    rows_by_rank: Sequence[Sequence[Row]], tensors: Iterable[TensorSpec], groups: Iterable[Group]
) -> OpGraph:
    """Give every row an id and derive channels, FIFO positions and edges. Linear in rows.

    This function checks nothing: unmatched transfers have no match edge, and a wait for a missing transfer waits for
    ``NONE``.

    Raises:
        ValueError: a row names a tensor or group that is not in the lists, a transfer has no peer, or a group has
            no members, one twice or one that is not a rank.
    """
    all_tensors, all_groups = tuple(tensors), tuple(groups)
    for index, group in enumerate(all_groups):
        _check_group(index, group, len(rows_by_rank))
    for rank, rows in enumerate(rows_by_rank):
        for row in rows:
            _check(rank, row, len(all_tensors), len(all_groups), len(rows_by_rank))
    return OpGraph(columns_of(rows_by_rank), all_tensors, all_groups)


def _check(rank: int, row: Row, num_tensors: int, num_groups: int, num_ranks: int) -> None:
    if row.tensor >= num_tensors:
        raise ValueError(f"rank {rank}, {row.op}: tensor {row.tensor}, but the graph has {num_tensors}")
    if row.group >= num_groups:
        raise ValueError(f"rank {rank}, {row.op}: group {row.group}, but the graph has {num_groups}")
    if row.op.kind in TRANSFER_KINDS and not 0 <= row.peer < num_ranks:
        raise ValueError(f"rank {rank}, {row.op}: peer {row.peer} is not a rank 0..{num_ranks - 1}")


def _check_group(index: int, group: Group, num_ranks: int) -> None:
    if not group.ranks:
        raise ValueError(f"group {index} ({group.axis}) has no members")
    if len(set(group.ranks)) < len(group.ranks):
        raise ValueError(f"group {index} ({group.axis}) has a member twice: {list(group.ranks)}")
    if not all(0 <= rank < num_ranks for rank in group.ranks):
        raise ValueError(f"group {index} ({group.axis}) has a member that is not a rank 0..{num_ranks - 1}")
