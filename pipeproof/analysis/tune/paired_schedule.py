"""The shortest step of a plan among schedules with overlapped pairs and without, each simulated as the plan has it."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pipeproof.comm.lower import expected_schedule, from_here, lower
from pipeproof.schedule.formats.read_schedule import read_schedule
from pipeproof.schedule.formats.write_schedule import write_schedule
from pipeproof.schedule.generators.paired_orders import orders_with_pairs, with_pairs
from pipeproof.schedule.generators.workload import Workload, fits
from pipeproof.schedule.programs import Schedule
from pipeproof.sim.sim_codes import SimulationError
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import LoadedPlan

_MOST_SIMULATED = 8
"""Schedules that are simulated in addition to the orders of other kinds: those whose computations take least."""


@dataclass(frozen=True)
class PairedChoice:
    """The shortest step of all that were simulated.

    ``unpaired_us`` is the step of the given schedule without pairs, ``own_us`` that of the plan's own; None if it does
    not fit or cannot finish. ``num_tried`` counts the schedules whose computations were timed.
    """

    schedule: Schedule
    step_us: Fraction
    unpaired_us: Fraction | None
    own_us: Fraction | None
    num_tried: int
    num_simulated: int


def shortest_step(
    loaded: LoadedPlan, work: Workload, unpaired: Schedule, solved: Schedule, own: Schedule
) -> PairedChoice:
    """Choose among the schedules of ``with_pairs`` for ``work``, those solved without pairs and with them, and ``own``.

    ``own`` is the plan's, and is no candidate if it does not fit in memory.

    Raises:
        BadPlanError: the plan cannot be lowered, or its messages are not simulated.
    """
    tried = with_pairs(work, unpaired)
    known = [order for order in (solved, unpaired, *orders_with_pairs(work), own) if fits(order, work)]
    steps = {
        schedule: _step_us(loaded, schedule)
        for schedule in dict.fromkeys([*known, *(timed.schedule for timed in tried[:_MOST_SIMULATED])])
    }
    finished = {schedule: step for schedule, step in steps.items() if step is not None}
    best = min(finished, key=lambda schedule: finished[schedule])
    return PairedChoice(best, finished[best], steps[unpaired], steps.get(own), len(tried), len(steps))


def _step_us(loaded: LoadedPlan, schedule: Schedule) -> Fraction | None:
    """Microseconds of a step, in which computations overlap only where the schedule has pairs; None if none ends."""
    spec = from_here(loaded).spec
    section: dict[str, object] = {"kind": "file", "path": "-", "programs": None}
    cost = spec.cost
    if not any(schedule.pairs):
        section["overlap"] = "none"
        cost = cost.model_copy(update={"collective_slowdown": None})
    plan = spec.model_copy(update={"schedule": spec.schedule.model_copy(update=section), "cost": cost})
    foreign = read_schedule(write_schedule(schedule, "csv"), "-", expected_schedule(plan), format="csv")
    try:
        return simulate(lower(plan, foreign=foreign)).makespan
    except SimulationError:  # sends that wait for their receives may wait for each other
        return None
