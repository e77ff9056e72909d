"""``pipeproof run`` as a person meets it: progress, messages, files, exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pipeproof.exec.compare import StepResult
from pipeproof.exec.gpus import sharing_line
from pipeproof.exec.judged import is_by_bound
from pipeproof.exec.kept import kept_lines
from pipeproof.exec.launch import WorkerFailedError
from pipeproof.exec.launched import launched_rank, run_launched
from pipeproof.exec.not_finite import NotFiniteError
from pipeproof.exec.record import RecordOptions
from pipeproof.exec.render import render_run, step_line
from pipeproof.exec.report import RunReport
from pipeproof.exec.run import NotVerifiedError, Progress, RunOptions, require_runnable, run
from pipeproof.exit_status import ExitStatus
from pipeproof.schedule.optable import OpGraph
from pipeproof.sim.timeline import Timeline
from pipeproof.specs.finding import PipeproofError
from pipeproof.specs.profile_file import Profile
from pipeproof.specs.render import render_text
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.told_to_end import TerminatedError, terminate_raises
from pipeproof.verify.check import Report


def run_command(
    report: Report,
    options: RunOptions,
    console: Console,
    report_file: Path | None,
    profile_file: Path | None,
    write_timeline: Callable[[Timeline, OpGraph], str] | None,
) -> int:
    """Run a checked plan, print what happens, write the files that were asked for; the exit status.

    ``write_timeline`` writes the measured timeline, and says so.
    """
    report = replace(report, subject=report.subject.unfolded())  # every process is a rank of its own
    rank = launched_rank()
    result: RunReport | None = None

    def carry_out() -> None:
        nonlocal result
        result = _run(report, options, console) if rank is None else _launched(rank, report, options, console)

    refused = "not run: the plan does not pass check (`--unsafe` runs it all the same)"
    status = status_of_failure(carry_out, report, console, refused)
    if status is not None:
        return status
    if result is None:  # another rank than 0 under a launcher of somebody else's
        return ExitStatus.OK
    if options.share_gpus:
        console.print(f"[bold yellow]{sharing_line(report.subject)}[/]", soft_wrap=True)
    kept = replace(options.kept, reference_from_state=result.reference_from_state)
    for line in kept_lines(kept, [step.step for step in result.steps]):
        console.print(line, soft_wrap=True)
    render_run(result, console)
    if report_file is not None:
        report_file.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    if profile_file is not None and result.profile is not None:
        profile_file.write_text(json.dumps(result.profile.to_json(), indent=2) + "\n")
        console.print(_profile_line(result.profile, profile_file), soft_wrap=True)
    elif profile_file is not None:
        console.print("no profile was written: what was executed is not what the graph says", soft_wrap=True)
    if options.record is not None:
        console.print(_record_line(options.record), soft_wrap=True)
    if write_timeline is not None:
        console.print(write_timeline(result.timeline, result.subject.graph), soft_wrap=True)
    return ExitStatus.OK if result.passed else ExitStatus.FAILED


def status_of_failure(carry_out: Callable[[], None], report: Report, console: Console, refused: str) -> int | None:
    """Do it, and say why it came to no result; the exit status then, None where it did.

    ``refused`` is what to say of a plan that does not pass check.
    """
    try:
        with terminate_raises():
            carry_out()
    except KeyboardInterrupt:
        console.print("interrupted: all processes were stopped")
        return ExitStatus.INTERRUPTED
    except TerminatedError as error:
        console.print(f"{error}: all processes were stopped")
        return 128 + error.signum
    except PipeproofError as error:
        render_text(error.findings, report.subject.source, console=console)
        if isinstance(error, NotVerifiedError):
            console.print(refused)
        return _status(error)
    return None


def _profile_line(profile: Profile, file: Path) -> str:
    steps = f"{profile.steps.counted} of {profile.steps.run} steps"
    short = "" if profile.messages or not profile.bare_messages else ", messages only from before the first step"
    return f"profile of {steps}{short} written to {file}; in a plan: `cost: {{profile: {file.name}, p2p: backend}}`"


def _record_line(record: RecordOptions) -> str:
    run, reference = record.directory / "run", record.directory / "reference"
    size = sum(file.stat().st_size for one in (run, reference) for file in one.rglob("*") if file.is_file())
    return f"recorded, {size / 1e6:.1f} MB; compare: pipeproof align {run} {reference}"


def _run(report: Report, options: RunOptions, console: Console) -> RunReport:
    require_runnable(report, options)
    graph, num_steps = report.subject.graph, report.subject.plan.spec.run.steps
    if report.certificate is None and options.unsafe:
        render_text(report.findings, report.subject.source, console=console)
        console.print("[bold yellow]running it all the same (--unsafe)[/]")
    console.print(f"{graph.num_ranks} processes and a reference, {num_steps} steps, digest {report.digest[:12]}")
    with console.status("starting") as status:

        def on_progress(progress: Progress) -> None:
            status.update(
                f"{progress.phase}; steps: ranks {progress.steps_done}, reference {progress.reference_steps} "
                f"of {num_steps}"
            )

        def on_step(step: StepResult) -> None:
            console.print(step_line(step, _bound(report)), soft_wrap=True)

        return run(report, options, on_progress, on_step)


def _bound(report: Report) -> float | None:
    """How far steps may be from the reference, None where they have its bits."""
    plan = report.subject.plan
    return parallel_bound(plan.spec) if is_by_bound(plan) else None


def _launched(rank: int, report: Report, options: RunOptions, console: Console) -> RunReport | None:
    return run_launched(
        rank,
        report,
        options,
        on_step=lambda step: console.print(step_line(step, _bound(report)), soft_wrap=True),
        on_hang=lambda finding: render_text([finding], report.subject.source, console=console),
    )


def _status(error: PipeproofError) -> int:
    if isinstance(error, WorkerFailedError):
        return ExitStatus.WORKER_FAILED
    if isinstance(error, NotVerifiedError | NotFiniteError):
        return ExitStatus.FAILED
    return ExitStatus.BAD_INPUT
