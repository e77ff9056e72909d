"""``pipeproof schedule``: the kinds of schedules, and one of them, or that of a plan, on a timeline.

Each command imports what it needs when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pipeproof.cli.console import format_option, refusing_bad_plans
from pipeproof.cli.help_sections import LazyCommands, SuggestingGroup
from pipeproof.cli.option_types import is_plan
from pipeproof.cli.plan_options import PlanSource, plan_options

FORMATS = ("text", "csv", "csv-comms", "fleet", "svg")
"""Formats of a schedule in files: those of ``pipeproof schedule convert``, and a picture."""

Times = Fraction | tuple[Fraction, ...]
"""The time of every stage, or one for each."""


_TIME = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,12})?|[0-9]{1,12}/0*[1-9][0-9]{0,11}", re.ASCII)


def _times(context: click.Context, parameter: click.Parameter, value: str | None) -> Times | None:
    """Return exact times: integers, decimals or fractions, with commas between those of several stages."""
    if value is None:
        return None
    texts = value.split(",")
    invalid = next((text for text in texts if not _TIME.fullmatch(text)), None)
    if invalid is not None:
        raise click.BadParameter(f"{invalid!r} is not an exact time such as 1, 0.5 or 1/3")
    times = tuple(map(Fraction, texts))
    return times if len(times) > 1 else times[0]


def _time(context: click.Context, parameter: click.Parameter, value: str) -> Fraction:
    """Return one exact time."""
    time = _times(context, parameter, value)
    if not isinstance(time, Fraction):
        raise click.BadParameter("give one time")
    return time


@click.group(cls=SuggestingGroup)
def schedule() -> None:
    """List and show pipeline schedules, search for the shortest one, and convert their files."""


@schedule.command("list")
@format_option()
def list_kinds(form: str) -> None:
    """List every kind of schedule, with the sizes for which it exists."""
    from pipeproof.cli.schedule_list import show_kinds

    show_kinds(form)


@schedule.command("show")
@click.argument("name", metavar="KIND_OR_PLAN")
@plan_options(device=True)
@click.option("-p", "--ranks", type=click.IntRange(1, 1024), help="Pipeline ranks.")
@click.option("-m", "--micro-batches", type=click.IntRange(1, 10**5), help="Micro-batches of a step.")
@click.option("-v", "--chunks", type=click.IntRange(1, 1024),
              help="Stages on each rank; without it, the fewest that the schedule allows.")  # fmt: skip
@click.option("--variant", metavar="NAME", help="The tool whose order is used, where tools differ.")
@click.option("--splits", type=click.IntRange(1, 1024), default=1, show_default=True,
              help="Number of splits of each sequence.")  # fmt: skip
@click.option("--group-size", type=click.IntRange(1, 10**5),
              help="With variant megatron, micro-batches that go through a chunk before the next chunk.")  # fmt: skip
@click.option("--memory-limit", type=click.IntRange(1, 10**6),
              help="With optimal, the most chunk activations that a rank may hold.")  # fmt: skip
@click.option("--cost", metavar="F,I,W", callback=_times,
              help="Times of a stage's forward and of its backward's two parts; 1,1,1 without it.")  # fmt: skip
@click.option("--forward", metavar="TIME", callback=_times, help="Time of a forward, or a list by stage: 1,1,1/2,0.5.")
@click.option(
    "--backward-input", metavar="TIME", callback=_times, help="Time of the backward's part for inputs, likewise."
)
@click.option(
    "--backward-weight", metavar="TIME", callback=_times, help="Time of the backward's part for weights, likewise."
)
@click.option(
    "--overlapped",
    metavar="TIME",
    callback=_times,
    help="Time of a forward in parallel with a backward; without it, the sum of both.",
)
@click.option(
    "--latency",
    metavar="TIME",
    callback=_time,
    default="0",
    show_default=True,
    help="Time of a message between two ranks.",
)
@click.option("--time-limit", "time_limit_s", type=click.IntRange(1, 10**6),
              help="With optimal, search for a shorter schedule with OR-tools (extra `solve`): seconds of the solver's "
                   "own clock, which counts its steps, so that results repeat; one takes about 1 to 10 real "
                   "seconds.")  # fmt: skip
@click.option("--no-check", is_flag=True, help="Leave out the check of the schedule with its communication.")
@format_option()
@click.option("--as", "target", type=click.Choice(FORMATS),
              help="Instead of timeline and figures, print a schedule file in this format, or a picture.")  # fmt: skip
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
              help="Colours; auto: on a terminal, unless NO_COLOR is set.")  # fmt: skip
def show_kind(
    name: str, *, source: PlanSource, cost: Times | None, time_limit_s: int | None,
    no_check: bool, form: str, target: str | None, color: str, **sizes: Any,
) -> None:  # fmt: skip
    """Show the schedule KIND for given sizes, or that of a plan, with every operation as early as possible.

    `pipeproof schedule list` names the kinds. Times of a kind are exact, in any one unit, of one micro-batch on one
    stage; a plan has its own. For the kind optimal, the output has the bound that no schedule is below.
    """
    from pipeproof.cli.schedule_show import ScheduleRequest, of_kind, of_plan, show_schedule, write_shown
    from pipeproof.schedule.kinds import SCHEDULE_KINDS

    output, context = target or form, click.get_current_context()
    is_given = {size: context.get_parameter_source(size) is not ParameterSource.DEFAULT for size in ("cost", *sizes)}
    is_file = is_plan(Path(name)) or (name not in SCHEDULE_KINDS and Path(name).exists())
    if source.kind is not None or is_file:
        for size in (size for size, given in is_given.items() if given):
            raise click.UsageError(f"--{size.replace('_', '-')} goes with KIND: a plan has its own (--set KEY=VALUE)")
        with refusing_bad_plans("text", Path(name)):
            shown = of_plan(source.load(Path(name)), output, time_limit_s)
    else:
        if source.words:
            raise click.UsageError(f"{source.words[0]} goes with PLAN: {name} is a kind of schedule")
        missing = [option for option, size in (("-p", "ranks"), ("-m", "micro_batches")) if sizes[size] is None]
        if missing:
            raise click.UsageError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        parts = {part: sizes.pop(part) for part in ("forward", "backward_input", "backward_weight")}
        costs = {**_costs(cost, parts), "overlapped": sizes.pop("overlapped"), "p2p_latency": sizes.pop("latency")}
        request = ScheduleRequest(
            kind=name, num_ranks=sizes["ranks"], num_micro_batches=sizes["micro_batches"], num_chunks=sizes["chunks"],
            variant=sizes["variant"], num_sequence_splits=sizes["splits"], group_size=sizes["group_size"],
            memory_limit=sizes["memory_limit"],
            cost={f"{part}_us": time for part, time in costs.items() if time is not None},
        )  # fmt: skip
        shown = of_kind(request, output, time_limit_s)
    if target is not None:
        write_shown(shown, target)
    else:
        show_schedule(shown, form, verify=not no_check, color=color)


def _costs(cost: Times | None, parts: Mapping[str, Times | None]) -> Mapping[str, Times | None]:
    """Return the times of F, I and W: from ``--cost``, or from their own options."""
    if cost is None:
        return parts
    given = next((name for name, time in parts.items() if time is not None), None)
    if given is not None:
        raise click.UsageError(f"--cost and --{given.replace('_', '-')} give the same time")
    if not isinstance(cost, tuple) or len(cost) != len(parts):
        raise click.BadParameter("give three times, such as 1,1,1", param_hint="--cost")
    return dict(zip(parts, cost, strict=True))


schedule.commands = LazyCommands(
    {"convert": "convert_command:convert"},
    schedule.commands,
    "schedule",
)
