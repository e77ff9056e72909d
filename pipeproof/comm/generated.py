"""The schedule that a plan asks of a generator, with its stages dealt to ranks as the plan says."""

from __future__ import annotations

from pipeproof.comm.times import resolved_cost
from pipeproof.schedule.asap import StageCosts
from pipeproof.schedule.generators.dealt import dealt
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, Request, ScheduleKind
from pipeproof.schedule.programs import Schedule, UnfitSizesError
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.problems import listed

UNFIT_SCHEDULE = RuleDoc(
    code="PP140",
    title="the schedule does not exist for these sizes",
    severity="error",
    explanation=(
        "Each schedule has its own conditions: how many stages a rank holds, whether the ranks are even in number, how "
        "many micro-batches there are, where stages lie. `pipeproof schedule list` names them, the message the nearest "
        "values that fit."
    ),
    wrong="topology: {pp: 2}\nschedule: {kind: interleaved, num_chunks: 2, num_micro_batches: 3}",
    right="topology: {pp: 2}\nschedule: {kind: interleaved, num_chunks: 2, num_micro_batches: 4}",
)
_VARIANT_OF_BACKEND = {"paddle": "fleet"}
"""Whose order is meant where the plan names none; of other backends, that of the first variant."""


def plan_schedule(plan: PlanSpec) -> Schedule:
    """The computations of the plan's schedule, by pipeline rank.

    Raises:
        BadPlanAtError: the schedule does not exist for these sizes.
    """
    schedule = plan.schedule
    kind = SCHEDULE_KINDS[schedule.kind]
    try:
        _require_fit(plan, kind)
        placement = schedule.placement if isinstance(schedule.placement, tuple) else None
        request = Request(
            num_ranks=plan.topology.pp,
            num_micro_batches=schedule.num_micro_batches,
            num_chunks=_num_chunks(plan, kind),
            num_sequence_splits=schedule.num_sequence_splits,
            variant=schedule.variant or default_variant(kind, plan.run.backend),
            group_size=schedule.micro_batch_group_size,
            costs=stage_costs(plan),
            memory_limit=schedule.memory_limit,
            placement=_any_placement(plan) if kind.placement is Placement.ANY else None,
        )
        made = kind.generate(request)
        return made if placement is None or kind.placement is Placement.ANY else dealt(made, placement)
    except UnfitSizesError as error:
        finding = Finding(UNFIT_SCHEDULE.code, Severity.ERROR, str(error), help=error.help)
        raise BadPlanAtError(finding, error.key) from error


def default_variant(kind: ScheduleKind, backend: str) -> str | None:
    """Whose order is meant where none is named: that of the backend's own tool."""
    own = _VARIANT_OF_BACKEND.get(backend)
    return own if own in kind.variants else next(iter(kind.variants), None)


def stage_costs(plan: PlanSpec) -> StageCosts:
    """The times of one unit of work by stage, in exact microseconds: a split takes its share of the micro-batch."""
    cost, stages = resolved_cost(plan), range(plan.num_stages)
    share = plan.schedule.num_sequence_splits
    return StageCosts(
        forward=tuple(cost.forward_of(stage) / share for stage in stages),
        backward_input=tuple(cost.backward_input_of(stage) / share for stage in stages),
        backward_weight=tuple(cost.backward_weight_of(stage) / share for stage in stages),
        latency=cost.p2p_latency_us,
        overlapped=None
        if cost.overlapped_us is None
        else tuple(cost.overlapped_of(stage, stage) / share for stage in stages),
    )


def _require_fit(plan: PlanSpec, kind: ScheduleKind) -> None:
    """Raise UnfitSizesError for keys that do not go with the kind."""
    schedule = plan.schedule
    chunks, most = _num_chunks(plan, kind), kind.max_chunks
    if chunks < kind.min_chunks or (most is not None and chunks > most):
        few = "one stage" if kind.min_chunks == 1 else f"{kind.min_chunks} stages"
        takes = few if most is not None else f"{kind.min_chunks} or more stages"
        near = kind.min_chunks if most is None else min(max(chunks, kind.min_chunks), most)
        listed_stages = isinstance(schedule.placement, tuple)
        found = f"schedule.placement lists {chunks}" if listed_stages else f"schedule.num_chunks is {chunks}"
        raise UnfitSizesError(
            f"{kind.name} has {takes} on each rank, and {found}",
            help=f"list {near} for each rank" if listed_stages else f"set num_chunks to {near}",
            key=("schedule", "placement" if listed_stages else "num_chunks"),
        )
    if schedule.variant is not None and schedule.variant not in kind.variants:
        has = f"has variants {listed(kind.variants, 'and')}" if kind.variants else "is the same in all tools"
        raise UnfitSizesError(
            f"{kind.name} {has}, and schedule.variant is {schedule.variant}",
            help=f"use {listed(kind.variants)}" if kind.variants else "remove the key",
            key=("schedule", "variant"),
        )
    if schedule.micro_batch_group_size is not None and schedule.variant != "megatron":
        raise UnfitSizesError(
            "schedule.micro_batch_group_size is Megatron's, and goes with variant megatron",
            help="set kind to interleaved and variant to megatron, or remove the key",
            key=("schedule", "micro_batch_group_size"),
        )
    if schedule.num_sequence_splits > 1 and not kind.splits_sequences:
        raise UnfitSizesError(
            f"{kind.name} works on whole sequences, and schedule.num_sequence_splits is {schedule.num_sequence_splits}",
            help="use kind seq1f1b, or 1 split",
            key=("schedule", "num_sequence_splits"),
        )
    wanted = schedule.placement
    if isinstance(wanted, str) and kind.placement is not Placement.ANY and wanted != str(kind.placement):
        raise UnfitSizesError(
            f"{kind.name} places its stages {kind.placement.text}, and schedule.placement is {wanted}",
            help="remove the key",
            key=("schedule", "placement"),
        )


def _num_chunks(plan: PlanSpec, kind: ScheduleKind) -> int:
    """Stages of each rank, copies counted once: as the plan says, or as the stages that it lists come to.

    Raises:
        UnfitSizesError: it lists copies, or ranks with more stages than others, for a schedule that has no such.
    """
    placement, num_ranks = plan.schedule.placement, plan.topology.pp
    if not isinstance(placement, tuple):
        return plan.schedule.num_chunks
    key = ("schedule", "placement")
    if sum(map(len, placement)) > plan.num_stages and kind.placement is not Placement.BOTH_WAYS:
        raise UnfitSizesError(
            f"{kind.name} has one copy of each stage, and schedule.placement lists several",
            help="list each stage once, or use dualpipe or chimera",
            key=key,
        )
    if plan.num_stages % num_ranks and kind.placement is not Placement.ANY:
        raise UnfitSizesError(
            f"{kind.name} has as many stages on each rank, and schedule.placement lists {plan.num_stages} stages for "
            f"{num_ranks} ranks",
            help="deal as many stages to each rank, or use looped_bfs or optimal",
            key=key,
        )
    return max(1, plan.num_stages // num_ranks)


def ends_share_ranks(plan: PlanSpec) -> bool:
    """Whether the ranks that hold the last stage hold the first one, too; not known of a schedule from a file."""
    schedule, last = plan.schedule, plan.num_stages - 1
    if isinstance(schedule.placement, tuple):
        return all(0 in stages for stages in schedule.placement if last in stages)
    kind = SCHEDULE_KINDS.get(schedule.kind)
    natural = Placement.ANY if kind is None else kind.placement
    if plan.topology.pp == 1 or natural is Placement.BOTH_WAYS:
        return True
    turns = natural is Placement.V or schedule.placement == "v"
    return turns and schedule.num_chunks % 2 == 0


def _any_placement(plan: PlanSpec) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, for a schedule that takes any placement."""
    placement, num_ranks = plan.schedule.placement, plan.topology.pp
    if isinstance(placement, tuple):
        return placement
    chunks = range(plan.schedule.num_chunks)
    turns = placement == "v"
    return tuple(
        tuple(chunk * num_ranks + (num_ranks - 1 - rank if turns and chunk % 2 else rank) for chunk in chunks)
        for rank in range(num_ranks)
    )
