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

from collections.abc import Sequence
from dataclasses import replace

from pipeproof.comm.early_receives import Posts, early_receives
from pipeproof.comm.generated import UNFIT_SCHEDULE, plan_schedule
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.comm.mesh import Mesh
from pipeproof.comm.op_graph import graph_of
from pipeproof.comm.receive_order import receives_as_sent, used_as_sent
from pipeproof.comm.step_end import require_own_updates
from pipeproof.comm.times import link_times, with_times
from pipeproof.schedule.blocks import Blocks
from pipeproof.schedule.formats.foreign import ForeignSchedule
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import Boundary, Edge, describe_boundary
from pipeproof.stages.describe.edges import describe_boundaries
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layers import Collective, Layer, backward_calls, weight_calls
from pipeproof.stages.describe.own_layers import describe_own, own_boundary
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
LOWERING_CODES = (TOO_LARGE, UNFIT_SCHEDULE)


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
    has_own = plan.own_layers is not None
    layers = describe_own(plan) if has_own else describe_gpt(plan)
    _require_moderate_size(plan, layers)
    stages = stage_layers(plan)
    links, plan = link_times(plan), with_times(plan)
    schedule = foreign.schedule if foreign is not None else plan_schedule(plan)
    edges = describe_boundaries(plan) if boundary is None else (Edge(((boundary,),)),) * (plan.num_stages - 1)
    own = boundary or (own_boundary(plan) if has_own else describe_boundary(plan))
    nothing = OpGraph(Blocks().expand(), (), ())
    lowered = LoweredPlan(plan, mesh, layers, stages, own, edges, schedule, nothing, nothing, foreign, links=links)
    require_own_updates(lowered)
    is_early = plan.transport.recv_post != "just_in_time"
    if is_early:
        lowered = replace(lowered, receives=_received_early(lowered))
    canonical = graph_of(lowered, folded=True)
    if not is_early and (foreign is None or foreign.computes_only) and not used_as_sent(canonical):
        lowered = replace(lowered, receives=receives_as_sent(lowered))
        canonical = graph_of(lowered, folded=True)
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


def _calls(plan: PlanSpec, layer: Layer) -> tuple[tuple[Collective, ...], ...]:
    """What a layer issues for one micro-batch: forward, backward and for the gradients of its weights."""
    return layer.forward_collectives, backward_calls(plan, layer), weight_calls(plan, layer)


def _require_moderate_size(plan: PlanSpec, layers: Sequence[Layer]) -> None:
    """Refuse before the work begins what memory could not hold at its end."""
    per_micro_batch = _MOST_OPS_PER_STAGE * plan.num_stages
    per_micro_batch += sum(len(calls) for layer in layers for calls in _calls(plan, layer))
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
