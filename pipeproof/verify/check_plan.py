"""Checking a plan: every rule over one subject, and the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.diagnostics.finding import Finding, Location, Severity
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.schedule.op_table import OpGraph
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.verify.causes import with_causes
from pipeproof.verify.certificate import Certificate, Verdict, certificate_of, graph_digest
from pipeproof.verify.declared_facts import NO_FACTS, Facts
from pipeproof.verify.memory_budget import InFlight, in_flight
from pipeproof.verify.registry import RULES
from pipeproof.verify.selection import ALL_RULES, SUPPRESSION_CODES, Selection, Suppressed, suppress
from pipeproof.verify.subject import Rule, Subject, graph_subject, make_subject, program_subject

CHECK_CODES: tuple[str, ...] = tuple(sorted(doc.code for doc in (*(rule.doc for rule in RULES), *SUPPRESSION_CODES)))
"""The codes of every rule that ``check`` runs, which can be selected and left out."""

OnProgress = Callable[[str, int, int], None]
"""Callback for progress: the current task, the number of rules done and of all."""


@dataclass(frozen=True)
class Report:
    """Result of ``check`` for one plan, whose identity is the graph digest ``digest``.

    ``suppressed`` are the warnings and notes that the plan declares as wanted;
    ``not_run`` the codes of the rules that a selection left out.
    """

    subject: Subject
    digest: str
    findings: tuple[Finding, ...]
    in_flight: tuple[InFlight, ...]
    suppressed: tuple[Suppressed, ...] = ()
    not_run: tuple[str, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make the plan unfit to run."""
        return tuple(f for f in self.findings if f.severity is Severity.ERROR)

    @property
    def verdict(self) -> Verdict:
        """Refused where there are errors; incomplete where a rule was left out, one that only warns included."""
        if self.errors:
            return Verdict.REFUSED
        return Verdict.INCOMPLETE if self.not_run else Verdict.PROVED

    @property
    def conclusion(self) -> Certificate:
        """The graph digest and the verdict, with the versions of the rules and the table that the verdict is by."""
        return certificate_of(self.subject, self.digest, self.verdict)

    @property
    def certificate(self) -> Certificate | None:
        """The conclusion, where the plan is proved; the executor runs no plan without it."""
        return self.conclusion if self.verdict is Verdict.PROVED else None

    def to_json(self) -> dict[str, Any]:
        """The form of ``check --format json``; see ``docs/schemas/check.schema.json``."""
        return {
            "digest": self.digest,
            "certified": self.certificate is not None,
            "findings": [finding_to_json(f) for f in self.findings],
            "suppressed": [{**finding_to_json(s.finding), "reason": s.reason} for s in self.suppressed],
            "not_run": list(self.not_run),
            "in_flight": [
                {
                    "rank": self.subject.graph.global_rank[f.rank],
                    "peak_activations": f.peak_activations,
                    "boundary_bytes": f.boundary_bytes,
                }
                for f in self.in_flight
            ],
        }


def check(plan: LoadedPlan, selection: Selection = ALL_RULES, on_progress: OnProgress | None = None) -> Report:
    """Lower a plan and check it by every selected rule; ``on_progress`` is called before each rule.

    Raises:
        BadPlanError: the plan cannot be lowered at all.
    """
    return check_subject(make_subject(plan), selection, on_progress)


def check_subject(
    subject: Subject, selection: Selection = ALL_RULES, on_progress: OnProgress | None = None
) -> Report:  # fmt: skip
    """Check a subject by every selected rule that applies to it; ``on_progress`` is called before each rule.

    Findings are in the order of the codes, each followed by those that follow from it.
    Findings that the plan suppresses are listed apart, with the plan's reason.
    """
    run = [code for code in CHECK_CODES if selection.picks(code)]
    rules = _rules_for(subject, run)
    found = []
    for number, rule in enumerate(rules):
        if on_progress is not None:
            on_progress(f"checking {rule.doc.code}", number, len(rules))
        found += [subject.placed(finding) for finding in rule.check(subject)]
    kept, suppressed = suppress(subject, found, {rule.doc.code: rule.doc for rule in RULES}, run)
    return Report(
        subject=subject,
        digest=graph_digest(subject),
        findings=with_causes(subject, sorted(kept, key=lambda finding: finding.code)),
        in_flight=in_flight(subject) if subject.lowered is not None else (),
        suppressed=suppressed,
        not_run=tuple(code for code in CHECK_CODES if not selection.picks(code)),
    )


def _rules_for(subject: Subject, codes: list[str]) -> list[Rule]:
    """The rules of these codes; for a graph alone those that need no plan."""
    return [rule for rule in RULES if rule.doc.code in codes and (subject.lowered is not None or not rule.needs_plan)]


def check_graph(
    graph: OpGraph,
    *,
    backend: BackendTable | None = None,
    origins: tuple[Location, ...] = (),
    facts: Facts = NO_FACTS,
) -> Report:
    """Check a graph made in Python, such as a log of a custom runtime, by every rule that needs no plan.

    ``backend`` is whose promises hold (Paddle's gloo without it); ``origins``
    the places of rows by the graph's ``origin`` column, for the findings;
    ``facts`` are additional facts.
    """
    return check_subject(graph_subject(graph, backend=backend, origins=origins, facts=facts))


def check_program(
    text: str, *, file: str = "<program>", backend: BackendTable | None = None, facts: Facts = NO_FACTS
) -> Report:
    """Check a program in text form (``schedule.text_form``) by every rule that needs no plan.

    ``file`` is its name in findings; ``backend`` and ``facts`` as for ``check_graph``.

    Raises:
        BadPlanError: the text is no program; the findings have line and column.
    """
    return check_subject(program_subject(text, file=file, backend=backend, facts=facts))
