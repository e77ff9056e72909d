"""``pipeproof rehearse``: a plan's communication alone, on real processes.

It loads what it needs when it runs, as the commands of ``cli`` do.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.commands.line import console_for, parse_fault, refusing_bad_plans, seconds, writable

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
@click.argument("plan", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice(["paddle", "torch"]), help="In place of the plan's `run.backend`.")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), help="In place of the plan's `run.device`.")
@click.option("--scale", default="1", show_default=True, callback=_scale, metavar="FRACTION",
              help="Divide sequences, or the hidden size, so that tensors are smaller by this: 1/8.")  # fmt: skip
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write a JSON report.")  # fmt: skip
@click.option("--profile", "profile_file", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write latency and bandwidth of every edge, and `cost.network` for the simulator.")  # fmt: skip
@click.option("--unsafe", is_flag=True, help="Rehearse a plan that does not pass check, and report the damage.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=1.0), default=60.0, show_default=True,
              callback=seconds, help="Seconds without any progress after which it counts as hung.")  # fmt: skip
@click.option("--logs", type=click.Path(path_type=Path, file_okay=False), callback=writable,
              help="Keep what each worker printed here.")  # fmt: skip
@click.option("--inject", "fault", metavar="RANK:OP:ACTION", callback=parse_fault,
              help="Plant a failure: let RANK raise, die or hang at OP, as in 1:0F2:die.")  # fmt: skip
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
) -> None:
    """Carry out a plan's communication alone, for real, and look at every element on its arrival."""
    from pipeproof.exec.rehearse.command import rehearse_command
    from pipeproof.exec.rehearse.rehearse import RehearsalOptions
    from pipeproof.exec.rehearse.scale import rehearsed_plan
    from pipeproof.specs.load import load_plan
    from pipeproof.verify.check import check

    with refusing_bad_plans("text", plan):
        report = check(rehearsed_plan(load_plan(plan), backend, device, scale))
        options = RehearsalOptions(timeout_s, logs, fault, unsafe, scale)
        status = rehearse_command(report, options, console_for(), report_file, profile_file)
    sys.exit(status)
