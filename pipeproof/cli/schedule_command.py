"""``pipeproof schedule``: the kinds of schedules, one of them on a timeline, and the solver.

Each command imports what it needs when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path

import click

from pipeproof.cli.console import format_option, refusing_bad_plans, writable
from pipeproof.cli.help_sections import LazyCommands, SuggestingGroup
from pipeproof.cli.path_types import PLACE
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
    """List and show pipeline schedules, convert their files, and search for the shortest one."""


@schedule.command("list")
@format_option()
def list_kinds(form: str) -> None:
    """List every kind of schedule, with the sizes for which it exists."""
    from pipeproof.cli.schedule_list import show_kinds

    show_kinds(form)


@schedule.command("show")
@click.argument("kind", metavar="KIND")
@click.option("-p", "--ranks", type=click.IntRange(1, 1024), required=True, help="Pipeline ranks.")
@click.option("-m", "--micro-batches", type=click.IntRange(1, 10**5), required=True, help="Micro-batches of a step.")
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
@click.option("--no-check", is_flag=True, help="Leave out the check of the schedule with its communication.")
@format_option()
@click.option("--as", "target", type=click.Choice(FORMATS),
              help="Instead of timeline and figures, print a schedule file in this format, or a picture.")  # fmt: skip
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
              help="Colours; auto: on a terminal, unless NO_COLOR is set.")  # fmt: skip
def show_kind(
    kind: str,
    *,
    ranks: int,
    micro_batches: int,
    chunks: int | None,
    variant: str | None,
    splits: int,
    group_size: int | None,
    memory_limit: int | None,
    cost: Times | None,
    forward: Times | None,
    backward_input: Times | None,
    backward_weight: Times | None,
    overlapped: Times | None,
    latency: Fraction,
    no_check: bool,
    form: str,
    target: str | None,
    color: str,
) -> None:
    """Show the schedule KIND for given sizes, with every operation as early as possible.

    `pipeproof schedule list` names the kinds. Times are exact, in any one unit, of one micro-batch on one stage.
    """
    from pipeproof.cli.schedule_show import ScheduleRequest, show_schedule, write_requested

    parts = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
    costs = {**_costs(cost, parts), "overlapped": overlapped, "p2p_latency": latency}
    request = ScheduleRequest(
        kind, ranks, micro_batches, chunks, variant, splits, group_size, memory_limit,
        {f"{name}_us": time for name, time in costs.items() if time is not None},
    )  # fmt: skip
    if target is not None:
        write_requested(request, target)
    else:
        show_schedule(request, form, verify=not no_check, color=color)


@schedule.command("solve")
@click.argument("plan", metavar="PLAN", type=PLACE)
@plan_options(device=True)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable, required=True,
              help="Write the schedule here, as PyTorch's CSV of computations.")  # fmt: skip
@click.option("--time-limit", "time_limit_s", type=click.IntRange(1, 10**6), default=60, show_default=True,
              help="Seconds of the solver's own clock, which counts its steps, so that results repeat; "
              "one takes about 1 to 10 real seconds.")  # fmt: skip
@click.option("--memory-limit", type=click.IntRange(1, 10**9),
              help="Most chunk activations that a rank may hold; overrides the plan's.")  # fmt: skip
def solve_for(plan: Path, *, source: PlanSource, output: Path, time_limit_s: int, memory_limit: int | None) -> None:
    """Search for the shortest schedule of a plan, for its times, placement and memory limit.

    The result is proved to be the shortest, or the gap is reported. For a plan with schedule.overlap, a second search
    has overlapped pairs, and the shortest step of those simulated is written. It needs OR-tools: pip install
    'pipeproof[solve]'.
    """
    with refusing_bad_plans("text", plan):
        from pipeproof.cli.schedule_solve import solve_plan

        solve_plan(plan, source.load(plan), output, time_limit_s, memory_limit)


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
