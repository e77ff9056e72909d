"""Lowering of a plan's context to its op graph, and the graph in which each rank of the mesh has rows of its own.

Replicas along every axis but ``pp`` run the same programs on the same shapes. A plan is therefore lowered for one of
them (*folded*): each rank of the graph represents all ranks that share its coordinate on ``pp``. Only along ``tp``
may ranks differ, if a boundary changes its layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from pipeproof.comm.plan_context import PlanContext, tensors_of
from pipeproof.comm.rank_blocks import RankBlocks, Work
from pipeproof.comm.step_end_rows import DATA_AXES, num_loads
from pipeproof.schedule.columns import ANY, ANY_OTHER, NONE, Blocks, IntColumn, Row, columns_of
from pipeproof.schedule.op_table import Group, OpGraph
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.specs.schedule import Half
from pipeproof.stages.describe.layer import Parameter

# --- The whole program of one rank, written with blocks around its computations ---


class RankWriter:
    """Writes the blocks of one rank, each when it is first used.

    ``posts`` has, for some indices of the rank's program, the computations whose
    inputs are received before it; otherwise only its own is. ``alternation`` is the
    cycle in which overlapped computations alternate; without it each of them is
    whole. ``reduce_axes`` are the axes of gradient sums.
    """

    def __init__(
        self,
        rank: RankBlocks,
        blocks: Blocks,
        posts: Mapping[int, Sequence[Op]],
        reduce_axes: Sequence[str],
        alternation: Sequence[Half] | None = None,
    ) -> None:
        self._rank, self._blocks, self._posts, self._alternation = rank, blocks, posts, alternation
        self._reduce_axes = reduce_axes
        self._single: dict[Work, tuple[int, int | None]] = {}
        self._others: dict[tuple[tuple[Work, ...], bool], int] = {}
        self._receives: dict[Work, int] = {}
        self._waits: dict[Work, int | None] = {}
        self._alike: dict[tuple[OpKind, int], Work] = {}
        """The keys of a stage's computations that are the same for all work items."""
        self._late: list[tuple[int, int, int]] = []

    def write(self, rows: Sequence[Row] | None) -> None:
        """Append the rank's program.

        ``rows`` are its computations if they have locations in a file, or
        overlap: then the two are in one batch.
        """
        step_end = self._rank.step_end
        ready_behind = step_end.ready_behind(self._reduce_axes)

        def sum_what_is_ready(op: Op) -> None:
            if stages := ready_behind.get(op):
                self._blocks.use(self._blocks.add(list(step_end.reduce_concurrently(op, stages, self._reduce_axes))))

        if rows is None and not self._posts:
            for op in self._rank.program:
                self._use_one(op)
                sum_what_is_ready(op)
        else:
            position = 0
            for computations in _overlapping(rows if rows is not None else map(Row, self._rank.program)):
                self._use(computations, position)
                position += len(computations)
                for row in computations:
                    sum_what_is_ready(row.op)
        for block, work_item, origin in self._late:  # sends that are waited for at the end of the step, in their order
            self._blocks.use(block, work_item, origin)
        for update in step_end.updates(self._reduce_axes):
            self._blocks.use(self._blocks.add(update))
        self._blocks.end_rank()

    def _use_one(self, op: Op, origin: int = NONE) -> None:
        """One computation, with all rows around it."""
        work_item, work = self._work(op)
        blocks = self._single.get(work)
        if blocks is None:
            blocks = self._single[work] = self._blocks.add(list(self._rows([work]))), self._wait_block(work)
        block, wait = blocks
        self._blocks.use(block, work_item, origin)
        if wait is not None:
            self._late.append((wait, work_item, origin))

    def _use(self, rows: Sequence[Row], position: int) -> None:
        """One computation, or two that overlap, from an index of the program on."""
        posts = [self._posts.get(position + i) for i in range(len(rows))]
        if len(rows) == 1 and posts[0] is None:
            self._use_one(rows[0].op, rows[0].origin)
            return
        work_items, works = zip(*(self._work(row.op) for row in rows), strict=True)
        is_posted = any(users is not None for users in posts)
        if is_posted:
            for users, row in zip(posts, rows, strict=True):
                for computed in (row.op,) if users is None else users:
                    self._receive(computed, row.origin)
        block = self._others.get((works, is_posted))
        if block is None:
            block = self._blocks.add(list(self._rows(works, received=is_posted)))
            self._others[works, is_posted] = block
        self._blocks.use(
            block, work_items[0], rows[0].origin, other=work_items[1] if len(rows) > 1 else NONE, batch=rows[0].batch
        )
        for work, row, work_item in zip(works, rows, work_items, strict=True):
            wait = self._wait_block(work)
            if wait is not None:
                self._late.append((wait, work_item, row.origin))

    def _receive(self, computed: Op, origin: int) -> None:
        """Post the receives of a computation's inputs, if there are any."""
        work_item, work = self._work(computed)
        block = self._receives.get(work)
        if block is None:
            block = self._receives[work] = self._blocks.add(list(self._rank.receive(work, ANY)))
        self._blocks.use(block, work_item, origin)

    def _work(self, op: Op) -> tuple[int, Work]:
        """The work item of a computation, and the key of the rows around it."""
        work_item = self._rank.work_item(op)
        if self._rank.work_items_differ:
            return work_item, self._rank.work(op, work_item)
        work = self._alike.get((op.kind, op.stage))
        if work is None:
            work = self._alike[op.kind, op.stage] = self._rank.work(op, 0)
        return work_item, work

    def _rows(self, works: Sequence[Work], *, received: bool = False) -> Iterator[Row]:
        batches = (ANY, ANY_OTHER)[: len(works)]
        before = self._rank.ready if received else self._rank.before
        for work, batch in zip(works, batches, strict=True):
            yield from before(work, batch)
        yield from self._rank.gather_weights(works)
        if self._alternation is not None and len(works) > 1:
            yield from self._rank.alternate(works, batches, self._alternation)
        else:
            for work, batch in zip(works, batches, strict=True):
                yield from self._rank.compute(work, batch)
        yield from self._rank.release_weights(works)
        for work, batch in zip(works, batches, strict=True):
            yield from self._rank.after(work, batch)
        for work, batch in zip(works, batches, strict=True):
            yield from self._rank.reduce_added(work, batch, self._reduce_axes)

    def _wait_block(self, work: Work) -> int | None:
        if work not in self._waits:
            late = [send for send, _ in self._rank.sends_of(work, ANY) if self._rank.waits_late(send)]
            rows = [row for send in late for row in self._rank.wait(send, work.variant)]
            self._waits[work] = self._blocks.add(rows) if rows else None
        return self._waits[work]


def _overlapping(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Single computations and overlapping pairs."""
    pair: list[Row] = []
    for row in rows:
        pair.append(row)
        if row.batch == NONE or len(pair) > 1:
            yield pair
            pair = []


_GROUP_AXES = ("tp", "cp", "ep", "dp")
"""The order in which groups are made."""


def lower_context(plan: PlanContext) -> OpGraph:
    """The folded op graph of a plan. Linear in operations."""
    fold = _fold_axes(plan)
    groups = _Groups.of(plan, fold)
    tensors = tensors_of(plan.edges, plan.layers, plan.spec.transport, num_loads(plan.spec), plan.direct)
    reduce_axes = _reduce_axes(plan)
    blocks, foreign_rows = Blocks(num_splits=plan.num_splits), []
    for index, rank in enumerate(groups.ranks):
        coords = plan.mesh.coords(rank)
        writer = RankBlocks(
            plan, coords, tensors, groups.by_axis[index], groups.of_copies[index], groups.index, fold_tp="tp" in fold
        )
        foreign = plan.foreign
        if foreign is not None and not foreign.computes_only:
            foreign_rows.append(list(writer.given(foreign.rows[coords["pp"]], reduce_axes)))
            continue
        own = plan.schedule.rows(coords["pp"]) if plan.schedule.pairs else None
        posts = plan.receives[coords["pp"]] if plan.receives else {}
        rows = own if foreign is None else foreign.rows[coords["pp"]]
        RankWriter(writer, blocks, posts, reduce_axes, plan.spec.alternation).write(rows)
    columns = columns_of(foreign_rows, plan.num_splits) if foreign_rows else blocks.expand()
    return OpGraph(columns, tensors.specs, groups.groups, groups.ranks)


def unfold(plan: PlanContext, graph: OpGraph) -> OpGraph:
    """The graph of every rank of the mesh, from the folded one of the same plan.

    A rank has the rows of the rank that represents it, with its own peers and groups, and its own ranges if they
    move along ``tp``.
    """
    fold = _fold_axes(plan)
    before, after = _Groups.of(plan, fold), _Groups.of(plan, ())
    source = [before.index[_represented_by(plan, rank, fold)] for rank in after.ranks]
    length = np.diff(graph.offsets)[source]
    offsets = np.concatenate([[0], np.cumsum(length)])
    rows = np.arange(offsets[-1]) + np.repeat(graph.offsets[source] - offsets[:-1], length)
    values = {name: column[rows] for name, column in graph.columns.values.items()}
    rank = np.repeat(np.arange(len(source)), length)
    for name, numbers in (("peer", _peers(plan, before, fold)), ("group", _renumbered(before, after, source))):
        values[name] = np.where(values[name] == NONE, NONE, numbers[rank, values[name]])
    tp = np.array([plan.mesh.coords(each)["tp"] for each in after.ranks])
    moved = values["shift"] * tp[rank]
    values |= {"start": values["start"] + moved, "stop": values["stop"] + moved, "shift": np.zeros_like(moved)}
    return OpGraph(graph.columns.repeated(values, source, offsets), graph.tensors, after.groups, after.ranks)


def _represented_by(plan: PlanContext, rank: int, fold: Sequence[str]) -> int:
    return plan.mesh.rank(plan.mesh.coords(rank) | dict.fromkeys(fold, 0))


def _peers(plan: PlanContext, before: _Groups, fold: Sequence[str]) -> IntColumn:
    """By rank of the mesh and rank of the folded graph: the peer on the first rank's replica."""
    mesh = plan.mesh
    strides = {axis: mesh.rank(dict.fromkeys(mesh.axes, 0) | {axis: 1}) if mesh.size(axis) > 1 else 0 for axis in fold}
    own = [sum(mesh.coords(rank)[axis] * stride for axis, stride in strides.items()) for rank in range(mesh.num_ranks)]
    return np.add.outer(np.array(own, dtype=np.int64), np.array(before.ranks, dtype=np.int64))


def _renumbered(before: _Groups, after: _Groups, source: Sequence[int]) -> IntColumn:
    """By rank of the mesh and group of the folded graph: the number of that rank's own group."""
    numbers = np.full((len(source), max(1, len(before.groups))), NONE, dtype=np.int64)
    for rank, folded in enumerate(source):
        for axis, group in before.by_axis[folded].items():
            numbers[rank, group] = after.by_axis[rank][axis]
        for holders, group in before.of_copies[folded].items():
            numbers[rank, group] = after.of_copies[rank][holders]
    return numbers


@dataclass(frozen=True)
class _Groups:
    """The ranks of a graph and their groups.

    ``ranks`` are global ranks, ``index`` has their numbers in the graph. ``by_axis`` has for each of them its groups by
    axis, ``of_copies`` the groups with other holders of its stages or weights, by their pipeline ranks.
    """

    ranks: tuple[int, ...]
    index: Mapping[int, int]
    groups: tuple[Group, ...]
    by_axis: tuple[Mapping[str, int], ...]
    of_copies: tuple[Mapping[tuple[int, ...], int], ...]

    @classmethod
    def of(cls, plan: PlanContext, fold: Sequence[str]) -> _Groups:
        mesh = plan.mesh
        ranks = mesh.ranks(folded=fold)
        index = {rank: number for number, rank in enumerate(ranks)}
        groups: list[Group] = []
        by_axis: list[dict[str, int]] = [{} for _ in ranks]
        for axis in _GROUP_AXES:
            for group in mesh.groups(axis, folded=fold) if mesh.size(axis) > 1 else ():
                members = tuple(index[rank] for rank in group.ranks)
                for member in members:
                    by_axis[member][axis] = len(groups)
                groups.append(Group(axis, members, copies=mesh.size(axis) if axis in fold else 1))
        of_copies: list[dict[tuple[int, ...], int]] = [{} for _ in ranks]
        numbers: dict[tuple[int, ...], int] = {}
        for holders in _copy_holders(plan):
            for number, rank in enumerate(ranks):
                coords = mesh.coords(rank)
                if coords["pp"] in holders:
                    members = tuple(index[mesh.rank({**coords, "pp": pp})] for pp in holders)
                    if members not in numbers:
                        numbers[members] = len(groups)
                        groups.append(Group("pp", members))
                    of_copies[number][holders] = numbers[members]
        return cls(ranks, index, tuple(groups), tuple(by_axis), tuple(of_copies))


def _copy_holders(plan: PlanContext) -> list[tuple[int, ...]]:
    """The pipeline ranks that sum something together: copies of weights, or the norm to which gradients are clipped."""
    everyone = tuple(range(plan.mesh.size("pp")))
    norm = [everyone] if plan.spec.run.clip_norm is not None and len(everyone) > 1 else []
    return [*plan.shared_weights.groups(), *norm]


def _fold_axes(plan: PlanContext) -> tuple[str, ...]:
    """Axes along which all ranks run the same rows; not TP if a boundary changes its layout."""
    varies = any(boundary.changes_layout for edge in plan.edges for members in edge.variants for boundary in members)
    return tuple(axis for axis in plan.mesh.axes if axis != "pp" and not (axis == "tp" and varies))


def _reduce_axes(plan: PlanContext) -> tuple[str, ...]:
    """Axes over which gradients are reduced, in order: first those with partial gradients, then the data axes."""
    partial = {axis for layer in plan.layers for parameter in layer.parameters for axis in parameter.partial_over}
    data = {axis for axis in DATA_AXES if plan.mesh.size(axis) > 1}
    return tuple(axis for axis in _GROUP_AXES if axis in partial | data)


@dataclass(frozen=True, kw_only=True)
class LoweredPlan(PlanContext):
    """A plan with everything that is derived from it: one object for rules, simulator and executor.

    ``graph`` has all operations. The digest is of ``canonical``: the folded
    graph, even if ``graph`` is unfolded.
    """

    graph: OpGraph
    canonical: OpGraph

    @classmethod
    def of(cls, context: PlanContext, graph: OpGraph) -> LoweredPlan:
        """The plan of a context with its folded graph."""
        values = {field.name: getattr(context, field.name) for field in fields(PlanContext)}
        return cls(**values, graph=graph, canonical=graph)

    @property
    def folded(self) -> bool:
        """True if a rank of ``graph`` represents several ranks of the mesh."""
        return self.graph.num_ranks < self.mesh.num_ranks

    def with_graph(self, graph: OpGraph) -> LoweredPlan:
        """Return the same plan with ``graph`` in place of the lowered one."""
        lowered = self.graph
        if (graph.tensors, graph.groups) == (lowered.tensors, lowered.groups) and graph.columns.equals(lowered.columns):
            return replace(self, graph=graph)
        return replace(self, graph=graph, canonical=graph)

    def unfolded(self) -> LoweredPlan:
        """Return the same plan with a graph in which every rank represents itself."""
        return replace(self, graph=unfold(self, self.graph)) if self.folded else self


def index_of(plan: LoweredPlan, parameter: Parameter, rank: int) -> tuple[tuple[int, int], ...]:
    """The half-open range of the whole parameter that one rank holds, per dim."""
    index = [(0, size) for size in parameter.shape]
    coords = plan.mesh.coords(rank)
    for axis, placed in (("tp", parameter.tp), ("ep", parameter.ep)):
        if placed.dim is not None:
            share, coord = parameter.shape[placed.dim] // plan.mesh.size(axis), coords[axis]
            index[placed.dim] = coord * share, (coord + 1) * share
    return tuple(index)


def stage_weights(plan: LoweredPlan) -> Iterator[tuple[int, Parameter]]:
    """Yield each weight of a plan with its stage, in the order of stages and layers."""
    for stage in range(len(plan.stages)):
        for layer in plan.layers_of(stage):
            for parameter in layer.parameters:
                yield stage, parameter
