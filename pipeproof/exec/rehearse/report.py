"""The result of a rehearsal: what was looked at, what was found, and what every edge takes."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from pipeproof.exec.codes import UNVERIFIED
from pipeproof.exec.jobs import Job
from pipeproof.exec.oplog import LogEntry, compare_log
from pipeproof.exec.rehearse.edges import Edge, edges_of, network_of
from pipeproof.exec.rehearse.faults import Checked, findings_of
from pipeproof.exec.rehearse.pinged import read_edges
from pipeproof.exec.rehearse.worker import found_file
from pipeproof.specs.finding import Finding, Severity
from pipeproof.specs.render import finding_to_json
from pipeproof.verify.check import Report
from pipeproof.verify.subject import Subject


@dataclass(frozen=True)
class Rehearsal:
    """Everything that a rehearsal has to show; ``seconds`` are those of all steps."""

    subject: Subject
    digest: str
    verified: bool
    scale: Fraction
    checked: Mapping[int, Checked]
    log_findings: tuple[Finding, ...]
    edges: tuple[Edge, ...]
    network: dict[str, Any] | None
    seconds: float

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, as findings."""
        found = findings_of([fault for checked in self.checked.values() for fault in checked.faults])
        if not self.verified:
            unsafe = Finding(UNVERIFIED.code, Severity.WARNING, "the plan does not pass check; it was rehearsed unsafe")
            found = (unsafe, *found)
        return (*self.log_findings, *found)

    @property
    def num_faults(self) -> int:
        """Everything that was wrong, also what was not kept."""
        return sum(checked.num_faults for checked in self.checked.values())

    @property
    def is_right(self) -> bool:
        """Whether all that arrived was what the plan promises, and what was issued what the graph says."""
        return not self.num_faults and not self.log_findings

    @property
    def passed(self) -> bool:
        """Whether the rehearsal deserves exit status 0: the plan was proved, and nothing was wrong."""
        return self.verified and self.is_right

    def to_json(self) -> dict[str, Any]:
        """The form of ``rehearse --report``."""
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
            "messages": sum(one.messages for one in counts),
            "collectives": sum(one.collectives for one in counts),
            "elements": sum(one.elements for one in counts),
            "faults": self.num_faults,
            "log_matches_graph": not self.log_findings,
            "findings": [finding_to_json(finding) for finding in self.findings],
        }

    def profile(self) -> dict[str, Any]:
        """The form of ``rehearse --profile``: every edge, and ``cost.network`` with all of them."""
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


def read_rehearsal(report: Report, job: Job, scale: Fraction) -> Rehearsal:
    """Put together what the ranks of a job have left."""
    subject = report.subject
    graph, run = subject.graph, subject.plan.spec.run
    ranks = range(graph.num_ranks)
    checked = {rank: Checked.from_json(json.loads(found_file(job, rank).read_text())) for rank in ranks}
    logs = {rank: [LogEntry.from_json(entry) for entry in json.loads(job.log_file(rank).read_text())] for rank in ranks}
    times = read_edges(job, graph.num_ranks)
    edges = edges_of(graph, times)
    different = [
        finding
        for rank, entries in logs.items()
        for finding in compare_log(
            graph, rank, entries, num_steps=run.steps, dtype=run.dtype, weight_dtype=run.weight_dtype
        )
    ]
    entries = [entry for one in logs.values() for entry in one]
    first, last = min(entry.start_ns for entry in entries), max(entry.end_ns for entry in entries)
    return Rehearsal(
        subject=subject,
        digest=report.digest,
        verified=report.certificate is not None,
        scale=scale,
        checked=checked,
        log_findings=tuple(different),
        edges=edges,
        network=network_of(graph.num_ranks, edges, times),
        seconds=(last - first) / 1e9,
    )
