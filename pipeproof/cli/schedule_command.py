"""``pipeproof schedule``: the kinds of schedules, and one of them, or that of a plan, on a timeline.

Each command imports what it needs when it runs.
"""

from __future__ import annotations

from pathlib import Path

import click

from pipeproof.cli.console import format_option, refusing_bad_plans
from pipeproof.cli.help_sections import LazyCommands, SuggestingGroup
from pipeproof.cli.option_types import is_plan
from pipeproof.cli.plan_options import PlanSource, plan_options

FORMATS = ("text", "csv", "fleet", "svg")
"""Formats of a schedule in files: those of ``pipeproof schedule convert``, and a picture."""


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
    name: str, *, source: PlanSource, ranks: int | None, micro_batches: int | None, chunks: int | None,
    time_limit_s: int | None, no_check: bool, form: str, target: str | None, color: str,
) -> None:  # fmt: skip
    """Show the schedule KIND for given sizes, or that of a plan, with every operation as early as possible.

    `pipeproof schedule list` names the kinds. Times of a kind are exact, in any one unit, of one micro-batch on one
    stage: F, I and W take 1, or what --set gives, such as cost.forward_us=[1, 1/2]. --set also takes keys of the
    schedule, such as schedule.variant=megatron. For the kind optimal, the output has the bound that no schedule is
    below.
    """
    from pipeproof.cli.schedule_show import of_kind, of_plan, show_schedule, write_shown
    from pipeproof.schedule.kinds import SCHEDULE_KINDS

    output = target or form
    sizes = {"--ranks": ranks, "--micro-batches": micro_batches, "--chunks": chunks}
    is_file = is_plan(Path(name)) or (name not in SCHEDULE_KINDS and Path(name).exists())
    if source.kind is not None or is_file:
        for option in (option for option, size in sizes.items() if size is not None):
            raise click.UsageError(f"{option} goes with KIND: a plan has its own (--set KEY=VALUE)")
        with refusing_bad_plans("text", Path(name)):
            shown = of_plan(source.load(Path(name)), output, time_limit_s)
    else:
        source.refuse_import_options()
        missing = [option for option, size in (("-p", ranks), ("-m", micro_batches)) if size is None]
        if ranks is None or micro_batches is None:
            raise click.UsageError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
        with refusing_bad_plans("text", Path(name)):
            shown = of_kind(name, (ranks, micro_batches, chunks), source.settings, output, time_limit_s)
    if target is not None:
        write_shown(shown, target)
    else:
        show_schedule(shown, form, verify=not no_check, color=color)


schedule.commands = LazyCommands(
    {"convert": "convert_command:convert"},
    schedule.commands,
    "schedule",
)
