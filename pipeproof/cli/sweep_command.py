"""``pipeproof sweep``: a plan with many values for some of its keys, every point checked and simulated.

The libraries are imported when it runs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pipeproof.cli.console import console_for, format_option, refusing_bad_plans
from pipeproof.cli.option_types import PLACE
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.analysis.sweep.evaluate_point import PointResult
    from pipeproof.analysis.sweep.sweep_points import Sweep


@click.command()
@click.argument("plan", metavar="PLAN", type=PLACE)
@plan_options(device=True)
@click.option("--workers", type=click.IntRange(1, 4096), help="Processes; by default one per processor.")
@click.option("--sort", type=click.Choice(["makespan", "sequence", "idle", "most_idle", "peak"]), default="makespan",
              show_default=True, help="Figure to sort by; sequence is the time per sequence.")  # fmt: skip
@click.option("--top", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Rows of the table.")
@format_option()
def sweep(
    plan: Path, source: PlanSource, workers: int | None, sort: str, top: int, form: Literal["text", "json"],
) -> None:  # fmt: skip
    """Check and simulate a plan with many values for some of its keys, and list the best.

    A list has the values of one key: --set 'schedule.kind=[1f1b, zb_h1]'. All combinations are points; if a value is a
    list, write [[..]]. A refused point is a result with its code.
    """
    with refusing_bad_plans("text", plan):
        points = _points(plan, source)
    results = _results(points, workers)
    with refusing_bad_plans("text", plan):
        from pipeproof.analysis.sweep.results_table import render_table, sweep_to_json

        if form == "json":
            click.echo(json.dumps(sweep_to_json(points, results), indent=2))
        else:
            render_table(points, results, console_for(), sort=sort, top=top)
    sys.exit(ExitStatus.WORKER_FAILED if any(result.status == "failed" for result in results) else ExitStatus.OK)


def _points(plan: Path, source: PlanSource) -> Sweep:
    """Return the points of the plan: lists of ``--set`` are values to combine, others are set in all points."""
    from pipeproof.analysis.sweep.sweep_points import sweep_of_plan
    from pipeproof.diagnostics.problems import dotted

    values = {dotted(key): value for key, value in source.settings.items() if isinstance(value, list)}
    if not values:
        raise click.UsageError("no key has several values: give --set KEY=[VALUE, ..], such as topology.pp=[2, 4]")
    others = {key: value for key, value in source.settings.items() if not isinstance(value, list)}
    loaded = replace(source, settings=others).load(plan)
    return sweep_of_plan(loaded.spec.model_dump(mode="json", exclude_unset=True), str(plan), values)


def _results(sweep: Sweep, workers: int | None) -> tuple[PointResult, ...]:
    from pipeproof.analysis.sweep.run_sweep import run_sweep

    done, total = count(1), len(sweep.points)
    with showing_progress("points") as on_progress:
        on_progress("points", 0, total)
        return run_sweep(sweep, num_workers=workers, on_result=lambda _: on_progress("points", next(done), total))
