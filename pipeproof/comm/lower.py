"""Lowering: from per-rank programs of a pipeline to the op graph of every global rank.

Four things are added to the programs: each transfer with its peer and the
wait for it, the slices and gathers of the ``partial`` transport, below each
compute operation the collectives that it will really issue, and at the end
the gradient reductions and the optimizer.

- A receive is posted just before the wait for it, and the wait stands just
  before the operation that uses the tensor (an earlier receive spins on a GPU
  and slows the compute beside it).
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

from pipeproof.comm.mesh import Mesh
from pipeproof.comm.rank_blocks import DATA_AXES, RankBlocks, tensors_of
from pipeproof.schedule import CHUNKED_GENERATORS, GENERATORS
from pipeproof.schedule.blocks import Blocks
from pipeproof.schedule.optable import Group, OpGraph
from pipeproof.schedule.programs import Programs, stages_of
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import Boundary, describe_boundary
from pipeproof.stages.describe.layers import Layer, describe_gpt
from pipeproof.stages.describe.partition import stage_layers

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
UNFIT_SCHEDULE = RuleDoc(
    code="PP140",
    title="the schedule does not exist for these sizes",
    severity="error",
    explanation=(
        "Some schedules need a number of micro-batches that fits the number of ranks: interleaved 1F1B takes as "
        "many micro-batches at a time through each chunk as there are ranks."
    ),
    wrong="topology: {pp: 2}\nschedule: {kind: interleaved, num_chunks: 2, num_micro_batches: 3}",
    right="topology: {pp: 2}\nschedule: {kind: interleaved, num_chunks: 2, num_micro_batches: 4}",
)
LOWERING_CODES = (TOO_LARGE, UNFIT_SCHEDULE)


@dataclass(frozen=True)
class LoweredPlan:
    """A plan with everything that is derived from it: one object for rules, simulator and executor.

    ``programs`` hold the compute operations of each pipeline rank; ``graph``
    everything. ``canonical`` is the graph that the digest is of: folded,
    whether ``graph`` is or not.
    """

    spec: PlanSpec
    mesh: Mesh
    layers: tuple[Layer, ...]
    stages: tuple[tuple[str, ...], ...]
    boundary: Boundary
    programs: Programs
    graph: OpGraph
    canonical: OpGraph

    @property
    def folded(self) -> bool:
        """Whether the ranks of ``graph`` stand for more than themselves."""
        return self.graph.num_ranks < self.mesh.num_ranks

    @cached_property
    def rank_of_stage(self) -> Mapping[int, int]:
        """The pipeline rank that computes each stage."""
        return {op.stage: rank for rank, program in enumerate(self.programs) for op in program}

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a global rank computes, in order of their numbers."""
        return stages_of(self.programs)[self.mesh.coords(rank)["pp"]]

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The global ranks that compute a stage, in order."""
        pp = self.rank_of_stage[stage]
        return tuple(rank for rank in range(self.mesh.num_ranks) if self.mesh.coords(rank)["pp"] == pp)

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


def lower(plan: PlanSpec, *, boundary: Boundary | None = None) -> LoweredPlan:
    """Derive layers, stages, programs and the op graph of a plan. Linear in operations.

    ``boundary`` puts another tensor in place of the model's own between the
    stages, to check and simulate what a model of one's own would send.

    Raises:
        BadPlanAtError: the layers cannot be cut onto the stages, the schedule
            does not exist for these sizes, or there are more than
            ``MAX_OPERATIONS``.
    """
    mesh = mesh_of(plan)
    layers = describe_gpt(plan)
    _require_moderate_size(plan, layers)
    stages = stage_layers(plan)
    programs = plan_programs(plan)
    nothing = OpGraph(Blocks().expand(), (), ())
    lowered = LoweredPlan(plan, mesh, layers, stages, boundary or describe_boundary(plan), programs, nothing, nothing)
    canonical = _graph(lowered, folded=True)
    lowered = replace(lowered, graph=canonical, canonical=canonical)
    num_replicas = mesh.num_ranks // plan.topology.pp
    return lowered if canonical.num_ops * num_replicas > FOLD_ABOVE else lowered.unfolded()


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


def plan_programs(plan: PlanSpec) -> Programs:
    """The compute programs of the plan's schedule, one per pipeline rank."""
    schedule, num_ranks = plan.schedule, plan.topology.pp
    try:
        if schedule.kind in CHUNKED_GENERATORS:
            return CHUNKED_GENERATORS[schedule.kind](num_ranks, schedule.num_micro_batches, schedule.num_chunks)
        return GENERATORS[schedule.kind](num_ranks, schedule.num_micro_batches)
    except ValueError as error:
        raise BadPlanAtError(
            Finding(UNFIT_SCHEDULE.code, Severity.ERROR, str(error)), ("schedule", "num_micro_batches")
        ) from error


def _graph(plan: LoweredPlan, *, folded: bool) -> OpGraph:
    """The op graph of one representative per pipeline rank, or of every global rank."""
    mesh = plan.mesh
    axes = [axis for axis in _GROUP_AXES if mesh.size(axis) > 1]
    if folded:
        num_pp = mesh.size("pp")
        ranks = [mesh.rank({axis: pp if axis == "pp" else 0 for axis in mesh.axes}) for pp in range(num_pp)]
        groups = tuple(Group(axis, (pp,), copies=mesh.size(axis)) for axis in axes for pp in range(num_pp))
    else:
        ranks = list(range(mesh.num_ranks))
        groups = tuple(group for axis in axes for group in mesh.groups(axis))
    tensors = tensors_of(plan.boundary, len(plan.stages))
    group_of = {(group.axis, rank): i for i, group in enumerate(groups) for rank in group.ranks}
    reduce_axes = _reduce_axes(plan)
    blocks = Blocks()
    for graph_rank, rank in enumerate(ranks):
        rows = RankBlocks(
            plan, mesh.coords(rank), tensors, {axis: group_of[axis, graph_rank] for axis in axes}, folded=folded
        )
        rows.write(blocks, reduce_axes)
    return OpGraph(blocks.expand(), tensors.specs, groups, tuple(ranks))


_GROUP_AXES = ("tp", "cp", "ep", "dp")
"""The order in which groups are made."""


def _reduce_axes(plan: LoweredPlan) -> tuple[str, ...]:
    """Axes over which gradients are reduced, in order: first where they are partial, then the data axes."""
    partial = {axis for layer in plan.layers for parameter in layer.parameters for axis in parameter.partial_over}
    data = {axis for axis in DATA_AXES if plan.mesh.size(axis) > 1}
    return tuple(axis for axis in _GROUP_AXES if axis in partial | data)
