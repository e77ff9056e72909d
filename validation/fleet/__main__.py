"""``python -m validation.fleet PLAN``: a plan's layers trained by Fleet's own pipeline and by ours."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from pipeproof.cli.console import console_for, refusing_bad_plans, writable
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.cli.rank_options import logs, timeout


@click.command()
@click.argument("plan", metavar="PLAN", type=click.Path(path_type=Path))
@plan_options()
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write a JSON report.")  # fmt: skip
@click.option("--log", "record_to", type=click.Path(path_type=Path, file_okay=False), callback=writable,
              help="Record the communication of each of Fleet's ranks here, for `check --log`.")  # fmt: skip
@timeout
@logs
def fleet(
    plan: Path, source: PlanSource, report_file: Path | None, record_to: Path | None, timeout_s: float,
    logs: Path | None,
) -> None:  # fmt: skip
    """Run a plan's layers with Fleet's own pipeline and with ours, and compare losses, gradients and messages."""
    if record_to is not None and record_to.is_dir() and any(record_to.glob("rank_*.jsonl")):
        raise click.BadParameter(f"{str(record_to)!r} has logs already", param_hint="--log")
    from pipeproof.verify.check_plan import check
    from validation.fleet.fleet_console import FleetOptions, fleet_command

    with refusing_bad_plans("text", plan):
        with showing_progress(f"checking {plan}") as on_progress:
            report = check(source.load(plan), on_progress=on_progress)
        status = fleet_command(report, FleetOptions(timeout_s, logs, report_file, record_to), console_for())
    sys.exit(status)


if __name__ == "__main__":
    fleet()
