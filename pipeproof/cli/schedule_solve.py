"""``pipeproof schedule solve``: the best schedule that a solver finds for a plan's times and memory, as a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import yaml

from pipeproof.atomic_write import write_output
from pipeproof.cli.console import console_for
from pipeproof.cli.progress import showing_progress
from pipeproof.comm.generated_schedule import UNFIT_SCHEDULE, plan_schedule, stage_costs
from pipeproof.comm.lower import blaming_plan, own_schedule, with_measured_times
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.asap import asap
from pipeproof.schedule.formats.write_schedule import write_schedule
from pipeproof.schedule.generators.solve import Progress, Solution, UnfitHintError, solve
from pipeproof.schedule.generators.workload import most_held
from pipeproof.schedule.programs import Schedule, UnfitSizesError, stages_of
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.plan import PlanSpec
from pipeproof.views.timeline_text import format_us

_NOT_OF_FILES = frozenset(
    {"kind", "path", "format", "programs", "variant", "micro_batch_group_size", "memory_limit", "placement"}
)
"""Keys of a schedule that another kind has, or that a file contains."""


def solve_plan(plan: Path, loaded: LoadedPlan, output: Path, time_limit_s: float, memory_limit: int | None) -> None:
    """Solve for the stages of a plan as its own schedule places them, write ``output``, and report how good it is.

    ``plan`` is the file of ``loaded``.

    ``memory_limit`` is in chunk activations of a rank; without it, that of the plan counts.

    Raises:
        BadPlanError: OR-tools is missing (PP142), or there is no schedule (PP140).
    """
    with blaming_plan(loaded), _blaming_sizes():
        loaded = with_measured_times(loaded)
        spec = loaded.spec
        own = _own_schedule(loaded)
        hint = "Ctrl-C keeps the best schedule so far"
        with showing_progress(f"solving; {hint}") as show:

            def on_progress(so_far: Progress) -> None:
                show(f"solving: {_us(so_far.makespan)}, at best {_us(so_far.bound)}; {hint}", 0, 0)

            solution, unfit = _solve(own, spec, memory_limit, time_limit_s, on_progress)
    write_output(output, write_schedule(solution.schedule, "csv"))
    console = console_for()
    for line in _verdict(solution):
        console.print(line, soft_wrap=True)
    console.print(f"the plan's own schedule ({spec.schedule.kind}): {_own_makespan(own, spec)}{unfit}", soft_wrap=True)
    if note := loaded.spec.cost.placeholder_note:
        console.print(note, soft_wrap=True)
    console.print(f"written to {output}; in the plan:\n", soft_wrap=True, markup=False)
    console.print(_section(spec, output, plan), soft_wrap=True, no_wrap=True, markup=False)


def _own_schedule(loaded: LoadedPlan) -> Schedule:
    if loaded.spec.schedule.num_sequence_splits > 1:
        raise UnfitSizesError(
            "solved schedules work on whole sequences",
            help="set num_sequence_splits to 1",
            key=("schedule", "num_sequence_splits"),
        )
    foreign = own_schedule(loaded)
    return plan_schedule(loaded.spec) if foreign is None else Schedule(foreign.programs)


def _solve(
    own: Schedule,
    spec: PlanSpec,
    memory_limit: int | None,
    time_limit_s: float,
    on_progress: Callable[[Progress], None],
) -> tuple[Solution, str]:
    """Return the solution, and the reason if the plan's own schedule is not a solution."""
    work = stages_of(own.programs), spec.schedule.num_micro_batches, stage_costs(spec)
    limit = memory_limit or spec.schedule.memory_limit
    try:
        return solve(*work, limit, time_limit_s=time_limit_s, hint=own, on_progress=on_progress), ""
    except UnfitHintError:
        solution = solve(*work, limit, time_limit_s=time_limit_s, on_progress=on_progress)
        most = max(most_held(own.programs))
        return solution, f", for which a rank holds up to {most} activations" if limit and most > limit else ""


@contextmanager
def _blaming_sizes() -> Iterator[None]:
    """Convert sizes that do not fit to the finding of generators."""
    try:
        yield
    except UnfitSizesError as error:
        finding = UNFIT_SCHEDULE.finding(str(error), help=error.help)
        raise BadPlanAtError(finding, error.key) from error


def _us(time: int | Fraction) -> str:
    return f"{format_us(Fraction(time))} us"


def _verdict(solution: Solution) -> Iterator[str]:
    took = f"{solution.seconds:.1f} s"
    if solution.proved:
        yield f"makespan {_us(solution.makespan)}: proved, no schedule is shorter ({took})"
        return
    yield f"makespan {_us(solution.makespan)}: not proved to be the shortest; none is below {_us(solution.bound)}"
    yield f"gap {solution.gap:.1%} after {took}; a longer --time-limit may close it"


def _own_makespan(own: Schedule, spec: PlanSpec) -> str:
    try:
        return _us(asap(own, stage_costs(spec)).makespan)
    except ValueError:  # a file may have a schedule that waits for itself
        return "cannot finish"


def _section(spec: PlanSpec, output: Path, plan: Path) -> str:
    """The schedule section that names the file, which is relative to the plan."""
    other_keys = spec.schedule.model_dump(mode="json", exclude_unset=True, exclude=set(_NOT_OF_FILES))
    path = Path(os.path.relpath(output.absolute(), plan.absolute().parent)).as_posix()
    section = {"kind": "file", "path": path, **other_keys}
    if isinstance(spec.schedule.placement, tuple):
        section["placement"] = [list(stages) for stages in spec.schedule.placement]
    return yaml.safe_dump({"schedule": section}, sort_keys=False, default_flow_style=None).rstrip()
