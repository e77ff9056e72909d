"""Terminal output of ``pipeproof run``: progress, a line per step, findings, the verdict, files, exit status."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from pipeproof.atomic_write import write_json
from pipeproof.diagnostics.finding import Finding, PipeproofError
from pipeproof.diagnostics.text_output import render_text
from pipeproof.diagnostics.units import size_text
from pipeproof.exec.compare.compare_gradients import GradientResult, StepResult, is_checked_by_bound
from pipeproof.exec.compare.step_losses import main_loss, module_losses
from pipeproof.exec.launch.run_plan import NotVerifiedError, run, status_of
from pipeproof.exec.launch.run_report import LogClock, RunReport
from pipeproof.exec.launch.supervisor import JobEndedError
from pipeproof.exec.rank.checkpointing import checkpoint_lines
from pipeproof.exec.rank.gpu_assignment import shared_gpus_text
from pipeproof.exec.rank.job_files import RecordOptions, RunOptions, end_process
from pipeproof.exec.store.launcher_table import launched_rank
from pipeproof.exec.store.run_codes import WORLD_SIZE
from pipeproof.exit_status import ExitStatus
from pipeproof.schedule.op_table import OpGraph
from pipeproof.signals import TerminatedError, terminate_raises
from pipeproof.sim.timeline import Timeline
from pipeproof.specs.profile_file import Profile
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.verify.check_plan import Report
from pipeproof.views.tables import print_table


def run_command(
    report: Report,
    options: RunOptions,
    console: Console,
    report_file: Path | None,
    profile_file: Path | None,
    write_timeline: Callable[[Timeline, OpGraph], str] | None,
    *,
    verbose: bool = False,
) -> int:
    """Run a checked plan, print its progress, write the requested files; return the exit status.

    ``write_timeline`` writes the measured timeline and returns the line to print about it; ``verbose`` also prints
    equal values.
    """
    refused = _refuse_launcher(report)
    if refused is not None:
        render_text([refused], report.subject.source, console=console)
        return ExitStatus.BAD_INPUT
    report = replace(report, subject=report.subject.unfolded())  # every process runs one rank
    refusal = "not run: the plan does not pass check (`--unsafe` runs it without a certificate)"
    result = result_or_status(lambda: _run(report, options, console), report, options, console, refusal)
    if isinstance(result, int):
        return result
    checkpoint = replace(options.checkpoint, reference_from_state=result.reference_from_state)
    for line in checkpoint_lines(checkpoint, [step.step for step in result.steps]):
        console.print(line, soft_wrap=True)
    render_run(result, console, verbose=verbose)
    if report_file is not None:
        write_json(report_file, result.to_json())
    if profile_file is not None and result.profile is not None:
        write_json(profile_file, result.profile.to_json())
        console.print(_profile_line(result.profile, profile_file), soft_wrap=True)
    elif profile_file is not None:
        console.print("no profile was written: the executed log differs from the graph", soft_wrap=True)
    if options.record is not None:
        console.print(_record_line(options.record), soft_wrap=True)
    if write_timeline is not None:
        console.print(write_timeline(result.timeline, result.subject.graph), soft_wrap=True)
    return ExitStatus.OK if result.passed else ExitStatus.FAILED


def _refuse_launcher(report: Report) -> Finding | None:
    """PP907: a launcher started this process as one of several; ``run`` starts all ranks itself."""
    try:
        launched = launched_rank(os.environ, report.subject.plan.spec.run.backend)
    except PipeproofError:  # variables that name no rank
        return None
    if launched is None:
        return None
    return WORLD_SIZE.finding(
        f"`run` starts all ranks itself, on one host, and {launched.launcher.name} started this process as rank "
        f"{launched.rank} of {launched.world_size}",
        help="start it once, without the launcher; under the launcher, `pipeproof rehearse` executes the plan's "
        "communication, and `pipeproof.torch.Pipeline` or `pipeproof.paddle.Pipeline` trains your own script",
    )


def result_or_status(
    execute: Callable[[], _Result], report: Report, options: RunOptions, console: Console, refusal: str
) -> _Result | int:
    """Return the result of ``execute``; if it fails, print the reason and return the exit status.

    ``refusal`` is the line for a plan that does not pass check.
    """
    try:
        with terminate_raises():
            result = execute()
    except KeyboardInterrupt:
        console.print("interrupted: all processes were stopped")
        return ExitStatus.INTERRUPTED
    except TerminatedError as error:
        console.print(f"{error}: all processes were stopped")
        return 128 + error.signum
    except PipeproofError as error:
        render_text(error.findings, report.subject.source, console=console)
        if isinstance(error, NotVerifiedError):
            console.print(refusal)
        if isinstance(error, JobEndedError):
            end_process(status_of(error))
        return status_of(error)
    if options.share_gpus:
        console.print(f"[bold yellow]{shared_gpus_text(report.subject)}[/]", soft_wrap=True)
    return result


def _profile_line(profile: Profile, file: Path) -> str:
    steps = f"{profile.steps.counted} of {profile.steps.run} steps"
    idle = "" if profile.messages or not profile.bare_messages else ", messages only from before the first step"
    return f"profile of {steps}{idle} written to {file}; in a plan: `cost: {{profile: {file.name}, p2p: backend}}`"


def _record_line(record: RecordOptions) -> str:
    run, reference = record.directory / "run", record.directory / "reference"
    size = sum(file.stat().st_size for record in (run, reference) for file in record.rglob("*") if file.is_file())
    return f"recorded, {size_text(size)}; compare: pipeproof state align {run} {reference}"


def _run(report: Report, options: RunOptions, console: Console) -> RunReport:
    plan, num_ranks = report.subject.plan, report.subject.graph.num_ranks
    num_steps = plan.spec.run.steps
    bound = parallel_bound(plan.spec) if is_checked_by_bound(plan) else None
    with console.status("starting") as status:

        def on_start() -> None:
            if report.certificate is None:
                render_text(report.findings, report.subject.source, console=console)
                console.print("[bold yellow]running the plan without a certificate (--unsafe)[/]")
            console.print(f"{num_ranks} processes and a reference, {num_steps} steps, digest {report.digest[:12]}")

        def on_progress(phase: str, steps_done: int, reference_steps: int) -> None:
            status.update(f"{phase}; steps: ranks {steps_done}, reference {reference_steps} of {num_steps}")

        def on_step(step: StepResult) -> None:
            console.print(step_line(step, bound), soft_wrap=True)

        def on_note(note: Finding) -> None:
            render_text([note], report.subject.source, console=console)

        return run(report, options, on_progress, on_step, on_start, on_note)


def step_line(step: StepResult, bound: float | None = None) -> str:
    """Return the line of one step: its loss, the reference's loss, the number of bitwise equal gradients, other losses.

    With a ``bound`` the line has distances to the reference in place of bitwise comparisons.
    """
    if bound is not None:
        farthest = max((gradient.unpartitioned_max_rel_diff for gradient in step.gradients), default=0.0)
        colour = "green" if step.agrees(bound) and farthest <= bound else "red"
        return (
            f"step {step.step}  loss {float(main_loss(step.loss)):.9f}  "
            f"reference {float(main_loss(step.reference_loss)):.9f}  distance [{colour}]{step.loss_distance:.2g}[/]  "
            f"gradients [{colour}]{farthest:.2g}[/] at most  bound {bound:.2g}"
        )
    equal = sum(gradient.bitwise for gradient in step.gradients)
    verdict = "bitwise equal" if step.loss_is_bitwise else "[red]differs[/]"
    colour = "green" if equal == len(step.gradients) else "red"
    line = (
        f"step {step.step}  loss {float(main_loss(step.loss)):.9f}  "
        f"reference {float(main_loss(step.reference_loss)):.9f}  "
        f"{verdict}  gradients [{colour}]{equal}/{len(step.gradients)}[/] bitwise"
    )
    line += "".join(f"  {name} {float(loss):.9f}" for name, loss in module_losses(step.loss).items())
    if step.routers is None:
        return line
    losses = "".join(f"  {name} {float(step.routers.of_run[name]):.9f}" for name in step.routers.losses)
    return f"{line}{losses}  routers {'bitwise equal' if step.routers.bitwise else '[red]differ[/]'}"


_MOST_ROWS = 80
"""Most differing parameters that the table shows. The JSON report has all."""


def _print_gradients(step: StepResult, bound: float | None, console: Console, *, verbose: bool) -> None:
    """Print the gradients of one step that differ from the reference, or are beyond the bound if there is one."""
    shown, title = step.gradients, f"gradients of step {step.step}"
    if not verbose:
        differ = [gradient for gradient in shown if not _is_accepted(gradient, bound)]
        if not differ:
            return
        shown = tuple(differ[:_MOST_ROWS])
        first = f"the first {len(shown)} of " if len(shown) < len(differ) else ""
        title += f": {first}{len(differ)} of {len(step.gradients)} differ (`--verbose` and `--report` have all)"
    criterion = "bits" if bound is None else "bound"
    rows = [
        (
            str(gradient.stage),
            gradient.name,
            gradient.md5[:8],
            _verdict(gradient, bound),
            f"{gradient.max_rel_diff:.2g}",
            f"{gradient.unpartitioned_max_rel_diff:.2g}",
        )
        for gradient in shown
    ]
    console.print(title)
    print_table(
        (">stage", "parameter", "md5", criterion, ">rel. diff.", ">to unpartitioned"), rows, console, optional=("md5",)
    )


def _verdict(gradient: GradientResult, bound: float | None) -> Text:
    """Return a gradient's cell under ``bits`` or ``bound``."""
    accepted, refused = ("equal", "differ") if bound is None else ("within", "beyond")
    return Text(accepted) if _is_accepted(gradient, bound) else Text(refused, style="red")


def _is_accepted(gradient: GradientResult, bound: float | None) -> bool:
    return gradient.bitwise if bound is None else gradient.unpartitioned_max_rel_diff <= bound


def render_run(report: RunReport, console: Console, *, verbose: bool = False) -> None:
    """Print the findings, the gradients of the last step that differ, and the verdict.

    With ``verbose``, or if the run fails, print how both sides computed; with ``verbose``, print all gradients.
    """
    render_text(report.findings, report.subject.source, console=console)
    bound = report.parallel_bound if report.is_checked_by_bound else None
    _print_gradients(report.steps[-1], bound, console, verbose=verbose)
    if verbose or not report.passed:
        _print_sides(report, console)
    verb = "equals" if not report.log_findings else "[red]differs from[/]"
    console.print(f"executed log {verb} the verified graph{_logged_steps(report)}{CLOCKS[report.clock]}")
    if report.passed and report.is_checked_by_bound:
        gradients = " and every gradient of the first step" if report.starts_from_initial_weights else ""
        console.print(f"[bold green]matches[/]: every loss{gradients}, within the bound")
    elif report.passed:
        console.print("[bold green]matches[/]: every loss and every gradient, bit for bit")
    elif report.matches:
        console.print("[bold yellow]matches, but was not verified[/]")
    else:
        console.print("[bold red]does not match[/] the reference")


def _print_sides(report: RunReport, console: Console) -> None:
    """Print how the reference and the ranks computed, and the bound on their distance."""
    spec = report.subject.plan.spec
    if report.is_checked_by_bound:
        console.print("reference: one process, unpartitioned model, each step from the ranks' own weights")
        console.print(f"distance to it: stated bound {report.parallel_bound:.3g}")
    elif report.parallel_bound:
        console.print("reference: one process, adding in the order of the plan")
        console.print(f"distance to the plain unpartitioned model: stated bound {report.parallel_bound:.3g}")
    else:
        console.print("reference: one process, unpartitioned model, micro-batch by micro-batch")
    threads = f"{report.threads} compute thread{'s' if report.threads != 1 else ''} per process"
    device = threads if spec.run.device == "cpu" else "a GPU per process"
    main = f", main gradients in {spec.run.weight_dtype}" if spec.run.weight_dtype != spec.run.dtype else ""
    console.print(f"{spec.run.dtype}{main}, {device}, accumulation {report.accumulation}")


CLOCKS: Mapping[LogClock, str] = MappingProxyType(
    {
        "host": "",
        "device": "; its times are the GPU's",
        "issue": "; its times are when the host issued each operation (`--profile` has the GPU's)",
    }
)
"""Remark about the times of a log, by its clock."""


def _logged_steps(report: RunReport) -> str:
    """Remark that later steps were replayed: only the first two have a log."""
    if report.num_logged_steps in (None, len(report.steps)):
        return ""
    first, last = report.steps[0].step, report.steps[-1].step
    second = first + 1
    return f" in steps {first} and {second}; steps {second} to {last} replay the CUDA graph captured in step {second}"


_Result = TypeVar("_Result")
