"""Result of a rehearsal: checks, findings, and the measured edges."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.exec.compare.compare_log import compare_log
from pipeproof.exec.launch.job_files import Job, load_json
from pipeproof.exec.rehearse.rehearsal_edges import Edge, EdgeTimes, edges_of, network_of
from pipeproof.exec.rehearse.rehearsal_faults import ArrivalChecks, findings_of
from pipeproof.exec.run_codes import UNVERIFIED
from pipeproof.verify.check_plan import Report
from pipeproof.verify.subject import Subject


@dataclass(frozen=True)
class Rehearsal:
    """Report of a rehearsal; ``seconds`` is the time of all steps."""

    subject: Subject
    digest: str
    verified: bool
    scale: Fraction
    checked: Mapping[int, ArrivalChecks]
    log_findings: tuple[Finding, ...]
    edges: tuple[Edge, ...]
    network: dict[str, Any] | None
    seconds: float

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """Findings about the rehearsal."""
        findings = findings_of([fault for checked in self.checked.values() for fault in checked.faults])
        if not self.verified:
            unsafe = Finding(UNVERIFIED.code, Severity.WARNING, "the plan does not pass check; it was rehearsed unsafe")
            findings = (unsafe, *findings)
        return (*self.log_findings, *findings)

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
            "scale": str(self.scale),
            "ranks": self.subject.graph.num_ranks,
            "steps": run.steps,
            "seconds": self.seconds,
            "messages": sum(checks.messages for checks in counts),
            "collectives": sum(checks.collectives for checks in counts),
            "elements": sum(checks.elements for checks in counts),
            "faults": self.num_faults,
            "log_matches_graph": not self.log_findings,
            "findings": [finding_to_json(finding) for finding in self.findings],
        }

    def profile(self) -> dict[str, Any]:
        """Return the form of ``rehearse --profile``: every edge, and ``cost.network`` with all edges."""
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


def read_rehearsal(report: Report, job: Job) -> Rehearsal:
    """Read the files of a job's ranks and return the report."""
    subject = report.subject
    graph, run = subject.graph, subject.plan.spec.run
    ranks = range(graph.num_ranks)
    checked = {rank: load_json(job.rank_file(rank, "checks"), ArrivalChecks) for rank in ranks}
    logs = job.logs(graph.num_ranks)
    times = {
        channel: own for rank in ranks for channel, own in load_json(job.rank_file(rank, "edges"), EdgeTimes).items()
    }
    edges = edges_of(graph, times)
    differences = [
        finding
        for rank, entries in logs.items()
        for finding in compare_log(
            graph, rank, entries, num_steps=run.steps, dtype=run.dtype, weight_dtype=run.weight_dtype
        )
    ]
    entries = [entry for log in logs.values() for entry in log]
    first, last = min(entry.start_ns for entry in entries), max(entry.end_ns for entry in entries)
    return Rehearsal(
        subject=subject,
        digest=report.digest,
        verified=report.certificate is not None,
        scale=job.options.scale or Fraction(1),
        checked=checked,
        log_findings=tuple(differences),
        edges=edges,
        network=network_of(graph.num_ranks, edges, times),
        seconds=(last - first) / 1e9,
    )
