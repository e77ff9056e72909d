"""Gradient history: all changes of the gradients of one stage on one rank, read from the columns.

A history has *additions* (a micro-batch adds its share to every parameter of
the stage) and *entries* (everything else: scale, reduce, overwrite, step), in
program order. Ordinary programs add each micro-batch once before the first
entry; for those no Python work is done per addition. Where sums are of single
micro-batches (``REDUCE_GRAD3``), each addition is an entry of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.comm.plan_context import Mesh
from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.columns import COMPUTE_QUEUE, REDUCTIONS, WRITE
from pipeproof.schedule.derive import BoolColumn, is_kind, look_up, packed
from pipeproof.schedule.op_table import NONE, Group, IntColumn, OpGraph
from pipeproof.schedule.ops import CHILD_KINDS, KIND_CODE, OpKind
from pipeproof.verify.gradients.coefficient import Coefficient


@dataclass(frozen=True, eq=False)
class Grid:
    """Coordinates of the ranks of a graph on the axes that have more than one rank.

    ``coords`` has shape [ranks, axes]. Over a *folded* axis every rank of the
    graph represents all ranks; its coordinate has no meaning. A size is a name
    if the graph does not state the number of ranks.
    """

    axes: tuple[str, ...]
    sizes: Mapping[str, Coefficient]
    coords: IntColumn
    folded: frozenset[str]

    def size(self, axis: str) -> Coefficient:
        """Ranks along ``axis``; 1 if the mesh does not have it."""
        return self.sizes.get(axis, Coefficient.of(1))

    def along(self, group: Group) -> str | None:
        """The axis along which ``group`` is exactly one line, None if there is none."""
        if len(group.ranks) == 1:
            whole = self.size(group.axis).number
            alone = whole == group.copies and (group.axis in self.folded or group.copies == 1)
            return group.axis if alone else None
        lines = self.coords[list(group.ranks)]
        varying = np.flatnonzero((lines != lines[0]).any(axis=0))
        if len(varying) != 1 or group.copies != 1:
            return None
        axis = self.axes[varying[0]]
        places = np.sort(lines[:, varying[0]])
        is_line = len(places) == self.size(axis).number and np.array_equal(places, np.arange(len(places)))
        return axis if is_line else None

    def line(self, rank: int, axis: str) -> list[int]:
        """The ranks of the graph that differ from ``rank`` in their coordinate on ``axis`` only, with itself."""
        keys, lines = self._lines_along(axis)
        return lines[int(keys[rank])]

    def place(self, rank: int, axis: str) -> int:
        """The coordinate of ``rank``; 0 on an axis with one rank."""
        return int(self.coords[rank, self.axes.index(axis)]) if axis in self.axes else 0

    def same(self, rank: IntColumn, axis: str, coord: int) -> BoolColumn:
        """Mask of the ranks with a coordinate on an axis; all ranks on an axis with one rank."""
        if axis not in self.axes:
            return np.ones(len(rank), dtype=bool)
        return np.asarray(self.coords[rank, self.axes.index(axis)] == coord)

    @cached_property
    def _lines(self) -> dict[str, tuple[IntColumn, dict[int, list[int]]]]:
        return {}

    def _lines_along(self, axis: str) -> tuple[IntColumn, dict[int, list[int]]]:
        """(the line of each rank, the ranks of each line), found when an axis is first asked for."""
        if axis not in self._lines:
            others = [self.coords[:, i] for i, name in enumerate(self.axes) if name != axis]
            keys = packed(*others) if others else np.zeros(len(self.coords), dtype=np.int64)
            lines = grouped((key, rank) for rank, key in enumerate(keys.tolist()))
            self._lines[axis] = keys, lines
        return self._lines[axis]


def mesh_grid(graph: OpGraph, mesh: Mesh) -> Grid:
    """The grid of a graph whose ranks are, or represent, ranks of ``mesh``."""
    axes = tuple(axis for axis in mesh.axes if mesh.size(axis) > 1)
    places = [[mesh.coords(rank)[axis] for axis in axes] for rank in graph.global_rank]
    folded = frozenset(axes) - {"pp"} if graph.num_ranks < mesh.num_ranks else frozenset[str]()
    return Grid(
        axes,
        {axis: Coefficient.of(mesh.size(axis)) for axis in axes},
        np.array(places, dtype=np.int64).reshape(graph.num_ranks, len(axes)),
        folded,
    )


def guessed_grid(graph: OpGraph, stages: Mapping[int, tuple[int, ...]], needed: frozenset[str]) -> Grid:
    """Grid that is guessed from the groups of a graph; ranks with the same stages share their ``pp`` coordinate.

    An axis of ``needed`` that no group has is folded, its size a name.
    """
    held = grouped((rank, stage) for stage, ranks in stages.items() for rank in ranks)
    codes = {key: code for code, key in enumerate(sorted({tuple(v) for v in held.values()}))}
    columns = {"pp": [codes.get(tuple(held.get(rank, ())), len(codes)) for rank in range(graph.num_ranks)]}
    sizes = {"pp": Coefficient.of(len(codes))}
    folded = set[str]()
    for axis in sorted({group.axis for group in graph.groups if group.axis != "pp"}):
        groups = [group for group in graph.groups if group.axis == axis]
        places = [0] * graph.num_ranks
        for group in reversed(groups):
            for coord, rank in enumerate(group.ranks):
                places[rank] = coord
        largest = max(groups, key=lambda group: group.size)
        if largest.size > 1:
            columns[axis], sizes[axis] = places, Coefficient.of(largest.size)
            folded |= {axis} if largest.copies > 1 else set()
    for axis in sorted(needed - set(columns)):
        columns[axis], sizes[axis] = [0] * graph.num_ranks, Coefficient.named(axis)
        folded.add(axis)
    return Grid(tuple(columns), sizes, np.array(list(columns.values()), dtype=np.int64).T, frozenset(folded))


OVERWRITE = REDUCTIONS.index("overwrite")

_SIGNATURE = ("kind", "axis", "index", "reduction", "scale", "work_item", "start", "stop")
"""Columns that define equal entries, in addition to their group and the parameters that they name."""

_PREFIX, _SUFFIX = "grad[", "]"

_MOST_CELLS = 10**8


@dataclass(frozen=True, eq=False)
class GradientHistories:
    """All histories of a graph: history i is of ``rank[i]`` and ``stage[i]``, in that order.

    ``adds`` and ``entries`` are op ids by history, then in program order;
    history i begins at ``first_add[i]`` and ``first_entry[i]``. ``segment``
    is for each addition the number of entries of its history before it.
    ``plain[i]`` marks histories that add every micro-batch once before their
    first entry. ``line`` is for each entry the code of its group relative to
    its rank: the index of an axis in the grid, ``NONE`` without a group, else
    ``-2 - group``. ``named`` is for each entry an index into ``names``, the
    sets of parameters that rows may name as buffers ``grad[NAME]``.
    ``micro_batches`` are the micro-batches of the step; ``place`` is for each
    addition the index of its micro-batch among them, ``NONE`` for any other.
    """

    graph: OpGraph
    add_kinds: frozenset[OpKind]
    rank: IntColumn
    stage: IntColumn
    adds: IntColumn
    first_add: IntColumn
    segment: IntColumn
    place: IntColumn
    entries: IntColumn
    first_entry: IntColumn
    plain: BoolColumn
    line: IntColumn
    named: IntColumn
    names: tuple[frozenset[str], ...]
    micro_batches: IntColumn

    def __len__(self) -> int:
        return len(self.rank)

    def entries_of(self, history: int) -> slice:
        """Slice of the entries of a history."""
        return slice(int(self.first_entry[history]), int(self.first_entry[history + 1]))

    def adds_of(self, history: int) -> slice:
        """Slice of the additions of a history."""
        return slice(int(self.first_add[history]), int(self.first_add[history + 1]))

    def signature(self, history: int) -> bytes:
        """Key that is equal for histories with the same effect on each micro-batch, apart from the groups' ranks."""
        span = self.entries_of(history)
        rows = self._signatures[span].tobytes()
        if self.plain[history]:
            return rows
        there = self.adds_of(history)
        return rows + b"|" + np.stack([self.place[there], self.segment[there]]).tobytes()

    @cached_property
    def _signatures(self) -> IntColumn:
        columns = [self.graph.columns.values[name][self.entries] for name in _SIGNATURE]
        return np.ascontiguousarray(np.stack([*columns, self.line, self.named], axis=1))

    @cached_property
    def by_stage(self) -> Mapping[int, tuple[int, ...]]:
        """The histories of each stage."""
        result = grouped((stage, history) for history, stage in enumerate(self.stage.tolist()))
        return {stage: tuple(histories) for stage, histories in result.items()}

    @cached_property
    def elsewhere(self) -> bool:
        """True if any addition or entry runs on another queue than ``compute``, or in one call with others."""
        rows = np.concatenate([self.adds, self.entries])
        return bool(((self.graph.queue[rows] != COMPUTE_QUEUE) | (self.graph.batch[rows] != NONE)).any())


def read_histories(
    graph: OpGraph, grid: Grid, add_kinds: frozenset[OpKind], micro_batches: IntColumn
) -> GradientHistories:
    """The histories of a graph in which operations of ``add_kinds`` add to gradients. Linear in rows but for sorts.

    ``micro_batches`` are the micro-batches of the step, in rising order.
    """
    is_add = graph.is_kind(add_kinds)
    is_entry = graph.is_kind(frozenset({OpKind.SCALE_GRAD, OpKind.REDUCE_GRAD, OpKind.STEP}))
    is_entry |= graph.is_kind(CHILD_KINDS) & (graph.target_kind == KIND_CODE[OpKind.REDUCE_GRAD])
    is_entry[writers_elsewhere(graph)] = True
    is_apart = is_entry & (graph.work_item != NONE) & (graph.kind == KIND_CODE[OpKind.REDUCE_GRAD])
    is_entry |= is_add & np.isin(packed(graph.rank, graph.stage), packed(graph.rank, graph.stage)[is_apart])
    rows = np.flatnonzero(is_add | is_entry)
    key = packed(graph.rank[rows], graph.stage[rows])
    rows = rows[np.argsort(key, kind="stable")]
    keys, number = np.unique(key, return_inverse=True)
    history = np.sort(number)
    is_scaled = (graph.scale != 0) & ~graph.is_kind(frozenset({OpKind.FORWARD}))  # a forward scales its loss
    apart = (is_entry | is_scaled | (graph.reduction == OVERWRITE))[rows]
    entries, adds = np.flatnonzero(apart), np.flatnonzero(~apart)
    everyone = np.arange(len(keys) + 1)
    first_entry = np.searchsorted(history[entries], everyone)
    first_add = np.searchsorted(history[adds], everyone)
    segment = np.searchsorted(entries, adds) - first_entry[history[adds]]
    starts = np.searchsorted(history, everyone[:-1])
    position = micro_batch_places(micro_batches, graph.work_item[rows[adds]])
    line = _lines(graph, grid, rows[entries])
    named, names = _named(graph, rows[entries])
    return GradientHistories(
        graph=graph,
        add_kinds=add_kinds,
        rank=graph.rank[rows[starts]],
        stage=graph.stage[rows[starts]],
        adds=rows[adds],
        first_add=first_add,
        segment=segment,
        place=position,
        entries=rows[entries],
        first_entry=first_entry,
        plain=_plain(position, history[adds], segment, len(keys), len(micro_batches)),
        line=line,
        named=named,
        names=names,
        micro_batches=micro_batches,
    )


def micro_batch_places(micro_batches: IntColumn, micro_batch: IntColumn) -> IntColumn:
    """The index of each micro-batch in ``micro_batches``, ``NONE`` if it is not one of them."""
    return look_up(micro_batches, np.arange(len(micro_batches)), micro_batch)


def _plain(
    position: IntColumn, history: IntColumn, segment: IntColumn, num_histories: int, num_micro_batches: int
) -> BoolColumn:
    """Mask of the histories that add each micro-batch once and before every entry."""
    if num_histories * num_micro_batches > _MOST_CELLS:  # far more than the rows: hardly any is plain
        return np.zeros(num_histories, dtype=bool)
    usual = (segment == 0) & (position != NONE)
    cells = history[usual] * num_micro_batches + position[usual]
    count = np.bincount(cells, minlength=num_histories * num_micro_batches).reshape(num_histories, num_micro_batches)
    unusual = np.bincount(history[~usual], minlength=num_histories)
    return np.asarray((count == 1).all(axis=1) & (unusual == 0))


def _lines(graph: OpGraph, grid: Grid, rows: IntColumn) -> IntColumn:
    group = graph.group[rows]
    used = np.unique(group[group != NONE])
    code = np.full(len(graph.groups) + 1, NONE, dtype=np.int64)
    members: list[tuple[int, int]] = []
    for one in used.tolist():
        axis = grid.along(graph.groups[one])
        places = (*grid.axes, axis)  # an axis with a single rank is behind the last
        code[one] = -2 - one if axis is None else places.index(axis)
        members += [(one, rank) for rank in graph.groups[one].ranks]
    pairs = np.array(members, dtype=np.int64).reshape(-1, 2)
    is_member = np.isin(group * graph.num_ranks + graph.rank[rows], pairs[:, 0] * graph.num_ranks + pairs[:, 1])
    return np.where((group == NONE) | is_member, code[group], -2 - group)


def _named(graph: OpGraph, rows: IntColumn) -> tuple[IntColumn, tuple[frozenset[str], ...]]:
    """Parameters that rows name: (index of the set per row, the sets; first the empty one)."""
    named = np.zeros(len(rows), dtype=np.int64)
    sets: dict[frozenset[str], int] = {frozenset(): 0}
    by_row = named_parameters(graph)
    if by_row:
        for row_number, op in enumerate(rows.tolist()):
            named[row_number] = sets.setdefault(frozenset(by_row.get(op, ())), len(sets))
    return named, tuple(sets)


def names_parameter(buffer: str) -> bool:
    """Return True for ``grad[NAME]``: the gradient of a parameter, wherever it is stored."""
    return buffer.startswith(_PREFIX) and buffer.endswith(_SUFFIX)


def writers_elsewhere(graph: OpGraph) -> IntColumn:
    """Op ids of collectives without a REDUCE_GRAD above them that write gradients, named as ``grad[NAME]``."""
    accesses = graph.accesses
    writes = (accesses.mode == WRITE) & _is_gradient(graph)[accesses.buffer]
    rows = np.unique(accesses.op[writes])
    elsewhere = is_kind(graph.kind[rows], CHILD_KINDS) & (graph.target_kind[rows] != KIND_CODE[OpKind.REDUCE_GRAD])
    return np.asarray(rows[elsewhere])


def _is_gradient(graph: OpGraph) -> BoolColumn:
    return np.array([names_parameter(name) for name in graph.buffers], dtype=bool)


def named_parameters(graph: OpGraph) -> Mapping[int, set[str]]:
    """By op id the parameters whose gradients a row names as buffers ``grad[NAME]``."""
    is_gradient = _is_gradient(graph)
    by_row: dict[int, set[str]] = {}
    if is_gradient.any():
        expected = is_gradient[graph.accesses.buffer]
        for op, buffer in zip(
            graph.accesses.op[expected].tolist(), graph.accesses.buffer[expected].tolist(), strict=True
        ):
            by_row.setdefault(op, set()).add(graph.buffers[buffer][len(_PREFIX) : -len(_SUFFIX)])
    return by_row
