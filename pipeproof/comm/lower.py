"""Lowering: from per-rank programs of a pipeline to the op graph of every global rank.

Four things are added to the programs: each transfer with its peer and the
wait for it, the slices and gathers of the ``partial`` transport, below each
compute operation the collectives that it will really issue, and at the end
the gradient reductions and the optimizer.

- A receive is posted just before the wait for it, and the wait stands just
  before the operation that uses the tensor (an earlier receive spins on a GPU
  and slows the compute beside it), or earlier where ``transport.recv_post``
  says so (``early_receives``). Where a rank uses what comes in another
  order than it is sent, receives are posted in the order of the sends.
- A send is posted right after its producer and never blocks it. A forward
  send is waited for before the backward of its micro-batch, which frees the
  activation; backward sends, and all sends of a program without backwards,
  are waited for at the end of the step.
- No transfer is made between two stages of one rank.

Replicas along every axis but ``pp`` run the same programs on the same shapes.
A large plan is therefore lowered for one of them only (*folded*): each rank
of its graph stands for all that share its ``pp`` coordinate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.comm.early_receives import Posts, early_receives
from pipeproof.comm.generated import UNFIT_SCHEDULE, plan_schedule
from pipeproof.comm.mesh import Mesh
from pipeproof.comm.rank_blocks import DATA_AXES, RankBlocks, tensors_of
from pipeproof.comm.rank_writer import RankWriter
from pipeproof.comm.receive_order import receives_as_sent, used_as_sent
from pipeproof.comm.shared_weights import SharedWeights, shared_weights
from pipeproof.comm.times import link_times, with_times
from pipeproof.schedule.blocks import Blocks
from pipeproof.schedule.columns import NONE, Columns, IntColumn, columns_of, unit_of
from pipeproof.schedule.formats.foreign import ForeignSchedule
from pipeproof.schedule.ops import Op
from pipeproof.schedule.optable import Group, OpGraph, TensorSpec
from pipeproof.schedule.programs import Programs, Schedule, stages_of
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import (
    Boundary,
    Edge,
    MicroBatchSize,
    describe_boundaries,
    describe_boundary,
    unit_sizes,
)
from pipeproof.stages.describe.layers import Layer, Parameter, describe_gpt
from pipeproof.stages.describe.partition import stage_layers

if TYPE_CHECKING:  # most plans need none of what times links
    from pipeproof.comm.links.times import LinkTimes

FOLD_ABOVE = 100_000
"""Operations of all ranks above which replicas are lowered and checked once."""

MAX_OPERATIONS = 5_000_000
"""Most operations of a step, replicas counted once: about 400 bytes of memory each."""

_MOST_OPS_PER_STAGE = 15
"""Operations of one micro-batch on one stage without its collectives: two computes, two of each kind of transfer
with its wait, slice and gather, and one to spare for the step's end."""

TOO_LARGE = RuleDoc(
    code="PP116",
    title="the plan has more operations than this release holds in memory",
    severity="error",
    explanation=(
        "Every operation of a step is a row of the op table. Replicas along tp, cp, ep and dp run the same programs "
        "and are counted once; what counts is the number of stages, micro-batches and collectives inside layers."
    ),
    wrong="schedule: {num_micro_batches: 1000000}",
    right="schedule: {num_micro_batches: 8}",
)
LOWERING_CODES = (TOO_LARGE, UNFIT_SCHEDULE)


@dataclass(frozen=True)
class LoweredPlan:
    """A plan with everything that is derived from it: one object for rules, simulator and executor.

    ``spec`` has given times: those of ``cost.analytic`` are computed.
    ``boundary`` is the activation of the model; ``edges`` has what crosses
    between each two stages. ``schedule`` has the computations of each
    pipeline rank; ``graph`` everything. ``canonical`` is the graph that the
    digest is of: folded, whether ``graph`` is or not. ``foreign`` is the
    schedule where it was not generated. ``receives`` says by pipeline rank
    where inputs are not received in turn just before their use; see
    ``receive_order`` and ``early_receives``. ``links`` has the times of
    messages and collectives; without, each message takes ``p2p_latency_us``
    and collectives nothing.
    """

    spec: PlanSpec
    mesh: Mesh
    layers: tuple[Layer, ...]
    stages: tuple[tuple[str, ...], ...]
    boundary: Boundary
    edges: tuple[Edge, ...]
    schedule: Schedule
    graph: OpGraph
    canonical: OpGraph
    foreign: ForeignSchedule | None = None
    receives: tuple[Mapping[int, tuple[Op, ...]], ...] = ()
    links: LinkTimes | None = None

    @property
    def folded(self) -> bool:
        """Whether the ranks of ``graph`` stand for more than themselves."""
        return self.graph.num_ranks < self.mesh.num_ranks

    @property
    def programs(self) -> Programs:
        """The computations of each pipeline rank, in order."""
        return self.schedule.programs

    @property
    def num_splits(self) -> int:
        """Pieces into which sequences are cut; 0 where they are not."""
        num_splits = self.spec.schedule.num_sequence_splits
        return num_splits if num_splits > 1 else 0

    @property
    def num_units(self) -> int:
        """Units of work of a step: micro-batches, or their splits."""
        return self.spec.schedule.num_micro_batches * self.spec.schedule.num_sequence_splits

    @cached_property
    def sizes(self) -> tuple[MicroBatchSize, ...]:
        """The distinct sizes of units of work."""
        return unit_sizes(self.spec)[0]

    @cached_property
    def size_of_unit(self) -> tuple[int, ...]:
        """Which of ``sizes`` each unit of work has; empty where there is one for all."""
        return unit_sizes(self.spec)[1]

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The pipeline ranks that hold each stage: one, or one for each copy."""
        holders: list[list[int]] = [[] for _ in range(self.spec.num_stages)]
        for rank, stages in enumerate(stages_of(self.programs)):
            for stage in stages:
                holders[stage].append(rank)
        return tuple(map(tuple, holders))

    @cached_property
    def shared_weights(self) -> SharedWeights:
        """The weights that several layers compute with, and who holds them."""
        return shared_weights([self.layers_of(stage) for stage in range(len(self.stages))], self.holders)

    def weights_of(self, stage: int, pp: int) -> tuple[Parameter, ...]:
        """The weights that a pipeline rank holds, reduces and updates with a stage, in the model's order."""
        return self.shared_weights.of_stage(stage, self.layers_of(stage), pp)

    @property
    def has_copies(self) -> bool:
        """Whether a stage stands on several pipeline ranks, which share out the units of work."""
        return any(len(ranks) > 1 for ranks in self.holders)

    @cached_property
    def owner(self) -> IntColumn:
        """The pipeline rank that computes each unit of work of each stage, shape [stages, units].

        That is the first holder of the stage for a unit that none computes.
        """
        owner = np.array([ranks[0] if ranks else NONE for ranks in self.holders], dtype=np.int64)
        owner = np.repeat(owner[:, None], self.num_units, axis=1)
        if self.has_copies:
            for rank, program in reversed([*enumerate(self.programs)]):
                for op in program:
                    owner[op.stage, unit_of(op, self.num_splits)] = rank
        return owner

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a global rank computes, in order of their numbers."""
        return stages_of(self.programs)[self.mesh.coords(rank)["pp"]]

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The global ranks that hold a stage, in order."""
        return self._ranks_at(self.holders[stage])

    def ranks_of_weight(self, stage: int, name: str) -> tuple[int, ...]:
        """The global ranks that hold a weight of a stage, in order: other stages may use it, too."""
        return self._ranks_at(self.shared_weights.places(stage, name))

    def _ranks_at(self, places: Sequence[int]) -> tuple[int, ...]:
        """The global ranks of some pipeline ranks, in order."""
        return tuple(rank for rank in range(self.mesh.num_ranks) if self.mesh.coords(rank)["pp"] in places)

    @cached_property
    def layer_by_name(self) -> Mapping[str, Layer]:
        """The described layers by name."""
        return {layer.name: layer for layer in self.layers}

    def layers_of(self, stage: int) -> tuple[Layer, ...]:
        """The described layers of one stage, in execution order."""
        return tuple(self.layer_by_name[name] for name in self.stages[stage])

    def with_graph(self, graph: OpGraph) -> LoweredPlan:
        """The same plan with another graph in place of the one that was lowered."""
        own = self.graph
        if (graph.tensors, graph.groups) == (own.tensors, own.groups) and graph.columns.equals(own.columns):
            return replace(self, graph=graph)
        return replace(self, graph=graph, canonical=graph)

    def unfolded(self) -> LoweredPlan:
        """The same plan with a graph in which every rank stands for itself."""
        return replace(self, graph=_graph(self, folded=False)) if self.folded else self


def mesh_of(plan: PlanSpec) -> Mesh:
    """The device mesh that ``topology`` describes."""
    topology = plan.topology
    return Mesh(topology.order, tuple(getattr(topology, axis) for axis in topology.order))


def lower(plan: PlanSpec, *, boundary: Boundary | None = None, foreign: ForeignSchedule | None = None) -> LoweredPlan:
    """Derive layers, stages, programs and the op graph of a plan. Linear in operations.

    ``boundary`` puts another tensor in place of what crosses between the
    stages, to check and simulate what a model of one's own would send.
    ``foreign`` is the schedule where the plan names one that is not generated.

    Raises:
        BadPlanAtError: the layers cannot be cut onto the stages, the schedule
            does not exist for these sizes, or there are more than
            ``MAX_OPERATIONS``.
    """
    mesh = mesh_of(plan)
    layers = describe_gpt(plan)
    _require_moderate_size(plan, layers)
    stages = stage_layers(plan)
    links, plan = link_times(plan), with_times(plan)
    schedule = foreign.schedule if foreign is not None else plan_schedule(plan)
    edges = describe_boundaries(plan) if boundary is None else (Edge(((boundary,),)),) * (plan.num_stages - 1)
    own = boundary or describe_boundary(plan)
    nothing = OpGraph(Blocks().expand(), (), ())
    lowered = LoweredPlan(plan, mesh, layers, stages, own, edges, schedule, nothing, nothing, foreign, links=links)
    _require_own_updates(lowered)
    is_early = plan.transport.recv_post != "just_in_time"
    if is_early:
        lowered = replace(lowered, receives=_received_early(lowered))
    canonical = _graph(lowered, folded=True)
    if not is_early and (foreign is None or foreign.computes_only) and not used_as_sent(canonical):
        lowered = replace(lowered, receives=receives_as_sent(lowered))
        canonical = _graph(lowered, folded=True)
    lowered = replace(lowered, graph=canonical, canonical=canonical)
    num_replicas = mesh.num_ranks // canonical.num_ranks
    return lowered if canonical.num_ops * num_replicas > FOLD_ABOVE else lowered.unfolded()


def _received_early(plan: LoweredPlan) -> tuple[Posts, ...]:
    """What each pipeline rank receives where, as ``transport.recv_post`` says."""
    recv_post = plan.spec.transport.recv_post
    if plan.foreign is not None and not plan.foreign.computes_only:
        message = f"`transport.recv_post: {recv_post}` moves no receives of a schedule that has its own communication"
        mend = "remove recv_post, or move them in the file"
        raise BadPlanAtError(Finding("PP106", Severity.ERROR, message, help=mend), ("transport", "recv_post"))
    return early_receives(plan, 1 if recv_post == "one_ahead" else None)


def _require_own_updates(plan: LoweredPlan) -> None:
    """Refuse to clip where a file says what is summed and when the optimizer steps: it says nothing of a norm."""
    if plan.spec.run.clip_norm is not None and plan.foreign is not None and not plan.foreign.computes_only:
        message = "`run.clip_norm` is given, and the schedule has its own communication, in which no norm is summed"
        mend = "remove clip_norm, or take a schedule of computations only"
        raise BadPlanAtError(Finding("PP106", Severity.ERROR, message, help=mend), ("run", "clip_norm"))


def _require_moderate_size(plan: PlanSpec, layers: Sequence[Layer]) -> None:
    """Refuse before the work begins what memory could not hold at its end."""
    per_micro_batch = _MOST_OPS_PER_STAGE * plan.num_stages
    per_micro_batch += sum(len(layer.forward_collectives) + len(layer.backward_collectives) for layer in layers)
    most = plan.schedule.num_micro_batches * per_micro_batch
    if most > MAX_OPERATIONS:
        raise BadPlanAtError(
            Finding(
                TOO_LARGE.code,
                Severity.ERROR,
                f"{plan.num_stages} stages and {plan.schedule.num_micro_batches} micro-batches make up to {most:,} "
                f"operations in a step, more than the {MAX_OPERATIONS:,} that this release holds",
                help="check the plan with fewer micro-batches: after warm-up a schedule repeats itself",
            ),
            ("schedule", "num_micro_batches"),
        )


def _graph(plan: LoweredPlan, *, folded: bool) -> OpGraph:
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


def _copy_groups(plan: LoweredPlan, ranks: Sequence[int]) -> dict[tuple[tuple[int, ...], int], tuple[int, ...]]:
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
    plan: LoweredPlan,
    ranks: Sequence[int],
    graph_rank: Mapping[int, int],
    axes: Sequence[str],
    group_of: Mapping[tuple[str, int], int],
    copies_of: Mapping[tuple[tuple[int, ...], int], int],
    *,
    fold_tp: bool,
) -> tuple[Columns, tuple[TensorSpec, ...]]:
    tensors = tensors_of(plan.edges, plan.layers)
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


def _fold_axes(plan: LoweredPlan) -> tuple[str, ...]:
    """Axes along which all ranks do alike: where a boundary changes its layout, TP ranks do not."""
    varies = any(boundary.changes_layout for edge in plan.edges for members in edge.variants for boundary in members)
    return tuple(axis for axis in plan.mesh.axes if axis != "pp" and not (axis == "tp" and varies))


_GROUP_AXES = ("tp", "cp", "ep", "dp")
"""The order in which groups are made."""


def _reduce_axes(plan: LoweredPlan) -> tuple[str, ...]:
    """Axes over which gradients are reduced, in order: first where they are partial, then the data axes."""
    partial = {axis for layer in plan.layers for parameter in layer.parameters for axis in parameter.partial_over}
    data = {axis for axis in DATA_AXES if plan.mesh.size(axis) > 1}
    return tuple(axis for axis in _GROUP_AXES if axis in partial | data)
