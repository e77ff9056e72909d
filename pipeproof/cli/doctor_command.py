"""``pipeproof doctor``: versions and backend behaviour on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

from pipeproof.atomic_write import write_json
from pipeproof.cli.console import console_for, echo, format_option, writable
from pipeproof.diagnostics.install_command import install_extra
from pipeproof.exit_status import ExitStatus


@click.command()
@format_option()
@click.option("--backend", type=click.Choice(["paddle", "torch"]), default="paddle", show_default=True,
              help="The framework whose transports are probed.")  # fmt: skip
@click.option("--on", "device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
              help="gloo on the CPU, or NCCL on one or two GPUs.")  # fmt: skip
@click.option("--write-costs", "costs", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Instead measure the GPU (products, attention, memory, host) and write its curves as the "
              "section `cost` of a plan.")  # fmt: skip
def doctor(form: Literal["text", "json"], backend: str, device: str, costs: Path | None) -> None:
    """Show versions, and compare the behaviour of a backend on this machine with our table."""
    if costs is not None:
        if backend != "torch" or device != "gpu":
            raise click.UsageError("--write-costs: a GPU is measured with PyTorch; add --backend torch --on gpu")
        sys.exit(_write_costs(costs))
    from pipeproof.exec.measure.doctor import doctor_to_json, render_doctor, run_doctor

    report = run_doctor(backend=backend, device=device)
    if form == "json":
        click.echo(json.dumps(doctor_to_json(report), indent=2))
    else:
        render_doctor(report, console_for())
    sys.exit(report.exit_status)


def _write_costs(path: Path) -> ExitStatus:
    """Measure the first GPU and write its table."""
    from pipeproof.exec.measure.device_costs import UnknownDeviceError, device_named, measure_costs

    try:
        import torch
    except ImportError:
        echo(f"error: PyTorch is not installed: {install_extra('torch')}", err=True)
        return ExitStatus.BAD_INPUT
    if not torch.cuda.is_available():
        echo("error: PyTorch sees no GPU: use a machine with one, and a build of PyTorch for it", err=True)
        return ExitStatus.BAD_INPUT
    try:
        name = device_named(torch.cuda.get_device_name(0))
    except UnknownDeviceError as error:
        echo(f"error: {error}", err=True)
        return ExitStatus.BAD_INPUT
    table = measure_costs(torch.device("cuda", 0), name)
    analytic = {"device": name, "dtype": "bfloat16", "table": table.model_dump(mode="json")}
    write_json(path, {"cost": {"analytic": analytic}})
    echo(f"written to {path}: merge its section `cost` into a plan")
    return ExitStatus.OK
