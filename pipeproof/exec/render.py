"""A run as a person reads it: a line per step while it goes, the verdict at its end."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pipeproof.exec.compare import StepResult
from pipeproof.exec.report import RunReport
from pipeproof.specs.render import render_text


def step_line(step: StepResult, num_steps: int) -> str:
    """One step: its loss, the reference's, and how many gradients have the reference's bits."""
    equal = sum(gradient.bitwise for gradient in step.gradients)
    verdict = "bitwise equal" if step.loss_is_bitwise else "[red]differs[/]"
    colour = "green" if equal == len(step.gradients) else "red"
    return (
        f"step {step.step + 1}/{num_steps}  loss {float(step.loss):.9f}  reference {float(step.reference_loss):.9f}  "
        f"{verdict}  gradients [{colour}]{equal}/{len(step.gradients)}[/] bitwise"
    )


def render_run(report: RunReport, console: Console) -> None:
    """Print the findings, the gradients by stage, and the verdict."""
    render_text(report.findings, report.subject.source, console=console)
    table = Table(title="gradients against the reference, all steps", title_justify="left")
    for column in ("stage", "gradients", "bitwise", "largest rel. difference", "from the uncut model"):
        table.add_column(column, justify="right")
    for stage in range(len(report.subject.plan.stages)):
        mine = [g for g in report.gradients if g.stage == stage]
        equal = sum(g.bitwise for g in mine)
        largest = max((g.max_rel_diff for g in mine), default=0.0)
        uncut = max((g.uncut_max_rel_diff for g in mine), default=0.0)
        table.add_row(str(stage), str(len(mine)), str(equal), f"{largest:.3g}", f"{uncut:.3g}")
    console.print(table)
    spec = report.subject.plan.spec
    if report.parallel_bound:
        console.print(
            "reference: one process, adding in the order of tp and dp; distance to the plain uncut model at most "
            f"{report.parallel_bound:.3g} (stated bound)"
        )
    else:
        console.print("reference: one process, uncut model, micro-batch by micro-batch")
    console.print(
        f"{spec.run.dtype}, accumulation {report.accumulation}, {report.threads} compute thread per process; executed "
        f"log {'equals' if not report.log_findings else '[red]differs from[/]'} the verified graph"
    )
    if report.passed:
        console.print("[bold green]matches[/]: every loss and every gradient, bit for bit")
    elif report.matches:
        console.print("[bold yellow]matches, but was not verified[/]")
    else:
        console.print("[bold red]does not match[/] the reference")
