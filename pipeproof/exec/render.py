"""A run as a person reads it: a line per step while it goes, the verdict at its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rich import box
from rich.console import Console
from rich.table import Table

from pipeproof.exec.compare import GradientResult, StepResult
from pipeproof.exec.losses import main_loss, module_losses
from pipeproof.exec.report import LogClock, RunReport
from pipeproof.specs.render import render_text


def step_line(step: StepResult, bound: float | None = None) -> str:
    """One step: its loss, the reference's, how many gradients have the reference's bits, and what other losses are.

    Where there is a ``bound``, how far all that is from the reference stands in place of bits.
    """
    if bound is not None:
        farthest = max((gradient.uncut_max_rel_diff for gradient in step.gradients), default=0.0)
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
    losses = "".join(f"  {name} {float(step.routers.ours[name]):.9f}" for name in step.routers.losses)
    return f"{line}{losses}  routers {'bitwise equal' if step.routers.bitwise else '[red]differ[/]'}"


_MOST_ROWS = 80
"""Most parameters that the table shows; of more, those that differ. The JSON report has all."""


def _gradient_table(step: StepResult, bound: float | None) -> Table:
    """Every parameter's gradient in one step against the reference, or where there is one, the bound."""
    shown, title = step.gradients, f"gradients of step {step.step}"
    if len(shown) > _MOST_ROWS:
        shown = tuple(g for g in shown if not _is_right(g, bound))[:_MOST_ROWS]
        title += f": {len(shown)} of {len(step.gradients)} (those that differ; `--report` has all)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage", justify="right")
    table.add_column("parameter", no_wrap=True)
    table.add_column("md5", no_wrap=True)
    table.add_column("bits" if bound is None else "bound", no_wrap=True)
    table.add_column("rel. diff.", justify="right")
    table.add_column("to uncut", justify="right")
    right, wrong = ("equal", "[red]differ[/]") if bound is None else ("within", "[red]beyond[/]")
    for gradient in shown:
        table.add_row(
            str(gradient.stage),
            gradient.name,
            gradient.md5[:8],
            right if _is_right(gradient, bound) else wrong,
            f"{gradient.max_rel_diff:.2g}",
            f"{gradient.uncut_max_rel_diff:.2g}",
        )
    return table


def _is_right(gradient: GradientResult, bound: float | None) -> bool:
    return gradient.bitwise if bound is None else gradient.uncut_max_rel_diff <= bound


def render_run(report: RunReport, console: Console) -> None:
    """Print the findings, every gradient of the last step, and the verdict."""
    render_text(report.findings, report.subject.source, console=console)
    console.print(_gradient_table(report.steps[-1], report.parallel_bound if report.is_by_bound else None))
    spec = report.subject.plan.spec
    if report.is_by_bound:
        console.print("reference: one process, uncut model, each step from the ranks' own weights")
        console.print(f"distance to it: stated bound {report.parallel_bound:.3g}")
    elif report.parallel_bound:
        console.print("reference: one process, adding in the order of the plan")
        console.print(f"distance to the plain uncut model: stated bound {report.parallel_bound:.3g}")
    else:
        console.print("reference: one process, uncut model, micro-batch by micro-batch")
    threads = f"{report.threads} compute thread{'s' if report.threads != 1 else ''} per process"
    where = threads if spec.run.device == "cpu" else "a GPU per process"
    main = f", main gradients in {spec.run.weight_dtype}" if spec.run.weight_dtype != spec.run.dtype else ""
    console.print(f"{spec.run.dtype}{main}, {where}, accumulation {report.accumulation}")
    verb = "equals" if not report.log_findings else "[red]differs from[/]"
    console.print(f"executed log {verb} the verified graph{_unlogged(report)}{CLOCKS[report.clock]}")
    if report.passed and report.is_by_bound:
        gradients = " and every gradient of the first step" if report.begins_initial else ""
        console.print(f"[bold green]matches[/]: every loss{gradients}, within the bound")
    elif report.passed:
        console.print("[bold green]matches[/]: every loss and every gradient, bit for bit")
    elif report.matches:
        console.print("[bold yellow]matches, but was not verified[/]")
    else:
        console.print("[bold red]does not match[/] the reference")


CLOCKS: Mapping[LogClock, str] = MappingProxyType(
    {
        "host": "",
        "device": "; its times are the GPU's",
        "issue": "; its times are when the host issued each operation (`--profile` has the GPU's)",
    }
)
"""What is said of the times of a log."""


def _unlogged(report: RunReport) -> str:
    """That steps were replayed, whose log is that of the capture."""
    if report.num_logged_steps in (None, len(report.steps)):
        return ""
    first, last = report.steps[0].step, report.steps[-1].step
    second = first + 1
    return f" in steps {first} and {second}; steps {second} to {last} replay the CUDA graph captured in step {second}"
