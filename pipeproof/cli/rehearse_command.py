"""``pipeproof rehearse``: only the communication of a plan, on real processes.

It imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.cli.console import console_for, refusing_bad_plans, writable
from pipeproof.cli.number_text import fraction_of
from pipeproof.cli.path_types import PLACE
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.cli.rank_options import rank_options

if TYPE_CHECKING:
    from pipeproof.exec.rank.job_files import RunOptions


def _scale(context: click.Context, parameter: click.Parameter, value: str) -> Fraction:
    scale = fraction_of(value)
    if scale is None:
        raise click.BadParameter(f"{value[:40]!r} is not a number such as 1/8")
    if not 0 < scale <= 1 or scale.denominator > 2**16:
        raise click.BadParameter(f"{value!r} is not between 0 and 1, with a denominator up to 65536")
    return scale


@click.command()
@click.argument("plan", metavar="PLAN", type=PLACE)
@plan_options()
@click.option("--backend", type=click.Choice(["paddle", "torch"]), help="In place of the plan's `run.backend`.")
@click.option("--on", "device", type=click.Choice(["cpu", "gpu"]), help="In place of the plan's `run.device`.")
@click.option("--scale", default="1", show_default=True, callback=_scale, metavar="FRACTION",
              help="Divide sequences, or the hidden size, to scale tensors by this factor: 1/8.")  # fmt: skip
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write a JSON report.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write latency and bandwidth of every edge, and `cost.network` for the simulator.")  # fmt: skip
@rank_options("Rehearse")
def rehearse(
    plan: Path,
    source: PlanSource,
    backend: str | None,
    device: str | None,
    scale: Fraction,
    report_file: Path | None,
    output: Path | None,
    options: RunOptions,
) -> None:
    """Execute only the communication of a plan, on real processes, and check every element on arrival."""
    if options.share_gpus and output is not None:
        raise click.UsageError("--output: ranks that share a GPU communicate by sockets")
    from pipeproof.exec.rehearse.rehearsal_console import rehearse_command, rehearsed_plan
    from pipeproof.verify.check_plan import check

    with refusing_bad_plans("text", plan):
        with showing_progress(f"checking {plan}") as on_progress:
            report = check(rehearsed_plan(source.load(plan), backend, device, scale), on_progress=on_progress)
        status = rehearse_command(report, replace(options, scale=scale), console_for(), report_file, output)
    sys.exit(status)
