"""``pipeproof rehearse``: launch, the ranks' results and measured edges, split groups, terminal output, files."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from rich.console import Console

from pipeproof.atomic_write import write_json
from pipeproof.cost.analytic_links import groups_of
from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.text_output import finding_to_json, render_text
from pipeproof.diagnostics.units import time_text
from pipeproof.exec.compare.compare_log import compare_log
from pipeproof.exec.launch.external_launcher import LaunchedRehearsal, execute_launched, join_launcher
from pipeproof.exec.launch.run_console import result_or_status
from pipeproof.exec.launch.run_plan import prepare_job, require_runnable
from pipeproof.exec.launch.supervisor import Host, Launcher, job_directory
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.rank.job_files import Job, LogFile, RunOptions, dump_plan, end_process, load_json
from pipeproof.exec.rehearse import rehearsal_framework
from pipeproof.exec.rehearse.rehearsal_arrivals import ArrivalChecks, findings_of
from pipeproof.exec.rehearse.rehearsal_edges import Edge, EdgeTimes, edges_of, network_of
from pipeproof.exec.rehearse.rehearsal_framework import rehearse_rank
from pipeproof.exec.store.run_codes import SPLIT_NODE, UNVERIFIED
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.verify.check_plan import Report
from pipeproof.verify.subject import Subject
from pipeproof.views.tables import print_table


@dataclass(frozen=True)
class Rehearsal:
    """Report of a rehearsal; ``seconds_by_host`` has the time of all steps, by the clock of each host."""

    subject: Subject
    digest: str
    verified: bool
    checked: Mapping[int, ArrivalChecks]
    log_findings: tuple[Finding, ...]
    edges: tuple[Edge, ...]
    network: dict[str, Any] | None
    seconds_by_host: Mapping[str, float]
    split: tuple[Finding, ...] = ()
    """Warnings about groups of ranks on several hosts."""

    @property
    def seconds(self) -> float:
        """Time of all steps: that of the slowest host."""
        return max(self.seconds_by_host.values())

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Findings about the rehearsal."""
        findings = findings_of([fault for checked in self.checked.values() for fault in checked.faults])
        if not self.verified:
            unsafe = UNVERIFIED.finding("the plan does not pass check; it was rehearsed unsafe")
            findings = (unsafe, *findings)
        return (*self.log_findings, *findings, *self.split)

    @property
    def num_faults(self) -> int:
        """Number of all faults, including those that were not stored."""
        return sum(checked.num_faults for checked in self.checked.values())

    @property
    def is_correct(self) -> bool:
        """True if all elements arrived as planned, and the issued operations match the graph."""
        return not self.num_faults and not self.log_findings

    @property
    def passed(self) -> bool:
        """True if the exit status is 0: the plan was verified and the rehearsal is correct."""
        return self.verified and self.is_correct

    def to_json(self) -> dict[str, Any]:
        """Return the form of ``rehearse --report``."""
        run, counts = self.subject.plan.spec.run, self.checked.values()
        return {
            "digest": self.digest,
            "verified": self.verified,
            "passed": self.passed,
            "backend": run.backend,
            "device": run.device,
            "ranks": self.subject.graph.num_ranks,
            "steps": run.steps,
            "seconds": self.seconds,
            **({"seconds_by_host": dict(self.seconds_by_host)} if len(self.seconds_by_host) > 1 else {}),
            "messages": sum(checks.messages for checks in counts),
            "collectives": sum(checks.collectives for checks in counts),
            "elements": sum(checks.elements for checks in counts),
            "faults": self.num_faults,
            "log_matches_graph": not self.log_findings,
            "findings": [finding_to_json(finding) for finding in self.findings],
        }

    def profile(self) -> dict[str, Any]:
        """Return the form of ``rehearse --output``: every edge, and ``cost.network`` with all edges."""
        run = self.subject.plan.spec.run
        return {
            "rehearsal": 1,
            "digest": self.digest,
            "backend": run.backend,
            "device": run.device,
            "machine": f"{platform.machine()} {platform.system()} {platform.release()}",
            "edges": [edge.to_json() for edge in self.edges],
            "network": self.network,
        }


@dataclass(frozen=True)
class RankRehearsal:
    """Part of a rehearsal of one rank.

    Times are of the clock of its host. As JSON a part has at most about 200 faults, which are stored, and 20 bytes for
    each timed message.
    """

    checked: ArrivalChecks
    log_findings: tuple[Finding, ...]
    times: EdgeTimes
    start_ns: int
    end_ns: int


def rank_rehearsal(report: Report, job: Job, rank: int) -> RankRehearsal:
    """Read the files of a rank and make its part of the rehearsal."""
    graph, spec = report.subject.graph, report.subject.plan.spec.run
    log = [*LogFile(job.rank_file(rank, "log"))]
    findings = compare_log(graph, rank, log, num_steps=spec.steps, dtype=spec.dtype, weight_dtype=spec.weight_dtype)
    return RankRehearsal(
        load_json(job.rank_file(rank, "checks"), ArrivalChecks),
        tuple(findings),
        load_json(job.rank_file(rank, "edges"), EdgeTimes),
        min(entry.start_ns for entry in log),
        max(entry.end_ns for entry in log),
    )


def merged_rehearsal(report: Report, parts: Sequence[RankRehearsal], hosts: Sequence[Host]) -> Rehearsal:
    """Merge the parts of all ranks, in order, into the report of a rehearsal on some hosts."""
    graph = report.subject.graph
    host_of = {rank: host.name for host in hosts for rank in host.ranks}
    times = {channel: own for part in parts for channel, own in part.times.items()}
    edges = edges_of(graph, times)
    seconds_by_host = {}
    for host in hosts:
        own = [parts[rank] for rank in host.ranks]
        seconds_by_host[host.name] = (max(part.end_ns for part in own) - min(part.start_ns for part in own)) / 1e9
    return Rehearsal(
        subject=report.subject,
        digest=report.digest,
        verified=report.certificate is not None,
        checked={rank: part.checked for rank, part in enumerate(parts)},
        log_findings=tuple(finding for part in parts for finding in part.log_findings),
        edges=edges,
        network=network_of([host_of[rank] for rank in range(graph.num_ranks)], edges, times),
        seconds_by_host=seconds_by_host,
        split=split_groups(report.subject, hosts),
    )


def split_groups(subject: Subject, hosts: Sequence[Host]) -> tuple[Finding, ...]:
    """Return a warning for each axis with groups on several hosts that consecutive ranks would keep on one.

    The plan assumes that ranks are numbered host by host, as many on each host as the launcher started there.
    """
    host_of_rank = np.empty(subject.plan.spec.topology.num_ranks, dtype=np.int64)
    for number, host in enumerate(hosts):
        host_of_rank[list(host.ranks)] = number
    in_order = np.repeat(np.arange(len(hosts)), [len(host.ranks) for host in hosts])
    findings = []
    for axis in subject.plan.spec.topology.order:
        groups = groups_of(subject.plan.spec.topology, axis)
        pairs = np.stack([groups[:, :-1], groups[:, 1:]], axis=2).reshape(-1, 2)
        split = (np.diff(host_of_rank[pairs])[:, 0] != 0) & (np.diff(in_order[pairs])[:, 0] == 0)
        if split.any():
            first, second = pairs[int(np.argmax(split))].tolist()
            names = " and ".join(hosts[host_of_rank[rank]].name for rank in (first, second))
            findings.append(
                SPLIT_NODE.finding(
                    f"ranks {first} and {second} of one {axis} group are on {names}; with ranks numbered host by host "
                    f"both would be on one host ({int(split.sum())} such pairs)",
                    location=subject.locate("topology", "order"),
                    help="number ranks host by host (Slurm: `--distribution=block`, Open MPI: `--map-by slot`), or put "
                    "the axes with the most communication first in `topology.order`",
                )
            )
    return tuple(findings)


# --- Rehearsal of a plan: launch, read the ranks' results, report ---


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


def _launched_rehearsal(report: Report) -> LaunchedRehearsal[Rehearsal]:
    form = TypeAdapter(RankRehearsal)
    return LaunchedRehearsal(
        rehearse_rank,
        lambda job, rank: form.dump_python(rank_rehearsal(report, job, rank), mode="json"),
        lambda parts, hosts: merged_rehearsal(report, [form.validate_python(part) for part in parts], hosts),
    )


_MOST_EDGES = 24
"""Most edges that the table shows; where there are more, only the slowest. The profile has all."""


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
        return execute_launched(
            rank, report, options, _launched_rehearsal(report), lambda line: console.print(line, soft_wrap=True)
        )

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
    """Print latency and bandwidth of each edge, in the order of the graph, or of the slowest ones."""
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
