"""The report of a check as a person reads it."""

from __future__ import annotations

from rich.console import Console

from pipeproof.specs.render import render_text
from pipeproof.verify.check import Report


def render_report(report: Report, console: Console) -> None:
    """Print the findings, what is held in flight, and the verdict with the digest."""
    render_text(report.findings, report.subject.source, console=console)
    graph, mesh = report.subject.graph, report.subject.plan.mesh
    peaks = {}
    for figure in report.in_flight:
        peaks[mesh.coords(figure.rank)["pp"]] = figure
    held = ", ".join(
        f"stage {stage}: {figure.peak_activations} ({figure.boundary_bytes} bytes)" for stage, figure in peaks.items()
    )
    console.print("in flight at most, micro-batches held and the bytes of their boundary inputs:")
    console.print(f"  {held}", soft_wrap=True)
    size = f"{len(graph.ops)} operations on {graph.num_ranks} ranks"
    if report.errors:
        count = len(report.errors)
        console.print(f"[bold red]refused[/]: {count} error{'s' if count > 1 else ''} in {size}")
    else:
        console.print(f"[bold green]proved[/]: {size} under {report.subject.backend.name}")
    console.print(f"digest {report.digest}", soft_wrap=True)
