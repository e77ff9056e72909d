"""Terminal output of a placement: nothing for one host, one line for a placement as planned, else a table and a map."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from pipeproof.diagnostics.source import SourceMap
from pipeproof.diagnostics.text_output import render_text
from pipeproof.exec.placement.launcher_forms import how_to, map_text
from pipeproof.exec.placement.link_kinds import BETWEEN, LinkKind
from pipeproof.exec.placement.placement_report import PlacementReport, milliseconds
from pipeproof.views.byte_sizes import size_text
from pipeproof.views.tables import print_table


def render_placement(report: PlacementReport, source: SourceMap | None, console: Console) -> None:
    """Print a placement; ``source`` is the text of the plan."""
    if report.num_nodes == 1:
        return
    if not report.findings:
        console.print(_as_planned(report), soft_wrap=True, highlight=False)
        return
    render_text(report.findings, source, console=console)
    _print_traffic(report, console)
    if report.proposal is None:
        return
    text = map_text(report.proposal, report.placements)
    if report.placed_us is not None:
        step, gain = report.proposal.cost.step_us, report.placed_us - report.proposal.cost.step_us
        text += f": a step takes {milliseconds(step)}, {milliseconds(gain)} less (simulated)"
    else:
        text += f": {size_text(round(report.proposal.cost.between))} between nodes in a step"
    console.print(f"[bold]proposed[/]: {text}", soft_wrap=True, highlight=False)
    if how := how_to(report.proposal, report.placements):
        console.print(how, soft_wrap=True, highlight=False, markup=False)


def _as_planned(report: PlacementReport) -> str:
    hosts = Counter(Counter(place.host_key for place in report.placements).values())
    sizes = " and ".join(
        f"{count} host{'' if count == 1 else 's'} of {size} rank{'' if size == 1 else 's'}"
        for size, count in hosts.items()
    )
    between = Counter[str]()
    for (axis, kind), num_bytes in report.traffic.items():
        if kind in BETWEEN:
            between[axis] += round(num_bytes)
    bytes_text = ", ".join(f"{axis} {size_text(num_bytes)}" for axis, num_bytes in between.items())
    return f"placement: {sizes}, as planned; between them in a step: {bytes_text or 'nothing'}"


def _print_traffic(report: PlacementReport, console: Console) -> None:
    axes = dict.fromkeys(axis for axis, _ in report.traffic)
    kinds = [kind for kind in LinkKind if any(kind is used for _, used in report.traffic)]
    rows = [(axis, *(size_text(round(report.traffic.get((axis, kind), 0))) for kind in kinds)) for axis in axes]
    console.print("bytes per step over each kind of link")
    print_table(("axis", *(f">{kind}" for kind in kinds)), rows, console)
