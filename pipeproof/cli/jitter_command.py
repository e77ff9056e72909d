"""``pipeproof schedule jitter``: many simulations of a plan with random times of operations.

It imports what it needs when it runs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pipeproof.cli.completion import PlanFile
from pipeproof.cli.console import console_for, echo, format_option, not_nan, picture_file, refusing_bad_plans
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress

if TYPE_CHECKING:
    from pipeproof.analysis.jitter.noise import Distribution


def _number(text: str) -> float:
    """A finite number, or NaN for anything else."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _slow_ranks(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    slow = {}
    for value in values:
        rank, _, factor = value.partition("=")
        if not (rank.isascii() and rank.isdecimal()) or math.isnan(_number(factor)):
            raise click.BadParameter(f"{value!r} is not RANK=FACTOR, such as 3=1.2")
        slow[int(rank)] = _number(factor)
    return slow


def _stragglers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[float, float]:
    if value is None:
        return 0.0, 1.0
    probability, _, factor = value.partition(":")
    if math.isnan(_number(probability)) or math.isnan(_number(factor)):
        raise click.BadParameter(f"{value!r} is not PROBABILITY:FACTOR, such as 0.01:1.5")
    return _number(probability), _number(factor)


@click.command()
@click.argument("plan", metavar="PLAN", type=PlanFile())
@plan_options(device=True)
@click.option("--runs", "num_runs", type=click.IntRange(1, 1_000_000), default=200, show_default=True,
              help="Number of simulated steps.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of all random numbers.")
@click.option("--cv", "compute_cv", type=click.FloatRange(0, 10), default=0.05, show_default=True, callback=not_nan,
              help="Standard deviation of each computation, over its mean.")  # fmt: skip
@click.option("--network-cv", type=click.FloatRange(0, 10), default=0.0, show_default=True, callback=not_nan,
              help="The same of each message and collective.")  # fmt: skip
@click.option("--distribution", type=click.Choice(["lognormal", "gamma"]), default="lognormal", show_default=True)
@click.option("--slow", multiple=True, metavar="RANK=FACTOR", callback=_slow_ranks,
              help="Let the computations of this global rank take FACTOR times as long, in every run.")  # fmt: skip
@click.option("--stragglers", metavar="PROBABILITY:FACTOR", callback=_stragglers,
              help="Let each rank be slow by FACTOR in a run with this probability, as in 0.01:1.5.")  # fmt: skip
@click.option("--delays/--no-delays", default=True, show_default=True,
              help="Report the sensitivity to delays; one simulation for each rank and channel.")  # fmt: skip
@format_option()
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=picture_file,
              help="Draw the runs as png, svg or pdf (extra plot).")  # fmt: skip
def jitter(
    plan: Path,
    source: PlanSource,
    num_runs: int,
    seed: int,
    compute_cv: float,
    network_cv: float,
    distribution: Distribution,
    slow: dict[int, float],
    stragglers: tuple[float, float],
    delays: bool,
    form: Literal["text", "json"],
    output: Path | None,
) -> None:
    """Simulate a plan many times with random times and slow ranks: quantiles, and sensitivity to delays."""
    with refusing_bad_plans(form, plan), showing_progress(f"lowering {plan}") as on_progress:
        from pipeproof.analysis.jitter.delays import delays_of
        from pipeproof.analysis.jitter.jitter_report import jitter_to_json, render_jitter
        from pipeproof.analysis.jitter.noise import Noise
        from pipeproof.analysis.jitter.noisy_runs import run_jitter
        from pipeproof.comm.lower import blaming_plan, lower_loaded

        probability, factor = stragglers
        try:
            noise = Noise(compute_cv, network_cv, distribution, slow, probability, factor, seed)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        loaded = source.load(plan)
        with blaming_plan(loaded):
            lowered = lower_loaded(loaded)
            unknown = [rank for rank in slow if rank >= lowered.mesh.num_ranks]
            if unknown:
                message = f"{unknown[0]}: the plan has ranks 0..{lowered.mesh.num_ranks - 1}"
                raise click.BadParameter(message, param_hint="--slow")
            on_progress(f"simulating {num_runs:,} runs", 0, 0)
            runs = run_jitter(lowered, noise, num_runs)
            on_progress("delaying ranks and channels", 0, 0)
            late = delays_of(lowered) if delays else None
        if output is not None:
            from pipeproof.analysis.jitter.jitter_plot import plot_jitter

            plot_jitter(runs, late, plan.stem, output, loaded.spec.cost.placeholder_note)
    if form == "json":
        click.echo(json.dumps(jitter_to_json(runs, late, loaded.spec.cost.source), indent=2))
    else:
        render_jitter(runs, late, console_for(), loaded.spec.cost.placeholder_note)
    if output is not None:
        echo(f"picture written to {output}", err=True)
