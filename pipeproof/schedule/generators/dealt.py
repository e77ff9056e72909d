"""Dealing the stages of a generated schedule to other ranks than its own."""

from __future__ import annotations

from collections.abc import Sequence

from pipeproof.schedule.programs import Schedule, UnfitSizesError, stages_of


def dealt(schedule: Schedule, placement: Sequence[Sequence[int]]) -> Schedule:
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
                help=f"deal {', '.join(str(list(stages)) for stages in own)} to the ranks in any order, or use "
                "looped_bfs or optimal, which take any placement",
                key=("schedule", "placement"),
            )
        order.append(ranks.pop(0))
    return Schedule(
        tuple(schedule.programs[rank] for rank in order),
        tuple(schedule.pairs[rank] for rank in order) if schedule.pairs else (),
    )
