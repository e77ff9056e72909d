"""Terminal output of ``python -m validation.fleet``: both runs, a line per step, the verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from pipeproof.atomic_write import write_json
from pipeproof.diagnostics.text_output import render_text
from pipeproof.exec.launch.job_files import RunOptions
from pipeproof.exec.run_console import result_or_status
from pipeproof.exec.run_plan import Progress, run
from pipeproof.exit_status import ExitStatus
from pipeproof.verify.check_plan import Report
from validation.fleet.fleet_run import FleetReport, run_fleet
from validation.fleet.fleet_support import require_fleet_support


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Watchdog's seconds, directory for worker output, file of the report, directory for Fleet's recorded calls."""

    timeout_s: float
    logs: Path | None
    report_file: Path | None
    record_directory: Path | None = None


def fleet_command(report: Report, options: FleetOptions, console: Console) -> int:
    """Run a checked plan with pipeproof's executor and with Fleet, and compare; return the exit status."""
    report = replace(report, subject=report.subject.unfolded())
    refusal = "not run: the plan does not pass check"
    result = result_or_status(lambda: _run_both(report, options, console), report, console, refusal)
    if isinstance(result, int):
        return result
    _render(result, console)
    if options.report_file is not None:
        write_json(options.report_file, result.to_json())
    if options.record_directory is not None:
        console.print(
            f"recorded; to check: pipeproof check --log {options.record_directory} --plan PLAN", soft_wrap=True
        )
    return ExitStatus.OK if result.matches else ExitStatus.FAILED


def _run_both(report: Report, options: FleetOptions, console: Console) -> FleetReport:
    run_options = RunOptions(timeout_s=options.timeout_s, logs=None if options.logs is None else options.logs / "ours")
    require_fleet_support(report.subject)
    steps = report.subject.plan.spec.run.steps
    ranks = report.subject.graph.num_ranks
    title = f"{ranks} processes and a reference, {steps} steps, first pipeproof, then Fleet's own pipeline"
    with console.status("starting") as status:

        def progressed(who: str, progress: Progress) -> None:
            done = f"ranks {progress.steps_done}, reference {progress.reference_steps} of {steps}"
            status.update(f"{who}: {progress.phase}; steps: {done}")

        ours = run(
            report,
            run_options,
            lambda progress: progressed("pipeproof", progress),
            lambda _: None,
            lambda: console.print(title),
        )
        logs = None if options.logs is None else options.logs / "fleet"
        fleet = run_fleet(
            report, options.timeout_s, logs, lambda progress: progressed("Fleet", progress), options.record_directory
        )
        return FleetReport(ours, fleet)


def _render(result: FleetReport, console: Console) -> None:
    if not result.ours.passed:
        render_text(result.ours.findings, result.ours.subject.source, console=console)
    render_text(result.findings, result.ours.subject.source, console=console)
    for ours, theirs in zip(result.ours.steps, result.fleet.steps, strict=True):
        equal = sum(gradient.bitwise for gradient in theirs.gradients)
        farthest = max((gradient.max_rel_diff for gradient in theirs.gradients), default=0.0)
        colour = "green" if result.matches_reference(theirs) else "red"
        console.print(
            f"step {ours.step}  pipeproof {float(ours.loss):.9f}  Fleet {float(theirs.loss):.9f}  "
            f"reference {float(theirs.reference_loss):.9f}  gradients of Fleet "
            f"[{colour}]{equal}/{len(theirs.gradients)}[/] bitwise, farthest {farthest:.2g}",
            soft_wrap=True,
        )
    if result.loss_bound:
        why = "Fleet divides each loss by their number, where the plan multiplies"
        console.print(f"losses may be {result.loss_bound:.2g} from the reference's: {why}", soft_wrap=True)
    verdict = "[red]differ from the plan[/]" if result.order_findings else "match the plan, in its order"
    console.print(
        f"{result.fleet.scheduler}: {result.num_computed} forwards and backwards and {result.num_messages} messages "
        f"per step {verdict}",
        soft_wrap=True,
    )
    if result.matches:
        console.print("[bold green]matches[/]: pipeproof and Fleet train the same, bit for bit in every gradient")
    else:
        console.print("[bold red]does not match[/]")
