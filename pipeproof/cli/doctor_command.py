"""``pipeproof doctor``: versions and backend behaviour on this machine."""

from __future__ import annotations

import json
import sys
from typing import Literal

import click

from pipeproof.cli.console import console_for, format_option


@click.command()
@format_option()
@click.option("--backend", type=click.Choice(["paddle", "torch"]), default="paddle", show_default=True,
              help="The framework whose transports are probed.")  # fmt: skip
@click.option("--on", "device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
              help="gloo on the CPU, or NCCL on one or two GPUs.")  # fmt: skip
def doctor(form: Literal["text", "json"], backend: str, device: str) -> None:
    """Show versions, and compare the behaviour of a backend on this machine with our table."""
    from pipeproof.exec.measure.doctor import doctor_to_json, render_doctor, run_doctor

    report = run_doctor(backend=backend, device=device)
    if form == "json":
        click.echo(json.dumps(doctor_to_json(report), indent=2))
    else:
        render_doctor(report, console_for())
    sys.exit(report.exit_status)
