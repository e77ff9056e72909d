"""``pipeproof schedule convert``: a schedule in one format written in another."""

from __future__ import annotations

from pathlib import Path

import click

from pipeproof.atomic_write import write_output
from pipeproof.cli.console import refusing_bad_plans, require_separate_outputs, writable
from pipeproof.cli.progress import showing_progress

FORMATS = ("text", "csv", "fleet")
"""The formats that can be written, as in ``pipeproof.schedule.formats.read_schedule``, which imports more."""


@click.command()
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

    Formats are our text form (text), PyTorch's CSV (csv, and with communication csv-comms, which is only read) and the
    strings of Fleet's static scheduler, one line per rank (fleet). Operations that a format cannot express are an
    error: nothing is left out silently.
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
