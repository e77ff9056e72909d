"""Op graph of a plan: the rows of every rank, or of one replica that represents all (*folded*)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeproof.comm.boundary_tensors import tensors_of
from pipeproof.comm.plan_context import PlanContext
from pipeproof.comm.rank_blocks import RankBlocks
from pipeproof.comm.rank_writer import RankWriter
from pipeproof.comm.step_end_rows import DATA_AXES, num_loads
from pipeproof.schedule.blocks import Blocks
from pipeproof.schedule.columns import Columns, columns_of
from pipeproof.schedule.op_table import Group, OpGraph, TensorSpec


def graph_of(plan: PlanContext, *, folded: bool) -> OpGraph:
    """The op graph of every global rank, or with replicas along the folded axes counted once."""
    mesh = plan.mesh
    fold = _fold_axes(plan) if folded else ()
    ranks = [rank for rank in range(mesh.num_ranks) if all(mesh.coords(rank)[axis] == 0 for axis in fold)]
    graph_rank = {rank: place for place, rank in enumerate(ranks)}
    axes = [axis for axis in _GROUP_AXES if mesh.size(axis) > 1]
    groups = tuple(
        Group(axis, members, copies=mesh.size(axis) if axis in fold else 1)
        for axis in axes
        for group in mesh.groups(axis)
        if (members := tuple(graph_rank[rank] for rank in group.ranks if rank in graph_rank))
    )
    group_of = {(group.axis, rank): i for i, group in enumerate(groups) for rank in group.ranks}
    copies = _copy_groups(plan, ranks)
    numbers = {members: len(groups) + i for i, members in enumerate(dict.fromkeys(copies.values()))}
    groups += tuple(Group("pp", tuple(graph_rank[rank] for rank in members)) for members in numbers)
    copies_of = {place: numbers[members] for place, members in copies.items()}
    columns, tensors = _columns(plan, ranks, graph_rank, axes, group_of, copies_of, fold_tp="tp" in fold)
    return OpGraph(columns, tensors, groups, tuple(ranks))


def _copy_groups(plan: PlanContext, ranks: Sequence[int]) -> dict[tuple[tuple[int, ...], int], tuple[int, ...]]:
    """For each (pipeline ranks that hold copies of something, one of its global ranks): the members, in order."""
    members: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
    everyone = tuple(range(plan.mesh.size("pp")))  # sums the norm to which gradients are clipped
    norm = [everyone] if plan.spec.run.clip_norm is not None and len(everyone) > 1 else []
    for holders in (*plan.shared_weights.groups(), *norm):
        for rank in ranks:
            coords = plan.mesh.coords(rank)
            if coords["pp"] in holders:
                members[holders, rank] = tuple(plan.mesh.rank({**coords, "pp": pp}) for pp in holders)
    return members


def _columns(
    plan: PlanContext,
    ranks: Sequence[int],
    graph_rank: Mapping[int, int],
    axes: Sequence[str],
    group_of: Mapping[tuple[str, int], int],
    copies_of: Mapping[tuple[tuple[int, ...], int], int],
    *,
    fold_tp: bool,
) -> tuple[Columns, tuple[TensorSpec, ...]]:
    tensors = tensors_of(plan.edges, plan.layers, num_loads(plan.spec))
    reduce_axes = _reduce_axes(plan)
    blocks, given = Blocks(num_splits=plan.num_splits), []
    for rank in ranks:
        coords = plan.mesh.coords(rank)
        groups = {axis: group_of[axis, graph_rank[rank]] for axis in axes}
        copies = {holders: group for (holders, member), group in copies_of.items() if member == rank}
        lowering = RankBlocks(plan, coords, tensors, groups, copies, graph_rank, fold_tp=fold_tp)
        foreign = plan.foreign
        if foreign is not None and not foreign.computes_only:
            given.append(list(lowering.given(foreign.rows[coords["pp"]], reduce_axes)))
            continue
        own = plan.schedule.rows(coords["pp"]) if plan.schedule.pairs else None
        posts = plan.receives[coords["pp"]] if plan.receives else {}
        RankWriter(lowering, blocks, posts).write(own if foreign is None else foreign.rows[coords["pp"]], reduce_axes)
    return (columns_of(given, plan.num_splits) if given else blocks.expand()), tensors.specs


def _fold_axes(plan: PlanContext) -> tuple[str, ...]:
    """Axes along which all ranks run alike; TP is not one of them if a boundary changes its layout."""
    varies = any(boundary.changes_layout for edge in plan.edges for members in edge.variants for boundary in members)
    return tuple(axis for axis in plan.mesh.axes if axis != "pp" and not (axis == "tp" and varies))


_GROUP_AXES = ("tp", "cp", "ep", "dp")
"""The order in which groups are made."""


def _reduce_axes(plan: PlanContext) -> tuple[str, ...]:
    """Axes over which gradients are reduced, in order: first those with partial gradients, then the data axes."""
    partial = {axis for layer in plan.layers for parameter in layer.parameters for axis in parameter.partial_over}
    data = {axis for axis in DATA_AXES if plan.mesh.size(axis) > 1}
    return tuple(axis for axis in _GROUP_AXES if axis in partial | data)
