"""``pipeproof init``: a new plan with comments, from flags or from answers on a terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pipeproof.atomic_write import write_output
from pipeproof.cli.completion import complete_schedule
from pipeproof.cli.console import console_for, echo, refusing_bad_plans, writable
from pipeproof.cli.import_command import DeviceParam
from pipeproof.cli.set_option import set_option
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.diagnostics.problems import KeyPath
    from pipeproof.verify.check_plan import Report

_COUNT = click.IntRange(1, 2**20)
_CPU = "cpu"


class _Device(DeviceParam):
    """A device, or ``cpu``: the answer for none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name."""
        return _CPU if value == _CPU else super().convert(value, param, ctx)


class _Schedule(click.ParamType):  # type: ignore[type-arg]  # generic in some of click's releases
    """A kind of schedule; the kinds are imported when one is given."""

    name = "schedule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the kind."""
        from pipeproof.diagnostics.problems import nearest_name
        from pipeproof.schedule.kinds import SCHEDULE_KINDS

        if value not in SCHEDULE_KINDS:
            near = nearest_name(value, SCHEDULE_KINDS)
            fix = f"did you mean {near}?" if near else "`pipeproof schedule list` has them all"
            self.fail(f"there is no schedule {value!r}; {fix}", param, ctx)
        return str(value)


@dataclass(frozen=True, slots=True)
class _Question:
    """A question on the terminal; ``default`` is None where the flag has to be given without one."""

    text: str
    type: click.ParamType[Any]
    default: str | int | None = None


_QUESTIONS: dict[str, _Question] = {
    "model": _Question(
        "Model: small (to try it on this machine), a name such as llama3-70b, or a config.json", click.STRING, "small"
    ),
    "gpus": _Question("Number of devices, or of processes on CPUs", _COUNT, 4),
    "device": _Question("Device (h100, ...), or cpu to run on this machine", _Device(), _CPU),
    "framework": _Question("Framework that will train it", click.Choice(["megatron", "torch", "paddle"]), "megatron"),
    "tp": _Question("Tensor-parallel ranks", _COUNT, 1),
    "cp": _Question("Context-parallel ranks", _COUNT, 1),
    "ep": _Question("Expert-parallel ranks", _COUNT, 1),
    "pp": _Question("Pipeline ranks", _COUNT, 4),
    "schedule": _Question("Schedule", _Schedule(), "1f1b"),
    "micro_batch_size": _Question("Sequences in a micro-batch", _COUNT, 1),
    "global_batch": _Question("Sequences in a step, over all replicas", click.IntRange(1, 10**9), 16),
}
"""In the order in which they are asked."""

_REQUIRED = ("model", "gpus", "pp", "global_batch")


def _may_ask() -> bool:
    """True if a person sits at the terminal: neither input nor questions go to a file or a pipe."""
    return sys.stdin.isatty() and sys.stderr.isatty()


@click.command()
@click.option("--model", metavar="MODEL",
              help="`small`, the name of a public model such as llama3-70b, a model's config.json, or a plan with the "
                   "model.")  # fmt: skip
@click.option("--gpus", type=_COUNT, help="Number of devices.")
@click.option("--device", type=DeviceParam(), help="The device; without it, a plan that runs on CPUs.")
@click.option("--framework", type=click.Choice(["megatron", "torch", "paddle"]),
              help="Framework that will train it; by default megatron with --device, paddle without it.")  # fmt: skip
@click.option("--tp", type=_COUNT, help="Tensor-parallel ranks; 1 without it.")
@click.option("--cp", type=_COUNT, help="Context-parallel ranks; 1 without it.")
@click.option("--ep", type=_COUNT, help="Expert-parallel ranks; 1 without it.")
@click.option("--pp", type=_COUNT, help="Pipeline ranks; data-parallel ranks are what the other axes leave.")
@click.option("--schedule", type=_Schedule(), metavar="SCHEDULE", shell_complete=complete_schedule,
              help="Kind of schedule; 1f1b without it. `pipeproof schedule list` has them all.")  # fmt: skip
@click.option("-v", "--chunks", type=click.IntRange(1, 1000),
              help="Stages on each rank; without it, the fewest that the schedule allows.")  # fmt: skip
@click.option("--micro-batch-size", type=_COUNT, help="Sequences in a micro-batch; 1 without it.")
@click.option("--global-batch", type=click.IntRange(1, 10**9), help="Sequences in a step, over all replicas.")
@set_option
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), default=Path("plan.yaml"),
              show_default=True, callback=writable, help="Write the plan to this file.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def init(output: Path, force: bool, settings: dict[KeyPath, object], chunks: int | None, **given: Any) -> None:
    """Write a new plan with a comment on each key, from flags or from answers.

    On a terminal, what no flag gives is asked. Elsewhere --model, --gpus, --pp and --global-batch are required. The
    plan is written only if it passes the check.
    """
    if output.exists() and not force:
        raise click.UsageError(f"{output} exists: give --force to replace it, or another file with -o")
    answers = _answers(given)
    if answers.get("framework") is None:
        answers["framework"] = "paddle" if answers.get("device") is None else "megatron"
    with refusing_bad_plans("text", output):
        from pipeproof.interop.new_plan import AnswerError, Answers, load_new, new_plan, new_plan_text
        from pipeproof.verify.check_plan import check

        known = {name: value for name, value in answers.items() if value is not None}
        request = Answers(**known, chunks=chunks, settings=settings)
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


def _answers(given: dict[str, Any]) -> dict[str, Any]:
    """Return the value of each question: that of its flag, the answer on a terminal, or its default.

    Raises:
        click.UsageError: a required flag is missing, and there is no terminal to ask at.
    """
    answers = dict(given)
    if not _may_ask():
        missing = [_option(name) for name in _REQUIRED if answers[name] is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise click.UsageError(f"{', '.join(missing)} {verb} missing, and there is no terminal to ask at")
        return answers
    for name, question in _QUESTIONS.items():
        if answers[name] is None and _is_asked(name, answers):
            answers[name] = click.prompt(
                question.text, type=question.type, default=question.default, err=True,
                show_choices=len(getattr(question.type, "choices", ())) < 5,
            )  # fmt: skip
    if answers["device"] == _CPU:
        answers["device"] = None
    return answers


def _is_asked(name: str, answers: dict[str, Any]) -> bool:
    """A run on CPUs has no choice of a framework's schedules, and only models with experts have expert parallelism."""
    if name == "framework":
        return bool(answers["device"] != _CPU)
    return name != "ep" or _has_experts(str(answers["model"]))


def _has_experts(model: str) -> bool:
    from pipeproof.diagnostics.finding import PipeproofError
    from pipeproof.interop.new_plan import SMALL_MODEL
    from pipeproof.interop.tune_models import tune_model

    try:
        return model != SMALL_MODEL and bool(tune_model(model).plan.spec.gpt.moe)
    except PipeproofError:
        return False  # refused with the other answers


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refuse(report: Report) -> NoReturn:
    from pipeproof.diagnostics.text_output import render_text

    render_text(report.errors, report.subject.source, console=console_for(stderr=True))
    echo("error: the plan does not pass the check, and was not written", err=True)
    sys.exit(ExitStatus.FAILED)
