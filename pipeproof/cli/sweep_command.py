"""``pipeproof sweep``: a plan with many values for some of its keys, every point checked and simulated.

It imports what it needs when it runs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pipeproof.cli.console import console_for, echo, format_option, refusing_bad_plans
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
@click.option("--sort", default="makespan", show_default=True, metavar="FIGURE",
              help="Figure to sort by: makespan, sequence (time per sequence), idle, most_idle or peak.")  # fmt: skip
@click.option("--columns", metavar="NAMES", help="Columns of the table, with commas: keys of the sweep and figures.")
@click.option("--top", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Rows of the table.")
@format_option("csv")
def sweep(
    plan: Path, source: PlanSource, workers: int | None, sort: str, columns: str | None, top: int,
    form: Literal["text", "json", "csv"],
) -> None:  # fmt: skip
    """Check and simulate a plan with many values for some of its keys, and list the best.

    A list is the values of a key: --set 'schedule.kind=[1f1b, zb_h1]'. All combinations are points; a list as a value
    is in a list of its own. A refused point is a result with its code.
    """
    with refusing_bad_plans("text", plan):
        points = _points(plan, source)
    shown = _columns(points, columns, sort)
    results = _results(points, workers)
    with refusing_bad_plans("text", plan):
        _show(points, results, form, shown, sort, top)
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


def _columns(sweep: Sweep, columns: str | None, sort: str) -> list[str]:
    """Return the columns of the table."""
    from pipeproof.analysis.sweep.results_table import DEFAULT_FIGURES, FIGURES
    from pipeproof.diagnostics.problems import nearest_name

    def require(name: str, known: tuple[str, ...], option: str) -> None:
        if name not in known:
            near = nearest_name(name, known)
            fix = f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"
            raise click.BadParameter(f"no column {name!r}; {fix}", param_hint=option)

    require(sort, tuple(FIGURES), "--sort")
    if columns is None:
        return [*sweep.keys, *dict.fromkeys((sort, *DEFAULT_FIGURES))]
    names = [name.strip() for name in columns.split(",")]
    for name in names:
        require(name, (*sweep.keys, *FIGURES), "--columns")
    return names


def _results(sweep: Sweep, workers: int | None) -> tuple[PointResult, ...]:
    from pipeproof.analysis.sweep.run_sweep import run_sweep

    try:
        with showing_progress("points") as on_progress:
            done = 0
            on_progress("points", done, len(sweep.points))

            def count(result: PointResult) -> None:
                nonlocal done
                done += 1
                on_progress("points", done, len(sweep.points))

            return run_sweep(sweep, num_workers=workers, on_result=count)
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        sys.exit(ExitStatus.INTERRUPTED)


def _show(
    sweep: Sweep, results: tuple[PointResult, ...], form: Literal["text", "json", "csv"],
    columns: list[str], sort: str, top: int,
) -> None:  # fmt: skip
    from pipeproof.analysis.sweep.results_table import render_table, sweep_to_csv, sweep_to_json

    match form:
        case "text":
            render_table(sweep, results, console_for(), columns=columns, sort=sort, top=top)
        case "json":
            click.echo(json.dumps(sweep_to_json(sweep, results), indent=2))
        case "csv":
            click.echo(sweep_to_csv(sweep, results), nl=False)
