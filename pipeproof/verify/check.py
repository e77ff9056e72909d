"""Checking a plan: every rule over one subject, and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeproof.comm.capabilities import BackendTable
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.load import LoadedPlan
from pipeproof.specs.render import finding_to_json
from pipeproof.verify.certificate import RULE_SET_VERSION, Certificate, plan_digest
from pipeproof.verify.memory import InFlight, in_flight
from pipeproof.verify.registry import RULES
from pipeproof.verify.subject import Subject, graph_subject, make_subject


@dataclass(frozen=True)
class Report:
    """What ``check`` found about one plan."""

    subject: Subject
    digest: str
    findings: tuple[Finding, ...]
    in_flight: tuple[InFlight, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make the plan unfit to run."""
        return tuple(f for f in self.findings if f.severity is Severity.ERROR)

    @property
    def certificate(self) -> Certificate | None:
        """What the executor asks for; None where there are errors."""
        return None if self.errors else Certificate(self.digest, RULE_SET_VERSION)

    def to_json(self) -> dict[str, Any]:
        """The form of ``check --format json``; see ``docs/schemas/check.schema.json``."""
        return {
            "digest": self.digest,
            "findings": [finding_to_json(f) for f in self.findings],
            "in_flight": [
                {"rank": f.rank, "peak_activations": f.peak_activations, "boundary_bytes": f.boundary_bytes}
                for f in self.in_flight
            ],
        }


def check(plan: LoadedPlan) -> Report:
    """Lower a plan and judge it by every rule.

    Raises:
        BadPlanError: the plan cannot be lowered at all.
    """
    return check_subject(make_subject(plan))


def check_subject(subject: Subject) -> Report:
    """Judge a subject by every rule that applies to it, findings in the order of the rule codes."""
    rules = [rule for rule in RULES if subject.lowered is not None or not rule.needs_plan]
    findings = tuple(subject.placed(finding) for rule in rules for finding in rule.check(subject))
    held = in_flight(subject) if subject.lowered is not None else ()
    return Report(subject, plan_digest(subject), findings, held)


def check_graph(graph: OpGraph, *, backend: BackendTable | None = None, origins: tuple[Location, ...] = ()) -> Report:
    """Judge a graph made in Python, such as a log of a runtime of one's own, by every rule that needs no plan.

    ``backend`` is whose promises hold (Paddle's gloo without it); ``origins``
    the places of rows by the graph's ``origin`` column, for the findings.
    """
    return check_subject(graph_subject(graph, backend=backend, origins=origins))
