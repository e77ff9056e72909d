"""``pipeproof run``: a verified plan on real processes, beside its reference."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.commands.complete import PlanFile
from pipeproof.commands.kept import kept_options
from pipeproof.commands.line import console_for, refusing_bad_plans, writable
from pipeproof.commands.ranks import rank_options
from pipeproof.commands.timeline_file import timeline_file, write_timeline

if TYPE_CHECKING:
    from pipeproof.exec.jobs import Fault
    from pipeproof.exec.kept import KeptState


def _record_directory(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    from pipeproof.align.record import RECORD_FILE

    for who in ("run", "reference"):
        if (value / who / RECORD_FILE).exists():
            raise click.BadParameter(f"{str(value)!r} holds a record already: name another directory, or remove it")
    return writable(context, parameter, value)


@click.command()
@click.argument("plan", metavar="PLAN", type=PlanFile())
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write a JSON report.")  # fmt: skip
@click.option("-o", "--trace", "output", type=click.Path(path_type=Path, dir_okay=False), callback=timeline_file,
              help="Write the measured timeline, in the forms of `simulate -o`.")  # fmt: skip
@click.option("--profile", "profile_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write measured times, for `cost: {profile: FILE}`; the reference runs afterwards.")  # fmt: skip
@click.option("--record", "record_directory", type=click.Path(path_type=Path, file_okay=False),
              callback=_record_directory, metavar="DIR",
              help="Record losses and gradients of the run and of the reference below DIR, for `align`.")  # fmt: skip
@click.option("--record-layers", is_flag=True,
              help="Record what each layer takes and gives, forward and backward, too.")  # fmt: skip
@click.option("--record-values", is_flag=True,
              help="Keep the tensors themselves, which are large, so that `align` can tell how far apart.")  # fmt: skip
@rank_options("Run")
@kept_options
def run(
    plan: Path,
    report_file: Path | None,
    output: Path | None,
    profile_file: Path | None,
    record_directory: Path | None,
    record_layers: bool,
    record_values: bool,
    unsafe: bool,
    timeout_s: float,
    logs: Path | None,
    fault: Fault | None,
    share_gpus: bool,
    kept: KeptState,
) -> None:
    """Run a verified plan on real processes and compare it with a single-process reference."""
    if share_gpus and profile_file is not None:
        raise click.UsageError("--profile: ranks that share a GPU take turns on it, and their times are of that")
    if record_directory is None and (record_layers or record_values):
        raise click.UsageError("--record-layers and --record-values say what --record DIR writes")
    from pipeproof.exec.command import run_command
    from pipeproof.exec.record import RecordOptions
    from pipeproof.exec.run import RunOptions
    from pipeproof.specs.load import load_plan
    from pipeproof.verify.check import check

    with refusing_bad_plans("text", plan):
        report = check(load_plan(plan))
    record = None if record_directory is None else RecordOptions(record_directory, record_layers, record_values)
    options = RunOptions(
        timeout_s,
        logs,
        fault,
        unsafe=unsafe,
        profile=profile_file is not None,
        record=record,
        share_gpus=share_gpus,
        kept=kept,
    )
    write = None if output is None else partial(write_timeline, output, f"{plan.stem}, measured")
    with refusing_bad_plans("text", plan):
        status = run_command(report, options, console_for(), report_file, profile_file, write)
    sys.exit(status)
