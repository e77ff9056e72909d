"""``python -m validation.board``: predictions next to published and own measurements."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Literal

import click

from pipeproof.atomic_write import write_output
from pipeproof.cli.console import console_for, echo, format_option, note_kind, writable
from pipeproof.cli.option_types import GivenPath
from pipeproof.cli.progress import showing_progress
from pipeproof.exit_status import ExitStatus


def _is_svg(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix != ".svg":
        raise click.BadParameter(f"{str(value)!r}: the picture is SVG; give a name that ends with .svg")
    return writable(context, parameter, value)


@click.command("measurements")
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=GivenPath(exists=True, path_type=Path))
@click.option("--only", "sets", multiple=True, metavar="NAME",
              type=click.Choice(["mlperf", "vtrain", "megatron", "megatron-bridge", "dualpipe", "own"]),
              help="Only this set of measurements; repeatable.")  # fmt: skip
@click.option("--rows", is_flag=True, help="Print each measurement, not only the errors of each group.")
@click.option("--terms", is_flag=True,
              help="Print where the time of each group's rows goes, and how their errors go with it.")  # fmt: skip
@click.option("--fit", is_flag=True, help="Fit the constants again and write fitted.json (10 minutes of CPU time).")
@format_option()
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), callback=_is_svg,
              help="Draw predicted / measured of each group as SVG.")  # fmt: skip
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write all tables as a Markdown page.")  # fmt: skip
@click.option("--plans", type=click.Path(path_type=Path, file_okay=False), callback=writable,
              help="Write the plan of each measurement into this directory, for `pipeproof simulate`.")  # fmt: skip
def measurements(
    directories: tuple[Path, ...],
    sets: tuple[str, ...],
    rows: bool,
    terms: bool,
    fit: bool,
    form: Literal["text", "json"],
    plot: Path | None,
    page: Path | None,
    plans: Path | None,
) -> None:
    """Compare predictions with published measurements: errors per group.

    Without DIR, reads the measurements of this directory. With DIR, reads these directories or files: CSV and JSON in
    the formats that validation/results/accuracy.md describes.
    """
    from validation.board.accuracy_board import MEASUREMENTS, Predictor, read_measurements
    from validation.board.board_output import board_page, board_to_json, print_board, print_coverages, print_terms
    from validation.board.measurement import MeasurementFileError

    try:
        files, unread = read_measurements(directories or (MEASUREMENTS,))
    except MeasurementFileError as error:
        echo(f"error: {error}", err=True)
        for directory in directories:
            note_kind(directory)
        sys.exit(ExitStatus.BAD_INPUT)
    for line in unread:
        echo(f"note: left out: {line}", err=True)
    chosen = [row for file in files if not sets or file.set in sets for row in file.rows]
    if not chosen:
        echo(f"error: no measurements of the set {', '.join(sets)}; it is in another directory", err=True)
        sys.exit(ExitStatus.BAD_INPUT)
    if fit:
        from validation.board.constants import FITTED
        from validation.board.fit_constants import fit_constants, fitted_to_text

        with showing_progress("fitting"), ProcessPoolExecutor() as pool:
            write_output(FITTED, fitted_to_text(fit_constants(chosen, pool)))
        echo(f"constants written to {FITTED}", err=True)
        return
    predictor = Predictor()
    with showing_progress("predicting") as on_progress:
        predictions = []
        for number, measurement in enumerate(chosen):
            on_progress("predicting", number, len(chosen))
            predictions.append(predictor.predict(measurement))
    if form == "json":
        click.echo(json.dumps(board_to_json(predictions, unread), indent=2))
    else:
        print_board(predictions, console_for(), rows=rows)
        print_coverages([found for row in predictions if (found := predictor.residual(row))], console_for())
        if terms:
            print_terms(predictions, list(map(predictor.terms, chosen)), console_for())
    if plot is not None:
        from validation.board.accuracy_picture import board_picture

        write_output(plot, board_picture(predictions))
        echo(f"picture written to {plot}", err=True)
    if page is not None:
        write_output(page, board_page(predictions))
        echo(f"page written to {page}", err=True)
    if plans is not None:
        from validation.board.board_output import write_plans

        echo(f"{write_plans(predictions, plans)} plans written to {plans}", err=True)


if __name__ == "__main__":
    measurements()
