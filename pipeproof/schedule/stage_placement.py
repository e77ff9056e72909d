"""Placement of stages on ranks: as a plan lists it, and of a generated schedule moved to other ranks."""

from __future__ import annotations

from collections.abc import Sequence

from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement
from pipeproof.schedule.programs import Schedule, UnfitSizesError, stages_of
from pipeproof.specs.plan import PlanSpec


def assigned(schedule: Schedule, placement: Sequence[Sequence[int]]) -> Schedule:
    """The schedule with its ranks in the order in which ``placement`` has their stages.

    Raises:
        UnfitSizesError: the placement does not put together the stages that a rank of the schedule holds.
    """
    own = stages_of(schedule.programs)
    free: dict[tuple[int, ...], list[int]] = {}
    for rank, stages in enumerate(own):
        free.setdefault(stages, []).append(rank)
    order = []
    for rank, wanted in enumerate(placement):
        ranks = free.get(tuple(sorted(wanted)))
        if not ranks:
            raise UnfitSizesError(
                f"rank {rank} has the stages {list(wanted)}, which this schedule does not put on one rank",
                help=f"assign {', '.join(str(list(stages)) for stages in own)} to the ranks in any order, or use "
                "looped_bfs or optimal, which take any placement",
                key=("schedule", "placement"),
            )
        order.append(ranks.pop(0))
    return Schedule(
        tuple(schedule.programs[rank] for rank in order),
        tuple(schedule.pairs[rank] for rank in order) if schedule.pairs else (),
    )


def stages_of_ranks(plan: PlanSpec) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, for a schedule that takes any placement."""
    placement, num_ranks = plan.schedule.placement, plan.topology.pp
    if isinstance(placement, tuple):
        return placement
    chunks = range(plan.schedule.num_chunks)
    reverses = placement == "v"
    return tuple(
        tuple(chunk * num_ranks + (num_ranks - 1 - rank if reverses and chunk % 2 else rank) for chunk in chunks)
        for rank in range(num_ranks)
    )


def ends_share_ranks(plan: PlanSpec) -> bool:
    """True if all ranks that hold the last stage also hold the first; False for a schedule from a file."""
    schedule, last = plan.schedule, plan.num_stages - 1
    if isinstance(schedule.placement, tuple):
        return all(0 in stages for stages in schedule.placement if last in stages)
    kind = SCHEDULE_KINDS.get(schedule.kind)
    natural = Placement.ANY if kind is None else kind.placement
    if plan.topology.pp == 1 or natural is Placement.BOTH_WAYS:
        return True
    reverses = natural is Placement.V or schedule.placement == "v"
    return reverses and schedule.num_chunks % 2 == 0
