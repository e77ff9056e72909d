"""``pipeproof fleet`` as a person meets it: both runs, a line per step, the verdict."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from pipeproof.exec.command import status_of_failure
from pipeproof.exec.fleet.report import FleetReport
from pipeproof.exec.fleet.run import Recording, run_fleet
from pipeproof.exec.fleet.suits import require_suited
from pipeproof.exec.run import Progress, RunOptions, require_runnable, run
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.render import render_text
from pipeproof.verify.check import Report


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The watchdog's seconds, where worker output is kept, where the report goes, and by what Fleet is recorded."""

    timeout_s: float
    logs: Path | None
    report_file: Path | None
    recording: Recording | None = None


def fleet_command(report: Report, options: FleetOptions, console: Console) -> int:
    """Run a checked plan with our executor and with Fleet, and compare; the exit status."""
    report = replace(report, subject=report.subject.unfolded())
    result: FleetReport | None = None

    def carry_out() -> None:
        nonlocal result
        result = _both(report, options, console)

    status = status_of_failure(carry_out, report, console, "not run: the plan does not pass check")
    if status is not None:
        return status
    assert result is not None
    _render(result, console)
    if options.report_file is not None:
        options.report_file.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    if options.recording is not None:
        where = options.recording.directory
        console.print(f"recorded; judge it: pipeproof check --log {where} --plan PLAN", soft_wrap=True)
    return ExitStatus.OK if result.matches else ExitStatus.FAILED


def _both(report: Report, options: FleetOptions, console: Console) -> FleetReport:
    run_options = RunOptions(timeout_s=options.timeout_s, logs=None if options.logs is None else options.logs / "ours")
    require_suited(report.subject)
    require_runnable(report, run_options)
    steps = report.subject.plan.spec.run.steps
    ranks = report.subject.graph.num_ranks
    console.print(f"{ranks} processes and a reference, {steps} steps, first ours, then Fleet's own pipeline")
    with console.status("starting") as status:

        def progressed(who: str, progress: Progress) -> None:
            done = f"ranks {progress.steps_done}, reference {progress.reference_steps} of {steps}"
            status.update(f"{who}: {progress.phase}; steps: {done}")

        ours = run(report, run_options, lambda progress: progressed("ours", progress), lambda _: None)
        logs = None if options.logs is None else options.logs / "fleet"
        fleet = run_fleet(
            report, options.timeout_s, logs, lambda progress: progressed("Fleet", progress), options.recording
        )
        return FleetReport(ours, fleet)


def _render(result: FleetReport, console: Console) -> None:
    if not result.ours.passed:
        render_text(result.ours.findings, result.ours.subject.source, console=console)
    render_text(result.findings, result.ours.subject.source, console=console)
    for ours, theirs in zip(result.ours.steps, result.fleet.steps, strict=True):
        equal = sum(gradient.bitwise for gradient in theirs.gradients)
        farthest = max((gradient.max_rel_diff for gradient in theirs.gradients), default=0.0)
        colour = "green" if result.is_right(theirs) else "red"
        console.print(
            f"step {ours.step}  ours {float(ours.loss):.9f}  Fleet {float(theirs.loss):.9f}  "
            f"reference {float(theirs.reference_loss):.9f}  gradients of Fleet "
            f"[{colour}]{equal}/{len(theirs.gradients)}[/] bitwise, farthest {farthest:.2g}",
            soft_wrap=True,
        )
    if result.loss_bound:
        why = "it divides each by their number, where the plan multiplies"
        console.print(f"losses of Fleet may be {result.loss_bound:.2g} from the reference's: {why}", soft_wrap=True)
    verdict = "[red]not the plan's[/]" if result.order_findings else "the plan's, in its order"
    console.print(
        f"{result.fleet.scheduler}: {result.num_computed} forwards and backwards and {result.num_messages} messages a "
        f"step are {verdict}",
        soft_wrap=True,
    )
    if result.matches:
        console.print("[bold green]matches[/]: ours and Fleet train the same, bit for bit in every gradient")
    else:
        console.print("[bold red]does not match[/]")
