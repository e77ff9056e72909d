"""``pipeproof schedule``: list the kinds, show a schedule on a timeline, and convert schedule files.

The libraries of each command are imported when it runs.
"""

from __future__ import annotations

from pathlib import Path

import click

from pipeproof.atomic_write import write_output
from pipeproof.cli.console import format_option, refusing_bad_plans, require_separate_outputs, writable
from pipeproof.cli.help_sections import SuggestingGroup
from pipeproof.cli.option_types import is_plan
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress

FORMATS = ("text", "csv", "fleet")
"""The formats that can be written, as in ``pipeproof.schedule.formats.read_schedule``, which imports more."""


@click.group(cls=SuggestingGroup)
def schedule() -> None:
    """List and show pipeline schedules, search for the shortest one, and convert their files."""


@schedule.command("list")
def list_kinds() -> None:
    """List every kind of schedule, with the sizes for which it exists."""
    from pipeproof.cli.schedule_list import show_kinds

    show_kinds()


@schedule.command("show")
@click.argument("name", metavar="KIND_OR_PLAN")
@plan_options(device=True)
@click.option("-p", "--ranks", type=click.IntRange(1, 1024), help="Pipeline ranks.")
@click.option("-m", "--micro-batches", type=click.IntRange(1, 10**5), help="Micro-batches of a step.")
@click.option("-v", "--chunks", type=click.IntRange(1, 1024),
              help="Stages on each rank; without it, the fewest that the schedule allows.")  # fmt: skip
@click.option("--time-limit", "time_limit_s", type=click.IntRange(1, 10**6),
              help="With optimal, search for a shorter schedule with OR-tools (extra `solve`). The limit is in seconds "
                   "of the solver's deterministic clock, each 1 to 10 real seconds; results repeat.")  # fmt: skip
@click.option("--no-check", is_flag=True, help="Do not check the schedule with its communication.")
@format_option()
@click.option("--as", "target", type=click.Choice([*FORMATS, "svg"]),
              help="Instead of timeline and figures, print a schedule file in this format, or a picture.")  # fmt: skip
def show_kind(
    name: str, *, source: PlanSource, ranks: int | None, micro_batches: int | None, chunks: int | None,
    time_limit_s: int | None, no_check: bool, form: str, target: str | None,
) -> None:  # fmt: skip
    """Show the schedule KIND for given sizes, or the schedule of a plan, with every operation as early as possible.

    `pipeproof schedule list` names the kinds. Times are exact, in any unit, of one micro-batch on one stage: F, I and W
    take 1, or the times of --set, such as cost.forward_us=[1, 1/2]. --set also takes keys of the schedule, such as
    schedule.variant=megatron. For the kind optimal, the output has a lower bound of all schedules' times.
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
        show_schedule(shown, form, verify=not no_check)


@schedule.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--as", "target", type=click.Choice(FORMATS), required=True, help="The format to write.")
@click.option("--from", "source", type=click.Choice(["auto", *FORMATS, "csv-comms"]), default="auto", show_default=True,
              help="The format of FILE; auto detects it.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write to this file.")  # fmt: skip
@click.option("--only-computations", is_flag=True,
              help="Keep computations only: leave out transfers, waits, reductions and attributes.")  # fmt: skip
def convert(file: Path, target: str, source: str, output: Path | None, *, only_computations: bool) -> None:
    """Write the schedule in FILE in another format.

    Formats are our text form (text), PyTorch's CSV (csv; with communication csv-comms, which can only be read) and the
    strings of Fleet's static scheduler, one line per rank (fleet). Nothing is left out silently: an operation that the
    format cannot express is an error.
    """
    require_separate_outputs()
    with refusing_bad_plans("text", file), showing_progress(f"converting {file}"):
        text = _converted(file, source, target, only_computations=only_computations)
        if output is not None:
            write_output(output, text)
    if output is None:
        click.echo(text, nl=False)


def _converted(file: Path, source: str, target: str, *, only_computations: bool) -> str:
    """Return the text of the converted schedule.

    Raises:
        ScheduleFileError: the file cannot be read, or the target format cannot express it.
    """
    from pipeproof.schedule.formats.read_schedule import convert_schedule, load_schedule_file
    from pipeproof.schedule.formats.schedule_size_checks import Expected

    foreign = load_schedule_file(file, Expected(copies=True), format=source)
    return convert_schedule(foreign, target, only_computations=only_computations)
