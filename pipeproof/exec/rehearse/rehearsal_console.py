"""``pipeproof rehearse``: launch, terminal output, files."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pipeproof.atomic_write import write_json
from pipeproof.diagnostics.text_output import render_text
from pipeproof.diagnostics.units import time_text
from pipeproof.exec.launch.run_console import result_or_status
from pipeproof.exec.launch.run_plan import prepare_job, require_runnable
from pipeproof.exec.launch.supervisor import Host, Launcher, job_directory
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.rank.job_files import RunOptions, dump_plan, end_process
from pipeproof.exec.rehearse import rehearsal_framework
from pipeproof.exec.rehearse.external_launcher import execute_launched, join_launcher
from pipeproof.exec.rehearse.rehearsal_report import Rehearsal, merged_rehearsal, rank_rehearsal
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.verify.check_plan import Report
from pipeproof.views.tables import print_table


def rehearse(report: Report, options: RunOptions, on_progress: Callable[[str], None]) -> Rehearsal:
    """Execute the communication of the plan of a check report on real processes of this machine.

    ``on_progress`` is called with the phase of set-up. The report's subject must be unfolded.

    Raises:
        PipeproofError: see ``require_runnable``.
        WorkerFailedError: a worker died, raised or hung.
    """
    require_runnable(report, options)
    with job_directory(options.logs) as directory:
        job, state = prepare_job(report, options, directory), JobState(report.subject)
        launcher = Launcher(job, state, options.timeout_s, rehearsal_framework.__name__, has_reference=False)
        launcher.run(lambda: on_progress(state.phase))
        ranks = range(report.subject.graph.num_ranks)
        parts = [rank_rehearsal(report, job, rank) for rank in ranks]
        return merged_rehearsal(report, parts, [Host(platform.node(), tuple(ranks))])


_MOST_EDGES = 24
"""Most edges that the table shows; if there are more, only the slowest. The profile has all."""


def rehearse_command(
    report: Report,
    options: RunOptions,
    console: Console,
    report_file: Path | None,
    profile_file: Path | None,
) -> int:
    """Rehearse a checked plan, print the findings, write the requested files; return the exit status."""
    report = replace(report, subject=report.subject.unfolded())  # every process runs one rank
    refusal = "not rehearsed: the plan does not pass check (`--unsafe` rehearses it without a certificate)"

    def execute() -> Rehearsal:
        rank = join_launcher(report.subject.plan.spec.run)
        if rank is None:
            return _rehearse(report, options, console)
        return execute_launched(rank, report, options, lambda line: console.print(line, soft_wrap=True))

    result = result_or_status(execute, report, options, console, refusal)
    if isinstance(result, int):
        return result
    _render(result, console, timed=not options.share_gpus)
    if report_file is not None:
        write_json(report_file, result.to_json())
    if profile_file is not None:
        write_json(profile_file, result.profile())
        console.print(f"profile of {len(result.edges)} edges written to {profile_file}", soft_wrap=True)
    status = ExitStatus.OK if result.passed else ExitStatus.FAILED
    return status if join_launcher(report.subject.plan.spec.run) is None else end_process(status)


def _rehearse(report: Report, options: RunOptions, console: Console) -> Rehearsal:
    run, graph = report.subject.plan.spec.run, report.subject.graph
    if report.certificate is None and options.unsafe:
        render_text(report.findings, report.subject.source, console=console)
        console.print("[bold yellow]rehearsing the plan without a certificate (--unsafe)[/]")
    console.print(
        f"{graph.num_ranks} processes, {run.backend} on {run.device}, {run.steps} steps of communication, "
        f"digest {report.digest[:12]}",
        soft_wrap=True,
    )
    with console.status("starting") as status:
        return rehearse(report, options, status.update)


def _render(result: Rehearsal, console: Console, *, timed: bool) -> None:
    render_text(result.findings, result.subject.source, console=console)
    if result.edges:
        _print_edges(result, console)
    if result.network is not None:
        console.print(_network_line(result), soft_wrap=True)
    num_channels = len(result.subject.graph.channels)
    if timed and num_channels > len(result.edges):
        console.print(f"{num_channels - len(result.edges)} channels without a way back were not timed")
    counts = result.to_json()
    verb = "differs from" if result.log_findings else "equals"
    console.print(
        f"{counts['messages']} messages and {counts['collectives']} collectives of all ranks read on arrival, "
        f"{counts['elements']} elements, in {time_text(result.seconds * 1e6)}; executed log {verb} the verified graph",
        soft_wrap=True,
    )
    if result.passed:
        console.print("[bold green]correct[/]: every element arrived where the plan needs it")
    elif result.is_correct:
        console.print("[bold yellow]correct, but the plan was not verified[/]")
    else:
        faults = result.num_faults
        console.print(f"[bold red]wrong[/]: {faults} operation{'' if faults == 1 else 's'} with wrong elements")


def _network_line(result: Rehearsal) -> str:
    assert result.network is not None
    node, between = (
        f"{time_text(link['latency_us'])} and {link['bandwidth']:.3g} GB/s" if link else ""
        for link in (result.network["node"], result.network.get("between"))
    )
    use = "`network` of `--output` is for `cost.network` of a plan on"
    if len(result.seconds_by_host) == 1:
        return f"all edges together: {node}; {use} this machine"
    if not between:
        return f"edges within hosts: {node}; none between hosts was timed; {use} these hosts, and lacks `between`"
    if node == between:  # no two ranks share a host
        return f"edges between hosts: {between}; {use} these hosts"
    return f"edges within hosts: {node}; between hosts: {between}; {use} these hosts"


def _print_edges(result: Rehearsal, console: Console) -> None:
    """Print latency and bandwidth of each edge in the order of the graph, or only of the slowest edges."""
    clock = "GPU" if result.subject.plan.spec.run.device == "gpu" else "host"
    shown, title = result.edges, f"edges, one message at a time, by the {clock}'s clock"
    if len(shown) > _MOST_EDGES:
        shown = tuple(sorted(shown, key=lambda edge: edge.link.bandwidth)[:_MOST_EDGES])
        title += f": the slowest {len(shown)} of {len(result.edges)} (`--output` has all)"
    headings = ("edge", ">latency", ">GB/s", ">fit error")
    rows = [
        (edge.channel, time_text(edge.link.latency_us), f"{edge.link.bandwidth:.3g}", f"{edge.link.residual:.0%}")
        for edge in shown
    ]
    console.print(title)
    print_table(headings, rows, console)


NUM_STEPS = 2


def rehearsed_plan(loaded: LoadedPlan) -> LoadedPlan:
    """Return the plan to rehearse: the loaded one with two steps."""
    data = dump_plan(loaded)
    data["run"]["steps"] = NUM_STEPS
    return LoadedPlan(plan_from_dict(data).spec, loaded.source)
