"""``pipeproof job file``: a job file for a launcher or a scheduler, as a template."""

from __future__ import annotations

from pathlib import Path

import click

from pipeproof.atomic_write import write_output
from pipeproof.cli.completion import PlanFile
from pipeproof.cli.console import echo, refusing_bad_plans, writable
from pipeproof.cli.plan_options import PlanSource, plan_options

LAUNCHERS = ("torchrun", "paddle", "slurm", "jobset", "trainjob", "ray", "nemo-run")
"""The rows of ``pipeproof.interop.job_files.job_launchers.LAUNCHERS``, which imports more."""


@click.command("file")
@click.argument("plan", metavar="PLAN", type=PlanFile())
@plan_options()
@click.option("--for", "launcher", type=click.Choice(LAUNCHERS), required=True,
              help="The launcher or scheduler that starts the job.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write to this file.")  # fmt: skip
@click.option("--gpus-per-host", type=click.IntRange(min=1),
              help="Ranks per host of a plan on GPUs; by default 8, or all ranks if they are fewer.")  # fmt: skip
@click.option("--processes-per-host", type=click.IntRange(min=1),
              help="Ranks per host of a plan on CPUs; same default.")  # fmt: skip
@click.option("--script", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
              help="Start this training script in place of `pipeproof run`.")  # fmt: skip
def job_file(
    plan: Path,
    source: PlanSource,
    launcher: str,
    output: Path | None,
    gpus_per_host: int | None,
    processes_per_host: int | None,
    script: str | None,
) -> None:
    """Write a job file that rehearses a plan and then trains, with one process per rank. Nothing is executed.

    The rehearsal is `pipeproof rehearse`. If it fails, the job ends before the training starts. Values that no plan has
    are placeholders at the top of the file, which standard error lists.
    """
    from pipeproof.interop.job_files.job import job_of_plan
    from pipeproof.interop.job_files.job_launchers import write_job_file

    with refusing_bad_plans("text", plan):
        loaded = source.load(plan)
    on_gpus = loaded.spec.run.device == "gpu"
    option, other = ("--gpus-per-host", "--processes-per-host")[:: 1 if on_gpus else -1]
    per_host, unfit = (gpus_per_host, processes_per_host)[:: 1 if on_gpus else -1]
    if unfit is not None:
        raise click.BadParameter(f"the plan runs on {loaded.spec.run.device.upper()}s: use {option}", param_hint=other)
    try:
        job = job_of_plan(loaded, str(plan), per_host, script, source.words)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error
    try:
        written = write_job_file(launcher, job)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--for") from error
    if output is None:
        click.echo(written.text, nl=False)
    else:
        with refusing_bad_plans("text", plan):
            write_output(output, written.text)
    for placeholder in written.placeholders:
        echo(f"fill in {placeholder}: {placeholder.meaning}", err=True)
