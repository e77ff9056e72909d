"""``pipeproof schedule show``: one schedule as a timeline with figures, as JSON, or as a schedule file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from pipeproof.cli.console import console_for
from pipeproof.cli.progress import showing_progress
from pipeproof.comm.generated_schedule import (
    UNFIT_SCHEDULE,
    plan_schedule,
    sample_plan,
    stage_costs,
)
from pipeproof.comm.lower import blaming_plan, lower_loaded, own_schedule, with_measured_times
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.diagnostics.problems import KeyPath, nearest_name
from pipeproof.diagnostics.units import number_text, time_text
from pipeproof.exit_status import ExitStatus
from pipeproof.schedule.formats.inexpressible import InexpressibleError
from pipeproof.schedule.formats.read_schedule import write_schedule
from pipeproof.schedule.generators.workload import make_workload
from pipeproof.schedule.kinds import SCHEDULE_KINDS, ScheduleKind
from pipeproof.schedule.programs import Schedule, StageCosts, Timed, UnfitSizesError, asap, stages_of
from pipeproof.sim.timeline import RankFigures, figures_of, figures_to_json, number_to_json, timeline_of
from pipeproof.specs.cost import cost_source, placeholder_note
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.plan import PlanSpec
from pipeproof.verify.check_plan import require_whole_step
from pipeproof.verify.schedule_verdict import Outcome, ScheduleVerdict, check_schedule
from pipeproof.views.schedule_svg import schedule_svg
from pipeproof.views.tables import print_lines
from pipeproof.views.timeline_text import TimeText, figures_lines, render_timeline

if TYPE_CHECKING:
    from pipeproof.schedule.generators.solve import Progress, Solution

MOST_COMPUTATIONS = 200_000
"""Most computations of a schedule that is shown: its picture takes about a tenth of a millisecond for each."""


@dataclass(frozen=True, slots=True)
class SelectedSchedule:
    """A schedule with its plan and its times; ``time_text`` writes times, ``bounded`` is for ``optimal`` only."""

    plan: LoadedPlan
    schedule: Schedule
    costs: StageCosts
    time_text: TimeText
    placeholder_note: str
    cost_source: str
    bounded: Solution | None

    @property
    def timed(self) -> Timed:
        """When each operation runs, as early as possible."""
        return asap(self.schedule, self.costs)


def of_kind(
    name: str, sizes: tuple[int, int, int | None], settings: Mapping[KeyPath, object], form: str,
    time_limit_s: int | None,
) -> SelectedSchedule:  # fmt: skip
    """Return the schedule of a kind.

    ``sizes`` are the ranks, the micro-batches and the stages of a rank, None for the fewest. Some kinds depend on
    ``form``, the output form.

    Raises:
        click.UsageError: there is no such kind, or it has too many computations for a timeline.
        BadPlanError: it does not exist for these sizes.
    """
    kind = _kind(name)
    require_optimal(name, time_limit_s)
    cost = [str(path[1]) for path in settings if path[0] == "cost" and len(path) > 1]
    num_ranks, num_micro_batches, num_chunks = sizes
    variant = None
    if kind.variants and ("schedule", "variant") not in settings:
        variant = "fleet" if form == "fleet" and "fleet" in kind.variants else kind.variants[0]
    with showing_progress(f"generating {name}"):
        plan = sample_plan(
            name, num_ranks, num_micro_batches, num_chunks=num_chunks or kind.min_chunks, settings=settings,
            variant=variant,
        )  # fmt: skip
        if form in ("text", "json", "svg"):
            _require_moderate_picture(plan, kind)
        note = placeholder_note(cost, forward="1", backward="2")
        return _selected(plan, number_text, note, cost_source(cost), time_limit_s)


def of_plan(plan: LoadedPlan, form: str, time_limit_s: int | None) -> SelectedSchedule:
    """Return the schedule of a plan, with the times of its stages.

    Raises:
        PlanFileError: it cannot be generated or read.
        click.UsageError: it has too many computations for a timeline.
    """
    require_optimal(plan.spec.schedule.kind, time_limit_s)
    with showing_progress(f"generating {plan.spec.schedule.kind}"), blaming_plan(plan):
        if form in ("text", "json", "svg") and plan.spec.schedule.kind in SCHEDULE_KINDS:
            _require_moderate_picture(plan, SCHEDULE_KINDS[plan.spec.schedule.kind])
        measured = with_measured_times(plan)
        return _selected(measured, time_text, plan.spec.placeholder_note, plan.spec.cost_source, time_limit_s)


def _selected(plan: LoadedPlan, text: TimeText, note: str, source: str, time_limit_s: int | None) -> SelectedSchedule:
    foreign = own_schedule(plan)
    schedule = plan_schedule(plan.spec) if foreign is None else Schedule(foreign.programs)
    costs = stage_costs(plan.spec)
    if foreign is not None:
        lowered = lower_loaded(plan)
        require_whole_step(lowered, plan.source)
        try:
            asap(schedule, costs)
        except ValueError:  # computations wait for each other, on any backend
            require_whole_step(lowered, plan.source, ("PP4",))
            raise
    optimum = None
    if plan.spec.schedule.kind == "optimal":
        optimum = bounded(plan.spec, schedule, costs, time_limit_s)
        schedule = optimum.schedule
    return SelectedSchedule(plan, schedule, costs, text, note, source, optimum)


def show_schedule(shown: SelectedSchedule, form: str, *, verify: bool) -> None:
    """Print the timeline and figures of a schedule as text or JSON; exit 1 if the rules refuse it.

    If the solver found the schedule, the generated one is checked.
    """
    with showing_progress(f"checking {shown.plan.spec.schedule.kind}"):
        is_solved = shown.bounded is not None and shown.bounded.seconds is not None
        verdict = check_schedule(shown.plan) if verify and not is_solved else None
    if form == "json":
        click.echo(json.dumps(_to_json(shown, verdict), indent=2))
    else:
        _render(shown, verdict, console_for())
    if verdict is not None and verdict.outcome is Outcome.WRONG:
        sys.exit(ExitStatus.FAILED)


def write_shown(shown: SelectedSchedule, target: str) -> None:
    """Print a schedule in one of the formats of ``schedule_command.FORMATS``.

    Raises:
        click.UsageError: the format cannot express it.
    """
    if target == "svg":
        title = _title(shown.plan)
        if shown.placeholder_note:
            title += f" ({shown.placeholder_note})"
        click.echo(schedule_svg(shown.timed, title, in_us=shown.time_text is time_text), nl=False)
        return
    try:
        click.echo(write_schedule(shown.schedule, target), nl=False)
    except InexpressibleError as error:
        raise click.UsageError(f"--as {target}: {error}") from error


def _require_moderate_picture(plan: LoadedPlan, kind: ScheduleKind) -> None:
    """Refuse a schedule with too many computations for a timeline, before it is generated. O(1)."""
    schedule, num_ranks = plan.spec.schedule, plan.spec.topology.pp
    num_items = plan.spec.num_stages * schedule.num_micro_batches * schedule.num_sequence_splits
    number = kind.num_computations(num_ranks, num_items)
    if number > MOST_COMPUTATIONS:
        raise click.UsageError(
            f"{_title(plan)}: {number:,} computations, more than the {MOST_COMPUTATIONS:,} that a timeline shows\n"
            "help: use fewer micro-batches: after warm-up a schedule repeats itself; `--as csv` writes larger ones"
        )


def _kind(name: str) -> ScheduleKind:
    if name in SCHEDULE_KINDS:
        return SCHEDULE_KINDS[name]
    near = nearest_name(name, SCHEDULE_KINDS)
    fix = f"did you mean {near}?" if near else "`pipeproof schedule list` has them all"
    raise click.BadParameter(f"there is no schedule {name!r}; {fix}", param_hint="KIND")


def _render(shown: SelectedSchedule, verdict: ScheduleVerdict | None, console: Console) -> None:
    timeline = timeline_of(shown.timed)
    render_timeline(timeline, console, _title(shown.plan), shown.time_text)
    console.print()
    text = str if shown.time_text is number_text else shown.time_text
    console.print(Text(_costs_text(shown.costs, text)), soft_wrap=True)
    if shown.placeholder_note:
        console.print(Text(shown.placeholder_note), soft_wrap=True)
    figures = ((str(of_rank.rank), of_rank) for of_rank in figures_of(timeline))
    print_lines(figures_lines(figures, shown.time_text), console)
    for line in () if shown.bounded is None else _bound_lines(shown.bounded, shown.time_text):
        console.print(Text(line), soft_wrap=True)
    if verdict is None:
        return
    style = {Outcome.ROBUST: "green", Outcome.CONDITIONAL: "yellow", Outcome.WRONG: "bold red"}[verdict.outcome]
    console.print(Text.assemble("deadlock: ", (verdict.outcome, style), f": {verdict.reason}"), soft_wrap=True)


def _title(plan: LoadedPlan) -> str:
    spec, schedule = plan.spec, plan.spec.schedule
    parts = [schedule.kind if schedule.variant is None else f"{schedule.kind} ({schedule.variant})"]
    counts = {"rank": spec.topology.pp, "micro-batch": schedule.num_micro_batches}
    parts += [f"{count} {name}{'' if count == 1 else 'es' if name.endswith('h') else 's'}"
              for name, count in counts.items()]  # fmt: skip
    parts += [f"{schedule.num_chunks} stages a rank"] if schedule.num_chunks > 1 else []
    parts += [f"{schedule.num_sequence_splits} splits"] if schedule.num_sequence_splits > 1 else []
    return ", ".join(parts)


def _costs_text(costs: StageCosts, text: TimeText) -> str:
    """The times of the picture; one if all stages have the same."""
    named = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    if costs.overlapped is not None:
        named["F + B in parallel"] = costs.overlapped
    texts = []
    for name, times in named.items():
        shown = times[:1] if len(set(times)) == 1 else times
        texts.append(f"{name} {','.join(text(Fraction(time)) for time in shown)}")
    return f"times of a stage: {'; '.join(texts)}; B = I + W; latency {text(Fraction(costs.latency))}"


def _to_json(shown: SelectedSchedule, verdict: ScheduleVerdict | None) -> dict[str, Any]:
    """The form of ``--format json``; see ``docs/schemas/schedule.schema.json``."""
    spec, schedule = shown.plan.spec, shown.plan.spec.schedule
    stages, timed = stages_of(shown.schedule.programs), shown.timed
    figures = figures_of(timeline_of(timed))
    bound = None if shown.bounded is None else shown.bounded.bound
    return {
        "kind": schedule.kind,
        "variant": schedule.variant,
        "num_ranks": spec.topology.pp,
        "num_micro_batches": schedule.num_micro_batches,
        "num_chunks": schedule.num_chunks,
        "num_sequence_splits": schedule.num_sequence_splits,
        "cost_source": shown.cost_source,
        **number_to_json("makespan", Fraction(timed.makespan)),
        **({"bound": None} if bound is None else number_to_json("bound", Fraction(bound))),
        "verdict": None if verdict is None else _verdict_to_json(verdict),
        "ranks": [_rank_to_json(shown.schedule, timed, own, stages[own.rank]) for own in figures],
    }


def _verdict_to_json(verdict: ScheduleVerdict) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome.value,
        "backend": verdict.backend,
        "errors": [{"code": error.code, "message": error.message} for error in verdict.errors],
        "failing_models": [str(model) for model in verdict.failing],
    }


def _rank_to_json(schedule: Schedule, timed: Timed, figures: RankFigures, stages: tuple[int, ...]) -> dict[str, Any]:
    rank = figures.rank
    begins = schedule.pairs_of(rank)
    ops = zip(timed.programs[rank], timed.starts[rank], timed.ends[rank], strict=True)
    return {
        "rank": rank,
        "stages": list(stages),
        **figures_to_json(figures),
        "ops": [
            {
                "op": str(op),
                **number_to_json("start", Fraction(start)),
                **number_to_json("end", Fraction(end)),
                "overlaps": index in begins or index - 1 in begins,
            }
            for index, (op, start, end) in enumerate(ops)
        ],
    }


def _bound_lines(solution: Solution, text: TimeText) -> Iterator[str]:
    """Sentences about the bound; ``text`` writes times."""
    makespan, bound = (text(Fraction(time)) for time in (solution.makespan, solution.bound))
    if solution.proved:
        took = "" if solution.seconds is None else f" ({time_text(solution.seconds * 1e6)})"
        yield f"step time {makespan}: proved, no schedule of these stages is shorter{took}"
        return
    yield f"step time {makespan}: not proved to be the shortest; none is below {bound}"
    if solution.seconds is None:
        yield "`--time-limit SECONDS` searches for a shorter one, and proves a higher bound"
    else:
        yield f"gap {solution.gap:.1%} after {time_text(solution.seconds * 1e6)}; a longer --time-limit may close it"


def bounded(spec: PlanSpec, schedule: Schedule, costs: StageCosts, time_limit_s: int | None) -> Solution:
    """Return a schedule of kind ``optimal`` with its bound; with a time limit, the best that the solver finds.

    Raises:
        BadPlanError: OR-tools is missing (PP142), or the times are too fine for it (PP140).
    """
    from pipeproof.schedule.generators.solve import Solution

    work_of = stages_of(schedule.programs), spec.schedule.num_micro_batches, costs, spec.schedule.memory_limit
    try:
        if time_limit_s is None:
            work = make_workload(*work_of)
            ticks = work.least_makespan()
            return Solution(schedule, asap(schedule, costs).makespan, work.in_units(ticks))
        return _solved(work_of, time_limit_s)
    except UnfitSizesError as error:
        finding = UNFIT_SCHEDULE.finding(str(error), help=error.help)
        raise BadPlanAtError(finding, error.key) from error


def _solved(work_of: tuple[tuple[tuple[int, ...], ...], int, StageCosts, int | None], time_limit_s: int) -> Solution:
    from pipeproof.schedule.generators.solve import solve

    hint = "Ctrl-C keeps the best schedule so far"
    with showing_progress(f"solving; {hint}") as show:

        def on_progress(so_far: Progress) -> None:
            best, bound = (number_text(Fraction(time)) for time in (so_far.makespan, so_far.bound))
            show(f"solving: {best}, at best {bound}; {hint}", 0, 0)

        return solve(*work_of, time_limit_s=time_limit_s, on_progress=on_progress)


def require_optimal(kind: str, time_limit_s: int | None) -> None:
    """Refuse a time limit for a kind that has no search.

    Raises:
        click.UsageError: it is given for another kind than ``optimal``.
    """
    if time_limit_s is not None and kind != "optimal":
        raise click.UsageError(f"--time-limit is for the kind optimal, and this is {kind}")
