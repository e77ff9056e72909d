"""The report of a rehearsal: each rank's findings, their merge over all ranks and hosts, and groups split by hosts."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeproof.cost.analytic_links import groups_of
from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.exec.compare.compare_log import compare_log
from pipeproof.exec.launch.supervisor import Host
from pipeproof.exec.rank.idle_messages import EdgeTimes
from pipeproof.exec.rank.job_files import Job, LogFile, load_json
from pipeproof.exec.rehearse.rehearsal_arrivals import ArrivalChecks, findings_of
from pipeproof.exec.rehearse.rehearsal_edges import Edge, edges_of, network_of
from pipeproof.exec.store.run_codes import SPLIT_NODE, UNVERIFIED
from pipeproof.verify.check_plan import Report
from pipeproof.verify.subject import Subject


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
        """Time of all steps on the slowest host."""
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
