"""``pipeproof schedule show``: one schedule as a timeline with figures, as JSON, or as a schedule file."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from pipeproof.comm.generated import plan_schedule, stage_costs
from pipeproof.comm.sample_plan import sample_plan
from pipeproof.commands.line import console_for
from pipeproof.exit_status import ExitStatus
from pipeproof.schedule.asap import StageCosts, Timed, asap
from pipeproof.schedule.formats.inexpressible import InexpressibleError
from pipeproof.schedule.formats.write import WRITTEN_FORMATS, write_schedule
from pipeproof.schedule.kinds import SCHEDULE_KINDS, ScheduleKind
from pipeproof.schedule.programs import Schedule, stages_of
from pipeproof.sim.figures import RankFigures, figures_of, figures_to_json, number_to_json
from pipeproof.sim.svg import schedule_svg
from pipeproof.sim.terminal import figures_table, format_us, render_timeline
from pipeproof.sim.timed import timeline_of
from pipeproof.specs.finding import BadPlanError
from pipeproof.specs.load import LoadedPlan
from pipeproof.specs.problems import nearest_name
from pipeproof.verify.schedule_verdict import Outcome, ScheduleVerdict, judge_schedule


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person asks for; ``cost`` has keys of a plan's cost section. None is what the schedule takes itself."""

    kind: str
    num_ranks: int
    num_micro_batches: int
    num_chunks: int | None
    variant: str | None
    num_sequence_splits: int
    group_size: int | None
    memory_limit: int | None
    cost: Mapping[str, Fraction | tuple[Fraction, ...]]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A schedule with the plan that it is of, its times, and what the rules say if they were asked."""

    plan: LoadedPlan
    schedule: Schedule
    costs: StageCosts
    timed: Timed
    verdict: ScheduleVerdict | None


def show_schedule(wanted: Wanted, form: str, *, verify: bool, color: str) -> None:
    """Print a schedule in one of the forms of ``schedule_command.FORMATS``; exit 1 if the rules refuse it.

    Raises:
        click.UsageError: there is no such kind, it does not exist for these sizes, or the form cannot say it.
    """
    kind = _kind(wanted.kind)
    with _in_words_of_options():
        plan = _plan(wanted, kind, form)
        schedule = plan_schedule(plan.spec)
    if form in WRITTEN_FORMATS:
        try:
            click.echo(write_schedule(schedule, form), nl=False)
        except InexpressibleError as error:
            raise click.UsageError(f"--format {form}: {error}") from error
        return
    costs = stage_costs(plan.spec)
    if form == "svg":
        click.echo(schedule_svg(asap(schedule, costs), _title(plan)), nl=False)
        return
    verdict = judge_schedule(plan) if verify else None
    shown = _Shown(plan, schedule, costs, asap(schedule, costs), verdict)
    if form == "json":
        click.echo(json.dumps(_to_json(shown), indent=2))
    else:
        _render(shown, console_for(color=color))
    if verdict is not None and verdict.outcome is Outcome.WRONG:
        sys.exit(ExitStatus.FAILED)


def _kind(name: str) -> ScheduleKind:
    if name in SCHEDULE_KINDS:
        return SCHEDULE_KINDS[name]
    near = nearest_name(name, SCHEDULE_KINDS)
    mend = f"did you mean {near}?" if near else "`pipeproof schedule list` has them all"
    raise click.BadParameter(f"there is no schedule {name!r}; {mend}", param_hint="KIND")


def _plan(wanted: Wanted, kind: ScheduleKind, form: str) -> LoadedPlan:
    variant = wanted.variant
    if variant is None and kind.variants:
        variant = "fleet" if form == "fleet" and "fleet" in kind.variants else kind.variants[0]
    return sample_plan(
        wanted.kind,
        wanted.num_ranks,
        wanted.num_micro_batches,
        num_chunks=kind.min_chunks if wanted.num_chunks is None else wanted.num_chunks,
        cost=wanted.cost,
        variant=variant,
        num_sequence_splits=wanted.num_sequence_splits,
        micro_batch_group_size=wanted.group_size,
        memory_limit=wanted.memory_limit,
    )


_OPTION_OF_KEY = MappingProxyType(
    {
        "topology.pp": "-p",
        "schedule.kind": "KIND",
        "schedule.num_micro_batches": "-m",
        "schedule.num_chunks": "-v",
        "schedule.variant": "--variant",
        "schedule.num_sequence_splits": "--splits",
        "schedule.micro_batch_group_size": "--group-size",
        "schedule.memory_limit": "--memory-limit",
        "cost.forward_us": "--forward",
        "cost.backward_input_us": "--backward-input",
        "cost.backward_weight_us": "--backward-weight",
        "cost.overlapped_us": "--overlapped",
        "cost.p2p_latency_us": "--latency",
    }
)
"""The keys of a plan by which messages call what is an option here."""
_KEY_OF_NAME = MappingProxyType(
    {
        key.split(".")[1]: key
        for key in _OPTION_OF_KEY
        if key not in ("topology.pp", "schedule.kind", "schedule.variant")
    }
)
"""Names that stand without their section and are no words of plain English."""
_KEYS = re.compile(r"`?\b(?:" + "|".join(map(re.escape, _OPTION_OF_KEY)) + "|" + "|".join(_KEY_OF_NAME) + r")\b`?")


@contextmanager
def _in_words_of_options() -> Iterator[None]:
    """Turn what is wrong with the plan into a usage error that names options instead of keys."""
    try:
        yield
    except BadPlanError as error:
        lines = [f"{finding.message}\nhelp: {finding.help}" if finding.help else finding.message
                 for finding in error.findings]  # fmt: skip
        raise click.UsageError(_with_options("\n".join(lines))) from error


def _with_options(text: str) -> str:
    def option(match: re.Match[str]) -> str:
        key = match[0].strip("`")
        return _OPTION_OF_KEY[_KEY_OF_NAME.get(key, key)]

    return _KEYS.sub(option, text)


def _render(shown: _Shown, console: Console) -> None:
    timeline = timeline_of(shown.timed)
    render_timeline(timeline, console, _title(shown.plan), unit="")
    console.print()
    console.print(Text(_costs_text(shown.costs)), soft_wrap=True)
    console.print(figures_table((str(figures.rank), figures) for figures in figures_of(timeline)))
    if shown.verdict is None:
        return
    style = {Outcome.ROBUST: "green", Outcome.CONDITIONAL: "yellow", Outcome.WRONG: "bold red"}[shown.verdict.outcome]
    said = Text.assemble("deadlock: ", (shown.verdict.outcome, style), f": {shown.verdict.reason}")
    console.print(said, soft_wrap=True)


def _title(plan: LoadedPlan) -> str:
    spec, schedule = plan.spec, plan.spec.schedule
    parts = [schedule.kind if schedule.variant is None else f"{schedule.kind} ({schedule.variant})"]
    counts = {"rank": spec.topology.pp, "micro-batch": schedule.num_micro_batches}
    parts += [f"{count} {name}{'' if count == 1 else 'es' if name.endswith('h') else 's'}"
              for name, count in counts.items()]  # fmt: skip
    parts += [f"{schedule.num_chunks} stages a rank"] if schedule.num_chunks > 1 else []
    parts += [f"{schedule.num_sequence_splits} splits"] if schedule.num_sequence_splits > 1 else []
    return ", ".join(parts)


def _costs_text(costs: StageCosts) -> str:
    """The times that the picture is of; one where all stages have the same."""
    named = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    if costs.overlapped is not None:
        named["F beside B"] = costs.overlapped
    texts = []
    for name, times in named.items():
        shown = times[:1] if len(set(times)) == 1 else times
        texts.append(f"{name} {','.join(str(time) for time in shown)}")
    return f"times: {'; '.join(texts)}; B = I + W; latency {format_us(Fraction(costs.latency))}"


def _to_json(shown: _Shown) -> dict[str, Any]:
    """The form of ``--format json``; see ``docs/schemas/schedule.schema.json``."""
    spec, schedule = shown.plan.spec, shown.plan.spec.schedule
    stages = stages_of(shown.schedule.programs)
    figures = figures_of(timeline_of(shown.timed))
    return {
        "kind": schedule.kind,
        "variant": schedule.variant,
        "num_ranks": spec.topology.pp,
        "num_micro_batches": schedule.num_micro_batches,
        "num_chunks": schedule.num_chunks,
        "num_sequence_splits": schedule.num_sequence_splits,
        **number_to_json("makespan", Fraction(shown.timed.makespan)),
        "verdict": None if shown.verdict is None else _verdict_to_json(shown.verdict),
        "ranks": [_rank_to_json(shown, own, stages[own.rank]) for own in figures],
    }


def _verdict_to_json(verdict: ScheduleVerdict) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome.value,
        "backend": verdict.backend,
        "errors": [{"code": error.code, "message": error.message} for error in verdict.errors],
        "failing_models": [str(model) for model in verdict.failing],
    }


def _rank_to_json(shown: _Shown, figures: RankFigures, stages: tuple[int, ...]) -> dict[str, Any]:
    rank, timed = figures.rank, shown.timed
    begins = shown.schedule.pairs_of(rank)
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
                "overlaps": place in begins or place - 1 in begins,
            }
            for place, (op, start, end) in enumerate(ops)
        ],
    }
