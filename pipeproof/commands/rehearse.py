"""``pipeproof rehearse``: a plan's communication alone, on real processes.

It loads what it needs when it runs, as the commands of ``cli`` do.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.commands.complete import PlanFile
from pipeproof.commands.line import console_for, refusing_bad_plans, writable
from pipeproof.commands.ranks import rank_options

if TYPE_CHECKING:
    from pipeproof.exec.jobs import Fault


def _scale(context: click.Context, parameter: click.Parameter, value: str) -> Fraction:
    try:
        scale = Fraction(value)
    except (ValueError, ZeroDivisionError):
        raise click.BadParameter(f"{value!r} is not a number such as 1/8") from None
    if not 0 < scale <= 1 or scale.denominator > 2**16:
        raise click.BadParameter(f"{value!r} is not between 0 and 1, with a denominator up to 65536")
    return scale


@click.command()
@click.argument("plan", metavar="PLAN", type=PlanFile())
@click.option("--backend", type=click.Choice(["paddle", "torch"]), help="In place of the plan's `run.backend`.")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), help="In place of the plan's `run.device`.")
@click.option("--scale", default="1", show_default=True, callback=_scale, metavar="FRACTION",
              help="Divide sequences, or the hidden size, so that tensors are smaller by this: 1/8.")  # fmt: skip
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write a JSON report.")  # fmt: skip
@click.option("-o", "--profile", "profile_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write latency and bandwidth of every edge, and `cost.network` for the simulator.")  # fmt: skip
@rank_options("Rehearse")
def rehearse(
    plan: Path,
    backend: str | None,
    device: str | None,
    scale: Fraction,
    report_file: Path | None,
    profile_file: Path | None,
    unsafe: bool,
    timeout_s: float,
    logs: Path | None,
    fault: Fault | None,
    share_gpus: bool,
) -> None:
    """Carry out a plan's communication alone, for real, and look at every element on its arrival."""
    if share_gpus and profile_file is not None:
        raise click.UsageError("--profile: ranks that share a GPU take turns on it, and their edges are sockets")
    from pipeproof.exec.rehearse.command import rehearse_command
    from pipeproof.exec.rehearse.rehearse import RehearsalOptions
    from pipeproof.exec.rehearse.scale import rehearsed_plan
    from pipeproof.specs.load import load_plan
    from pipeproof.verify.check import check

    with refusing_bad_plans("text", plan):
        report = check(rehearsed_plan(load_plan(plan), backend, device, scale))
        options = RehearsalOptions(timeout_s, logs, fault, unsafe, scale, share_gpus)
        status = rehearse_command(report, options, console_for(), report_file, profile_file)
    sys.exit(status)
