"""``pipeproof convert``: a schedule in one format written in another."""

from __future__ import annotations

from pathlib import Path

import click

from pipeproof.commands.line import refusing_bad_plans, writable

FORMATS = ("text", "csv", "csv-comms", "fleet")
"""The formats that can be written; ``pipeproof.schedule.formats.write`` has the same, and loads more."""


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--to", "target", type=click.Choice(FORMATS), required=True, help="The format to write.")
@click.option("--from", "source", type=click.Choice(["auto", *FORMATS]), default="auto", show_default=True,
              help="The format of FILE; auto looks at it.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write to this file.")  # fmt: skip
@click.option("--only-computations", is_flag=True,
              help="Leave out what is no computation (transfers, waits, reductions), and attributes.")  # fmt: skip
def convert(file: Path, target: str, source: str, output: Path | None, *, only_computations: bool) -> None:
    """Write the schedule in FILE in another format.

    Formats are our text form (text), PyTorch's CSV without and with communication (csv, csv-comms) and the strings of
    Fleet's static scheduler, one line a rank (fleet). To csv-comms, computations alone get the transfers that PyTorch
    would add. What a format cannot say is an error: nothing is left out silently.
    """
    with refusing_bad_plans("text", file):
        text = _converted(file, source, target, only_computations=only_computations)
        if output is not None:
            output.write_text(text, encoding="utf-8")
    if output is None:
        click.echo(text, nl=False)


def _converted(file: Path, source: str, target: str, *, only_computations: bool) -> str:
    """The text of the converted schedule.

    Raises:
        ScheduleFileError: the file cannot be read, or the format to be written cannot say what it has.
    """
    from pipeproof.schedule.formats.foreign import load_schedule_file
    from pipeproof.schedule.formats.foreign_checks import Expected
    from pipeproof.schedule.formats.write import convert_schedule

    foreign = load_schedule_file(file, Expected(copies=True), format=source)
    return convert_schedule(foreign, target, only_computations=only_computations)
