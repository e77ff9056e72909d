"""``pipeproof init``: a new plan with comments, from flags."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pipeproof.atomic_write import write_output
from pipeproof.cli.console import console_for, echo, refusing_bad_plans, writable
from pipeproof.cli.option_types import DEVICE, SCHEDULE, set_option
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.diagnostics.problems import KeyPath
    from pipeproof.verify.check_plan import Report

_COUNT = click.IntRange(1, 2**20)


_REQUIRED = ("model", "gpus", "pp", "global_batch")


@click.command()
@click.option("--model", metavar="MODEL",
              help="`small`, the name of a public model such as llama3-70b, a model's config.json, or a plan with the "
                   "model.")  # fmt: skip
@click.option("--gpus", type=_COUNT, help="Number of devices.")
@click.option("--device", type=DEVICE, help="The device; without it, a plan that runs on CPUs.")
@click.option("--framework", type=click.Choice(["megatron", "torch", "paddle"]),
              help="Framework that will train it; by default megatron with --device, paddle without it.")  # fmt: skip
@click.option("--tp", type=_COUNT, help="Tensor-parallel ranks; 1 without it.")
@click.option("--cp", type=_COUNT, help="Context-parallel ranks; 1 without it.")
@click.option("--ep", type=_COUNT, help="Expert-parallel ranks; 1 without it.")
@click.option("--pp", type=_COUNT, help="Pipeline ranks; data-parallel ranks are what the other axes leave.")
@click.option("--schedule", type=SCHEDULE, metavar="SCHEDULE",
              help="Kind of schedule; 1f1b without it. `pipeproof schedule list` has them all.")  # fmt: skip
@click.option("-v", "--chunks", type=click.IntRange(1, 1000),
              help="Stages on each rank; without it, the fewest that the schedule allows.")  # fmt: skip
@click.option("--micro-batch-size", type=_COUNT, help="Sequences in a micro-batch; 1 without it.")
@click.option("--global-batch", type=click.IntRange(1, 10**9), help="Sequences in a step, over all replicas.")
@set_option
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default=Path("plan.yaml"),
              show_default=True, callback=writable, help="Write the plan to this file.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def init(output: Path, force: bool, settings: dict[KeyPath, object], chunks: int | None, **options: Any) -> None:
    """Write a new plan with a comment on each key.

    --model, --gpus, --pp and --global-batch are required. The plan is written only if it passes the check.
    """
    if output.exists() and not force:
        raise click.UsageError(f"{output} exists: give --force to replace it, or another file with -o")
    missing = [_option(name) for name in _REQUIRED if options[name] is None]
    if missing:
        raise click.UsageError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if options["framework"] is None:
        options["framework"] = "paddle" if options["device"] is None else "megatron"
    with refusing_bad_plans("text", output):
        from pipeproof.interop.new_plan import AnswerError, Answers, load_new, new_plan, new_plan_text
        from pipeproof.verify.check_plan import check

        answers = {name: value for name, value in options.items() if value is not None}
        request = Answers(**answers, chunks=chunks, settings=settings)
        try:
            plan, assumptions = new_plan(request)
        except AnswerError as error:
            raise click.BadParameter(str(error), param_hint=_option(error.name)) from error
        text = new_plan_text(plan, request, str(output))
        report = check(load_new(plan, output, text))
        if report.errors:
            _refuse(report)
        write_output(output, text)
    for assumption in assumptions:
        echo(f"note: {assumption}", err=True)
    spec = report.subject.plan.spec
    echo(
        f"{output} written: {spec.topology.num_ranks} ranks, {spec.num_stages} stages, "
        f"{spec.schedule.num_micro_batches} micro-batches; it passes the check"
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse(report: Report) -> NoReturn:
    from pipeproof.diagnostics.text_output import render_text

    render_text(report.errors, report.subject.source, console=console_for(stderr=True))
    echo("error: the plan does not pass the check, and was not written", err=True)
    sys.exit(ExitStatus.FAILED)
