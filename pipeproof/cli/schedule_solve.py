"""``pipeproof schedule solve``: the best schedule that a solver finds for a plan's times and memory, as a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import yaml

from pipeproof.analysis.tune.paired_schedule import PairedChoice, shortest_step
from pipeproof.atomic_write import write_output
from pipeproof.cli.console import console_for
from pipeproof.cli.progress import showing_progress
from pipeproof.comm.generated_schedule import UNFIT_SCHEDULE, own_pair_time, plan_schedule, stage_costs
from pipeproof.comm.lower import blaming_plan, from_here, own_schedule, with_measured_times
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.formats.write_schedule import write_schedule
from pipeproof.schedule.generators.solve import Progress, Solution, UnfitHintError, solve
from pipeproof.schedule.generators.workload import Placement, make_workload, most_held
from pipeproof.schedule.programs import Schedule, StageCosts, UnfitSizesError, asap, stages_of
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
        measured = with_measured_times(loaded)
        spec = measured.spec
        own = _own_schedule(measured)
        limit = memory_limit or spec.schedule.memory_limit
        overlaps = spec.schedule.turns is not None
        costs = stage_costs(spec, own_pair_time(from_here(loaded).spec) if overlaps else None)
        sizes = stages_of(own.programs), spec.schedule.num_micro_batches
        hint = "Ctrl-C keeps the best schedule so far"
        with showing_progress(f"solving; {hint}") as show:

            def on_progress(so_far: Progress) -> None:
                show(f"solving: {_us(so_far.makespan)}, at best {_us(so_far.bound)}; {hint}", 0, 0)

            without = sizes, replace(costs, in_turns=None), limit, time_limit_s, on_progress
            solution, is_unfit = _solve(own, *without)
            if overlaps:
                paired = solve(
                    *sizes, costs, limit, time_limit_s=time_limit_s, hint=solution.schedule, on_progress=on_progress
                )
                show("simulating schedules with pairs", 0, 0)
                work = make_workload(*sizes, costs, limit)
                choice = shortest_step(loaded, work, solution.schedule, paired.schedule, own)
    schedule = choice.schedule if overlaps else solution.schedule
    write_output(output, write_schedule(schedule, "csv"))
    most = max(most_held(own.programs))
    unfit = f", for which a rank holds up to {most} activations" if is_unfit and limit and most > limit else ""
    own_name = f"the plan's own schedule ({spec.schedule.kind})"
    if overlaps:
        lines = [*_paired_verdict(choice, paired, solution), f"{own_name}: {_step(choice.own_us)}{unfit}"]
    else:
        lines = [*_verdict(solution), f"{own_name}: {_own_makespan(own, costs)}{unfit}"]
    console = console_for()
    for line in lines:
        console.print(line, soft_wrap=True)
    if note := spec.cost.placeholder_note:
        console.print(note, soft_wrap=True)
    console.print(f"written to {output}; in the plan:\n", soft_wrap=True, markup=False)
    section = _section(spec, output, plan, overlaps=any(schedule.pairs))
    console.print(section, soft_wrap=True, no_wrap=True, markup=False)


def _own_schedule(loaded: LoadedPlan) -> Schedule:
    if loaded.spec.schedule.num_sequence_splits > 1:
        raise UnfitSizesError(
            "solved schedules work on whole sequences",
            help="set num_sequence_splits to 1",
            key=("schedule", "num_sequence_splits"),
        )
    if loaded.spec.is_custom and loaded.spec.schedule.turns is not None:
        raise UnfitSizesError(
            "the solver needs the parts of pairs, and those of custom layers are not known",
            help="remove overlap",
            key=("schedule", "overlap"),
        )
    foreign = own_schedule(loaded)
    if foreign is None:
        return plan_schedule(loaded.spec)
    return Schedule(foreign.programs) if loaded.spec.schedule.turns is None else foreign.schedule


def _solve(
    own: Schedule,
    sizes: tuple[Placement, int],
    costs: StageCosts,
    limit: int | None,
    time_limit_s: float,
    on_progress: Callable[[Progress], None],
) -> tuple[Solution, bool]:
    """Return the solution, and whether the plan's own schedule is none."""
    try:
        return solve(*sizes, costs, limit, time_limit_s=time_limit_s, hint=own, on_progress=on_progress), False
    except UnfitHintError:
        return solve(*sizes, costs, limit, time_limit_s=time_limit_s, on_progress=on_progress), True


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


def _paired_verdict(choice: PairedChoice, paired: Solution, unpaired: Solution) -> Iterator[str]:
    num_pairs = sum(map(len, choice.schedule.pairs))
    has = (
        f"with {num_pairs} overlapped pairs" if num_pairs else "without pairs: none of those tried is shorter with them"
    )
    yield f"step {_us(choice.step_us)}, simulated, {has}"
    yield (
        f"it is the shortest of {choice.num_simulated} simulated schedules, of {choice.num_tried} tried; other steps "
        "may be shorter"
    )
    yield f"computations with pairs: {_shortest(paired)}"
    yield f"computations without pairs: {_shortest(unpaired)}; {_step(choice.unpaired_us)}"


def _shortest(solution: Solution) -> str:
    if solution.proved:
        return f"makespan {_us(solution.makespan)}, proved to be the shortest"
    return f"makespan {_us(solution.makespan)}, not proved to be the shortest: none is below {_us(solution.bound)}"


def _step(step_us: Fraction | None) -> str:
    return "no simulated step" if step_us is None else f"step {_us(step_us)}, simulated"


def _own_makespan(own: Schedule, costs: StageCosts) -> str:
    try:
        return _us(asap(own, costs).makespan)
    except ValueError:  # a file may have a schedule that waits for itself
        return "cannot finish"


def _section(spec: PlanSpec, output: Path, plan: Path, *, overlaps: bool) -> str:
    """The schedule section that names the file, which is relative to the plan; with its overlap if it has pairs."""
    excluded = _NOT_OF_FILES if overlaps else _NOT_OF_FILES | {"overlap"}
    other_keys = spec.schedule.model_dump(mode="json", exclude_unset=True, exclude=set(excluded))
    path = Path(os.path.relpath(output.absolute(), plan.absolute().parent)).as_posix()
    section = {"kind": "file", "path": path, **other_keys}
    if isinstance(spec.schedule.placement, tuple):
        section["placement"] = [list(stages) for stages in spec.schedule.placement]
    return yaml.safe_dump({"schedule": section}, sort_keys=False, default_flow_style=None).rstrip()
