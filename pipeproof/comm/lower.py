"""Lowering: from per-rank programs of a pipeline to the op graph of every global rank.

Four things are added to the programs: each transfer with its peer and the
wait for it, the slices and gathers of the ``partial`` transport, below each
compute operation the collectives that it will really issue, and at the end
the gradient reductions and the optimizer.

- A receive is posted just before the wait for it, and the wait is just
  before the operation that uses the tensor (an earlier receive spins on a GPU
  and slows concurrent compute). ``transport.recv_order`` moves receives
  earlier (``early_receives``). If a rank uses tensors in another order than
  they are sent, receives are posted in the order of the sends.
- A send is posted right after its producer and never blocks it. A forward
  send is waited for before the backward of its micro-batch, which frees the
  activation; backward sends, and all sends of a program without backwards,
  are waited for at the end of the step.
- With ``transport.shape_exchange: per_message`` a message with its shape goes before each tensor. Its receive is
  waited for before that of the tensor is posted, its send together with that of the tensor.
- No transfer is made between two stages of one rank.

``op_graph`` lowers one replica of the ranks, and unfolds the graph of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from pipeproof.comm.generated_schedule import UNFIT_SCHEDULE, generating_pair_time, plan_schedule
from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.comm.mesh import Mesh
from pipeproof.comm.op_graph import lower_context
from pipeproof.comm.plan_context import PlanContext
from pipeproof.comm.receive_order import Posts, early_receives, receives_as_sent, used_as_sent
from pipeproof.comm.size_limit import TOO_LARGE, require_moderate_size
from pipeproof.comm.step_end_rows import require_own_updates
from pipeproof.cost.plan_times import link_times, shares_of_parts, with_times
from pipeproof.diagnostics.finding import BadPlanAtError, BadPlanError, Finding, Severity
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.formats.read_schedule import (
    ForeignSchedule,
    custom_schedule,
    load_schedule_file,
    require_attributes_kept,
)
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import Boundary, Edge
from pipeproof.stages.describe.layer import Collective, Layer, backward_calls, weight_calls
from pipeproof.stages.describe.model_family import describe_boundaries, describe_boundary, describe_layers, stage_layers

FOLD_ABOVE = 100_000
"""Operations of all ranks above which replicas are checked once."""

LOWERING_CODES = (TOO_LARGE, UNFIT_SCHEDULE)


def mesh_of(plan: PlanSpec) -> Mesh:
    """The device mesh that ``topology`` describes."""
    topology = plan.topology
    return Mesh(topology.order, tuple(getattr(topology, axis) for axis in topology.order))


def lower(plan: PlanSpec, *, boundary: Boundary | None = None, foreign: ForeignSchedule | None = None) -> LoweredPlan:
    """Derive layers, stages, programs and the op graph of a plan. Linear in operations.

    ``boundary`` replaces the tensor that crosses between the stages, to check
    and simulate the messages of a user's model. ``foreign`` is the schedule of
    a plan that names one that is not generated.

    Raises:
        BadPlanAtError: the layers cannot be partitioned into the stages, the schedule
            does not exist for these sizes, or there are more than
            ``size_limit.MAX_OPERATIONS``.
    """
    mesh = mesh_of(plan)
    layers = describe_layers(plan)
    require_moderate_size(plan, sum(len(calls) for layer in layers for calls in _calls(plan, layer)))
    stages = stage_layers(plan)
    device = None if plan.cost.analytic is None else plan.cost.analytic.device
    pair_time = generating_pair_time(plan) if foreign is None else None
    shares, links, plan = shares_of_parts(plan), link_times(plan), with_times(plan)
    schedule = foreign.schedule if foreign is not None else plan_schedule(plan, pair_time)
    edges = describe_boundaries(plan) if boundary is None else (Edge(((boundary,),)),) * (plan.num_stages - 1)
    activation = boundary or describe_boundary(plan)
    context = PlanContext(plan, mesh, layers, stages, activation, edges, schedule, foreign, links=links, device=device,
                          part_shares=shares)  # fmt: skip
    require_own_updates(context)
    if plan.schedule.turns is not None and foreign is not None:
        _require_pairs(foreign)
    is_early = plan.transport.recv_order != "just_in_time"
    if is_early:
        context = replace(context, receives=_received_early(context))
    graph = lower_context(context)
    if not is_early and (foreign is None or foreign.computes_only) and not used_as_sent(graph):
        context = replace(context, receives=receives_as_sent(context))
        graph = lower_context(context)
    lowered = LoweredPlan.of(context, graph)
    num_replicas = mesh.num_ranks // graph.num_ranks
    return lowered if graph.num_ops * num_replicas > FOLD_ABOVE else lowered.unfolded()


def _received_early(plan: PlanContext) -> tuple[Posts, ...]:
    """Receives of each pipeline rank by place in its program, for the ``transport.recv_order`` of the plan."""
    recv_order = plan.spec.transport.recv_order
    if plan.foreign is not None and not plan.foreign.computes_only:
        message = f"`transport.recv_order: {recv_order}` moves no receives of a schedule that has its own communication"
        fix = "remove recv_order, or move them in the file"
        raise BadPlanAtError(Finding("PP106", Severity.ERROR, message, help=fix), ("transport", "recv_order"))
    return early_receives(plan, 1 if recv_order == "prefetch_one" else None)


def _require_pairs(foreign: ForeignSchedule) -> None:
    """Refuse ``schedule.overlap`` where no computations overlap, or their program is given with its communication.

    Raises:
        BadPlanAtError: PP106.
    """
    if not foreign.computes_only:
        why, fix = "has its own communication", "give computations alone"
    elif not any(foreign.schedule.pairs):
        why, fix = "has no computations that overlap", "write pairs as in (0F7;7B3)OVERLAP_F_B"
    else:
        return
    message = f"`schedule.overlap` is of pairs that overlap, and the schedule of the plan {why}"
    raise BadPlanAtError(Finding("PP106", Severity.ERROR, message, help=f"{fix}, or remove overlap"), _OVERLAP)


_OVERLAP = ("schedule", "overlap")


def _calls(plan: PlanSpec, layer: Layer) -> tuple[tuple[Collective, ...], ...]:
    """Collectives of a layer for one micro-batch: forward, backward and for the gradients of its weights."""
    return layer.forward_collectives, backward_calls(plan, layer), weight_calls(plan, layer)


def lower_loaded(loaded: LoadedPlan, *, boundary: Boundary | None = None) -> LoweredPlan:
    """Lower a plan with its own schedule, if it names one; ``boundary`` as for ``lower``.

    Raises:
        PlanFileError: the schedule or the profile cannot be read or does not
            fit, the layers cannot be put onto the stages, or the plan is too
            large.
    """
    with blaming_plan(loaded):
        return lower(from_here(loaded).spec, boundary=boundary, foreign=own_schedule(loaded))


@contextmanager
def blaming_plan(loaded: LoadedPlan) -> Iterator[None]:
    """Context in which errors of a plan get their location in the plan's file.

    Raises:
        PlanFileError: in place of any BadPlanError.
    """
    source = loaded.source
    try:
        yield
    except BadPlanAtError as error:
        location = source.locate(error.path) if source is not None else None
        raise PlanFileError(*(replace(f, location=location) for f in error.findings), source=source) from error
    except BadPlanError as error:
        raise PlanFileError(*error.findings, source=source) from error


def own_schedule(loaded: LoadedPlan) -> ForeignSchedule | None:
    """The schedule that a plan reads from a file or writes out; None where one is generated.

    Raises:
        ScheduleFileError: it cannot be read, is not for the sizes of the plan, or has attributes that lowering loses.
    """
    spec, source = loaded.spec, loaded.source
    schedule = spec.schedule
    expected = expected_schedule(spec)
    if schedule.programs is not None:
        if source is None:
            return custom_schedule(schedule.programs, expected)
        places = [
            [source.locate(("schedule", "programs", rank, index)) for index in range(len(program))]
            for rank, program in enumerate(schedule.programs)
        ]
        ends = [source.locate(("schedule", "programs", rank)) for rank in range(len(schedule.programs))]
        return custom_schedule(schedule.programs, expected, places=places, ends=ends)
    if schedule.path is None:
        return None
    foreign = load_schedule_file(schedule_path(loaded), expected, format=schedule.format)
    require_attributes_kept(foreign)
    return foreign


def expected_schedule(spec: PlanSpec) -> Expected:
    """The sizes that the schedule of a plan has if it is not generated."""
    schedule = spec.schedule
    placed = schedule.placement if isinstance(schedule.placement, tuple) else None
    return Expected(spec.topology.pp, schedule.num_micro_batches, spec.num_stages, placed, schedule.num_sequence_splits)


def schedule_path(loaded: LoadedPlan) -> Path:
    """Path of a plan's schedule file, relative to the plan file, or to the working directory without one."""
    assert loaded.spec.schedule.path is not None
    return _folder(loaded) / loaded.spec.schedule.path


def absolute_build(loaded: LoadedPlan) -> str:
    """``model.build`` of custom layers with an absolute path of its file.

    Raises:
        PlanFileError: PP911, the plan has none: its layers are modules of a training script.
    """
    build = loaded.spec.custom.build
    if build is None:
        message = "the plan has no `model.build`: its layers are the modules of a training script"
        fix = "run the script; `pipeproof check` and `pipeproof simulate` take the plan as it is"
        location = None if loaded.source is None else loaded.source.locate(("model",), key=True)
        raise PlanFileError(Finding("PP911", Severity.ERROR, message, location, fix), source=loaded.source)
    file, _, function = build.rpartition(":")
    return f"{(_folder(loaded) / file).resolve()}:{function}"


def from_here(loaded: LoadedPlan) -> LoadedPlan:
    """The plan with the path of its profile relative to the working directory instead of the plan file."""
    profile = loaded.spec.cost.profile
    if profile is None:
        return loaded
    cost = loaded.spec.cost.model_copy(update={"profile": str(_folder(loaded) / profile)})
    return replace(loaded, spec=loaded.spec.model_copy(update={"cost": cost}))


def with_measured_times(loaded: LoadedPlan) -> LoadedPlan:
    """The plan with given times in place of ``cost.profile``, for callers that change its stages.

    Raises:
        BadPlanError: the profile cannot be read, or is of another plan.
    """
    if loaded.spec.cost.profile is None:
        return loaded
    return replace(loaded, spec=with_times(from_here(loaded).spec))


def _folder(loaded: LoadedPlan) -> Path:
    return Path() if loaded.source is None else Path(loaded.source.file).parent
