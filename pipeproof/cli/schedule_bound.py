"""The bound that no schedule of the same work is below, next to a schedule of kind ``optimal``.

The bound of the work alone takes no time. With a time limit, OR-tools searches for a shorter schedule and raises the
bound: a schedule that reaches it is proved to be the shortest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import click

from pipeproof.cli.progress import showing_progress
from pipeproof.comm.generated_schedule import UNFIT_SCHEDULE
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.generators.workload import make_workload
from pipeproof.schedule.programs import Schedule, StageCosts, Time, UnfitSizesError, asap, stages_of
from pipeproof.specs.plan import PlanSpec
from pipeproof.views.timeline_text import format_us


@dataclass(frozen=True, slots=True)
class BoundedSchedule:
    """A schedule with its makespan and bound in the unit of its costs; ``seconds`` of a search, None without one."""

    schedule: Schedule
    makespan: Time
    bound: Time
    seconds: float | None = None

    def lines(self, unit: str) -> Iterator[str]:
        """Sentences about the bound; ``unit`` follows each time."""
        makespan, bound = (f"{format_us(Fraction(time))}{unit}" for time in (self.makespan, self.bound))
        if self.makespan == self.bound:
            took = "" if self.seconds is None else f" ({self.seconds:.1f} s)"
            yield f"makespan {makespan}: proved, no schedule of these stages is shorter{took}"
            return
        yield f"makespan {makespan}: not proved to be the shortest; none is below {bound}"
        if self.seconds is None:
            yield "`--time-limit SECONDS` searches for a shorter one, and proves a higher bound"
        else:
            gap = float((self.makespan - self.bound) / self.makespan)
            yield f"gap {gap:.1%} after {self.seconds:.1f} s; a longer --time-limit may close it"


def bounded(spec: PlanSpec, schedule: Schedule, costs: StageCosts, time_limit_s: int | None) -> BoundedSchedule:
    """Return a schedule of kind ``optimal`` with its bound; with a time limit, the best that the solver finds.

    Raises:
        BadPlanError: OR-tools is missing (PP142), or the times are too fine for it (PP140).
    """
    work_of = stages_of(schedule.programs), spec.schedule.num_micro_batches, costs, spec.schedule.memory_limit
    try:
        if time_limit_s is None:
            work = make_workload(*work_of)
            ticks = work.least_makespan() if work.pairs is None else work.least_with_pairs()
            return BoundedSchedule(schedule, asap(schedule, costs).makespan, work.in_units(ticks))
        return _solved(work_of, time_limit_s)
    except UnfitSizesError as error:
        finding = UNFIT_SCHEDULE.finding(str(error), help=error.help)
        raise BadPlanAtError(finding, error.key) from error


def _solved(
    work_of: tuple[tuple[tuple[int, ...], ...], int, StageCosts, int | None], time_limit_s: int
) -> BoundedSchedule:
    from pipeproof.schedule.generators.solve import Progress, solve

    hint = "Ctrl-C keeps the best schedule so far"
    with showing_progress(f"solving; {hint}") as show:

        def on_progress(so_far: Progress) -> None:
            best, bound = (format_us(Fraction(time)) for time in (so_far.makespan, so_far.bound))
            show(f"solving: {best}, at best {bound}; {hint}", 0, 0)

        solution = solve(*work_of, time_limit_s=time_limit_s, on_progress=on_progress)
    return BoundedSchedule(solution.schedule, solution.makespan, solution.bound, solution.seconds)


def require_optimal(kind: str, time_limit_s: int | None) -> None:
    """Refuse a time limit for a kind that has no search.

    Raises:
        click.UsageError: it is given for another kind than ``optimal``.
    """
    if time_limit_s is not None and kind != "optimal":
        raise click.UsageError(f"--time-limit is for the kind optimal, and this is {kind}")
