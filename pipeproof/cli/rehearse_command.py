"""``pipeproof rehearse``: only the communication of a plan, on real processes.

It imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.cli.console import console_for, refusing_bad_plans, writable
from pipeproof.cli.option_types import PLACE
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.cli.rank_options import rank_options

if TYPE_CHECKING:
    from pipeproof.exec.rank.job_files import RunOptions


@click.command()
@click.argument("plan", metavar="PLAN", type=PLACE)
@plan_options()
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write a JSON report.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write latency and bandwidth of every edge, and `cost.network` for the simulator.")  # fmt: skip
@rank_options("Rehearse")
def rehearse(
    plan: Path,
    source: PlanSource,
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
            report = check(rehearsed_plan(source.load(plan)), on_progress=on_progress)
        status = rehearse_command(report, replace(options, rehearses=True), console_for(), report_file, output)
    sys.exit(status)
