"""The generated schedule of a plan, with its stages assigned to ranks by ``schedule.placement``."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm

from pipeproof.cost.plan_times import resolved_cost
from pipeproof.diagnostics.finding import BadPlanAtError, RuleDoc
from pipeproof.diagnostics.problems import KeyPath, listed
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, Request, ScheduleKind, assigned, stages_of_ranks
from pipeproof.schedule.programs import Schedule, StageCosts, UnfitSizesError
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.specs.plan import PlanSpec

UNFIT_SCHEDULE = RuleDoc(
    code="PP140",
    title="the schedule does not exist for these sizes",
    explanation=(
        "Each schedule has its own conditions: on the stages of a rank, on an even number of ranks, on the number of "
        "micro-batches, on the placement of stages. `pipeproof schedule list` lists them; the message names "
        "the nearest values that fit."
    ),
    wrong="topology: {pp: 2}\nschedule: {kind: interleaved, num_chunks: 2, num_micro_batches: 3}",
    right="topology: {pp: 2}\nschedule: {kind: interleaved, num_chunks: 2, num_micro_batches: 4}",
)
_VARIANT_OF_BACKEND = {"paddle": "fleet"}
"""Default variant by backend; other backends have the first variant."""


def plan_schedule(plan: PlanSpec) -> Schedule:
    """The computations of the plan's schedule, by pipeline rank.

    Raises:
        BadPlanAtError: the schedule does not exist for these sizes, or has too many operations (PP116).
    """
    schedule = plan.schedule
    kind = SCHEDULE_KINDS[schedule.kind]
    try:
        _require_fit(plan, kind)
        require_moderate_size(plan)
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
            placement=stages_of_ranks(plan) if kind.placement is Placement.ANY else None,
            overlaps=schedule.alternation is not None,
        )
        if plan.modules:
            from pipeproof.schedule.module_programs import module_schedule  # few plans have modules

            return module_schedule(plan, kind, request)
        generated = kind.generate(request)
        return generated if placement is None or kind.placement is Placement.ANY else assigned(generated, placement)
    except UnfitSizesError as error:
        raise BadPlanAtError(UNFIT_SCHEDULE.finding(str(error), help=error.help), error.key) from None


def default_variant(kind: ScheduleKind, backend: str) -> str | None:
    """The variant of a plan that names none: the order of the backend's own tool."""
    variant = _VARIANT_OF_BACKEND.get(backend)
    return variant if variant in kind.variants else next(iter(kind.variants), None)


def stage_costs(plan: PlanSpec) -> StageCosts:
    """The times of one work item by stage, in exact microseconds: a split takes its share of the micro-batch."""
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
    if not plan.modules and (chunks < kind.min_chunks or (most is not None and chunks > most)):
        few = "one stage" if kind.min_chunks == 1 else f"{kind.min_chunks} stages"
        takes = few if most is not None else f"{kind.min_chunks} or more stages"
        near = kind.min_chunks if most is None else min(max(chunks, kind.min_chunks), most)
        listed_stages = isinstance(schedule.placement, tuple)
        actual = f"schedule.placement lists {chunks}" if listed_stages else f"schedule.num_chunks is {chunks}"
        raise UnfitSizesError(
            f"{kind.name} has {takes} on each rank, and {actual}",
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
    placement = schedule.placement
    if isinstance(placement, str) and kind.placement is not Placement.ANY and placement != str(kind.placement):
        raise UnfitSizesError(
            f"{kind.name} places its stages {kind.placement.text}, and schedule.placement is {placement}",
            help="remove the key",
            key=("schedule", "placement"),
        )


def _num_chunks(plan: PlanSpec, kind: ScheduleKind) -> int:
    """Number of stages of each rank, copies counted once, from ``num_chunks`` or from the listed placement."""
    placement, num_ranks = plan.schedule.placement, plan.topology.pp
    if plan.modules or not isinstance(placement, tuple):
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
            f"{kind.name} has equally many stages on each rank, and schedule.placement lists "
            f"{plan.num_stages} stages for {num_ranks} ranks",
            help="assign equally many stages to each rank, or use looped_bfs or optimal",
            key=key,
        )
    return max(1, plan.num_stages // num_ranks)


MAX_OPERATIONS = 5_000_000
"""Most operations of a step, replicas counted once: about 400 bytes of memory each."""

_MOST_COMPUTATIONS = 3
"""F, I and W: computations of a work item in a schedule that is not generated."""

_MOST_TRANSFER_OPS = 13
"""Other operations of a work item without its collectives: two of each kind of transfer with its wait, slice and
gather, and one to spare for the step's end."""

_MOST_SHAPE_OPS = 8
"""Two META messages each way, with their waits."""

_MOST_PARTS = 3
"""The last parts of a forward and of a backward, and its last weight gradients."""

TOO_LARGE = RuleDoc(
    code="PP116",
    title="the plan has more operations than this release holds in memory",
    explanation=(
        "Every operation of a step is a row of the op table. Replicas along tp, cp, ep and dp run the same programs "
        "and are counted once; the number of stages, micro-batches, sequence splits and collectives inside layers "
        "determines the size."
    ),
    wrong="schedule: {num_micro_batches: 1000000}",
    right="schedule: {num_micro_batches: 8}",
)


def require_moderate_size(plan: PlanSpec, num_collectives: int = 0) -> None:
    """Refuse a plan whose op table would not fit into memory. O(1).

    ``num_collectives`` is the number of collectives in the layers of all stages for one work item.

    Raises:
        BadPlanAtError: PP116, more than ``MAX_OPERATIONS``.
    """
    schedule = plan.schedule
    num_batches = schedule.num_micro_batches * schedule.num_sequence_splits
    num_items = num_batches * plan.num_stages
    kind = SCHEDULE_KINDS.get(schedule.kind)
    most = num_batches * num_collectives + _MOST_TRANSFER_OPS * num_items
    if plan.alternation is not None:  # a part after each collective, and weight gradients after those in the backward
        most += 2 * num_batches * num_collectives + _MOST_PARTS * num_items
    most += _MOST_SHAPE_OPS * num_items if plan.transport.shape_exchange == "per_message" else 0
    most += _MOST_COMPUTATIONS * num_items if kind is None else kind.num_computations(plan.topology.pp, num_items)
    if most > MAX_OPERATIONS:
        splits = f" of {schedule.num_sequence_splits} splits" if schedule.num_sequence_splits > 1 else ""
        message = (
            f"{plan.num_stages} stages and {schedule.num_micro_batches} micro-batches{splits} make up to {most:,} "
            f"operations in a step, more than the {MAX_OPERATIONS:,} that this release holds"
        )
        fewer = max(1, schedule.num_micro_batches * MAX_OPERATIONS // most)
        fix = f"set schedule.num_micro_batches to at most {fewer}: after warm-up a schedule repeats itself"
        raise BadPlanAtError(TOO_LARGE.finding(message, help=fix), ("schedule", "num_micro_batches"))


CostKeys = Mapping[str, Fraction | tuple[Fraction, ...]]
"""Keys of the plan's ``cost`` section and their times, one for all stages or one for each."""


def sample_plan(
    kind: str,
    num_ranks: int,
    num_micro_batches: int,
    *,
    num_chunks: int = 1,
    cost: CostKeys | None = None,
    settings: Mapping[KeyPath, object] | None = None,
    **schedule: str | int | None,
) -> LoadedPlan:
    """A GPT with one small layer for each stage, on pipeline ranks alone.

    ``cost`` is in any unit; F, I and W take 1 by default.

    ``schedule`` are further keys of the plan's schedule section; None values are left out. ``settings`` are values of
    any key, as for ``load_plan``.

    Raises:
        PlanFileError: a value is out of its range.
    """
    num_splits = (settings or {}).get(("schedule", "num_sequence_splits"), schedule.get("num_sequence_splits"))
    further = {key: value for key, value in schedule.items() if value is not None}
    return plan_from_dict(
        {
            "pipeproof": 1,
            "model": {
                "kind": "gpt",
                "num_layers": num_ranks * num_chunks,
                "hidden_size": 2,
                "num_heads": 1,
                "ffn_size": 1,
                "vocab_size": 2,
                "seq_length": lcm(2, num_splits if isinstance(num_splits, int) else 1),
            },
            "topology": {"pp": num_ranks},
            "schedule": {
                "kind": kind,
                "num_micro_batches": num_micro_batches,
                "micro_batch_size": 1,
                "num_chunks": num_chunks,
                **further,
            },
            "cost": {**_UNIT_COSTS, **(cost or {})},
        },
        settings or {},
    )


_UNIT_COSTS = {"forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
