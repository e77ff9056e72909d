"""``pipeproof rehearse`` as a person meets it: progress, findings, edges, files, exit status."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from pipeproof.exec.command import status_of_failure
from pipeproof.exec.gpus import sharing_line
from pipeproof.exec.launched import launched_rank
from pipeproof.exec.rehearse.rehearse import RehearsalOptions, rehearse, rehearse_launched
from pipeproof.exec.rehearse.report import Rehearsal
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.render import render_text
from pipeproof.verify.check import Report

_MOST_EDGES = 24
"""Most edges that the table shows; of more, the slowest. The profile has all."""


def rehearse_command(
    report: Report,
    options: RehearsalOptions,
    console: Console,
    report_file: Path | None,
    profile_file: Path | None,
) -> int:
    """Rehearse a checked plan, print what was found, write the files that were asked for; the exit status."""
    report = replace(report, subject=report.subject.unfolded())  # every process is a rank of its own
    rank = launched_rank()
    result: Rehearsal | None = None

    def carry_out() -> None:
        nonlocal result
        result = _rehearse(report, options, console) if rank is None else _launched(rank, report, options, console)

    refused = "not rehearsed: the plan does not pass check (`--unsafe` rehearses it all the same)"
    status = status_of_failure(carry_out, report, console, refused)
    if status is not None:
        return status
    if result is None:  # another rank than 0 under a launcher of somebody else's
        return ExitStatus.OK
    if options.share_gpus:
        console.print(f"[bold yellow]{sharing_line(report.subject)}[/]", soft_wrap=True)
    _render(result, console, timed=not options.share_gpus)
    if report_file is not None:
        report_file.write_text(json.dumps(result.to_json(), indent=2) + "\n")
    if profile_file is not None:
        profile_file.write_text(json.dumps(result.profile(), indent=2) + "\n")
        console.print(f"profile of {len(result.edges)} edges written to {profile_file}", soft_wrap=True)
    return ExitStatus.OK if result.passed else ExitStatus.FAILED


def _rehearse(report: Report, options: RehearsalOptions, console: Console) -> Rehearsal:
    run, graph = report.subject.plan.spec.run, report.subject.graph
    if report.certificate is None and options.unsafe:
        render_text(report.findings, report.subject.source, console=console)
        console.print("[bold yellow]rehearsing it all the same (--unsafe)[/]")
    at = "" if options.scale == 1 else f" at scale {options.scale}"
    console.print(
        f"{graph.num_ranks} processes, {run.backend} on {run.device}{at}, {run.steps} steps of communication alone, "
        f"digest {report.digest[:12]}",
        soft_wrap=True,
    )
    with console.status("starting") as status:
        return rehearse(report, options, status.update)


def _launched(rank: int, report: Report, options: RehearsalOptions, console: Console) -> Rehearsal | None:
    source = report.subject.source
    return rehearse_launched(
        rank, report, options, on_hang=lambda finding: render_text([finding], source, console=console)
    )


def _render(result: Rehearsal, console: Console, *, timed: bool) -> None:
    render_text(result.findings, result.subject.source, console=console)
    if result.edges:
        console.print(_edge_table(result))
    if result.network is not None:
        node = result.network["node"]
        console.print(
            f"all edges together: {node['latency_us']:g} us and {node['bandwidth']:g} GB/s; `network` of `--profile` "
            "is for `cost.network` of a plan on this machine",
            soft_wrap=True,
        )
    num_channels = len(result.subject.graph.channels)
    if timed and num_channels > len(result.edges):
        console.print(f"{num_channels - len(result.edges)} channels without a way back were not timed")
    counts = result.to_json()
    verb = "is not" if result.log_findings else "is"
    console.print(
        f"{counts['messages']} messages and {counts['collectives']} collectives of all ranks read on arrival, "
        f"{counts['elements']} elements, in {result.seconds:.1f} s; what was issued {verb} what the graph says",
        soft_wrap=True,
    )
    if result.passed:
        console.print("[bold green]right[/]: every element is where the plan promises it")
    elif result.is_right:
        console.print("[bold yellow]right, but the plan was not proved[/]")
    else:
        faults = result.num_faults
        console.print(f"[bold red]wrong[/]: {faults} operation{'' if faults == 1 else 's'} brought wrong elements")


def _edge_table(result: Rehearsal) -> Table:
    """Latency and bandwidth of each edge, in the order of the graph, or the slowest ones."""
    clock = "GPU" if result.subject.plan.spec.run.device == "gpu" else "host"
    shown, title = result.edges, f"edges, one message at a time, by the {clock}'s clock"
    if len(shown) > _MOST_EDGES:
        shown = tuple(sorted(shown, key=lambda edge: edge.link.bandwidth)[:_MOST_EDGES])
        title += f": the slowest {len(shown)} of {len(result.edges)} (`--profile` has all)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("edge", no_wrap=True)
    table.add_column("latency us", justify="right")
    table.add_column("GB/s", justify="right")
    table.add_column("line is off by", justify="right")
    for edge in shown:
        link = edge.link
        table.add_row(edge.channel, f"{link.latency_us:g}", f"{link.bandwidth:g}", f"{link.residual:.0%}")
    return table
