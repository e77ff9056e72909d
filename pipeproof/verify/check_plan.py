"""Checking a plan: every rule over one subject, and the report."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import CycleWitness, Finding, Location, OpsWitness, Severity, WitnessOp, code_order
from pipeproof.diagnostics.problems import grouped
from pipeproof.diagnostics.source import SourceMap
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, KINDS, UPDATE_KINDS, OpKind, parse_op
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.verify.certificate import Certificate, Verdict, certificate_of, graph_digest
from pipeproof.verify.declared_facts import NO_FACTS, Facts
from pipeproof.verify.fifo_matching import FaultsByChannel
from pipeproof.verify.memory_budget import InFlight, in_flight
from pipeproof.verify.registry import ALL_RULES, RULES, SUPPRESSION_CODES, Selection, Suppressed, suppress
from pipeproof.verify.subject import Rule, Subject, graph_subject, lowered_subject, make_subject, program_subject

# --- Causes of findings: one fault in a program is one finding; findings that follow from it are shown behind it ---
# A rule sees one thing, so several rules see a send that is left out: a receive
# without a counterpart, messages that meet others, a wait that never ends. The
# table below names for each code the codes that it can follow from, and the
# keys by which both must be about the same rows. A finding follows from another
# only with such a row in common. So a second fault elsewhere stays a finding of
# its own; one on the same rows keeps its code in the list of what follows.
#
# Nothing is left out: a finding that follows from another has it as its
# ``cause``, and stays among the findings.


Keys = Callable[[Subject, Finding], Iterator[Hashable]]
"""Keys of the rows that a finding is about: two findings with a key in common are about the same rows."""


_INPUT_OF: Mapping[OpKind, OpKind] = MappingProxyType(
    {
        OpKind.RECV_FORWARD: OpKind.RECV_FORWARD,
        OpKind.FORWARD: OpKind.RECV_FORWARD,
        OpKind.RECV_BACKWARD: OpKind.RECV_BACKWARD,
        OpKind.BACKWARD: OpKind.RECV_BACKWARD,
        OpKind.BACKWARD_INPUT: OpKind.RECV_BACKWARD,
    }
)
"""The receive that brings the input of a computation, by its kind; a receive is its own."""


def _witness_ops(finding: Finding) -> tuple[WitnessOp, ...]:
    return finding.witness.ops if isinstance(finding.witness, CycleWitness | OpsWitness) else ()


def _op_ids(finding: Finding) -> list[int]:
    return [op.op_id for op in _witness_ops(finding) if op.op_id is not None]


def same_operation(_: Subject, finding: Finding) -> Iterator[Hashable]:
    """Operations of the witness by rank and text, missing ones too; a WAIT counts as its target."""
    for op in _witness_ops(finding):
        yield op.rank, op.op[len("WAIT(") : -1] if op.op.startswith("WAIT(") else op.op


def same_input(_: Subject, finding: Finding) -> Iterator[Hashable]:
    """Inputs of computations and of the receives that bring them: rank, stage, direction, work item."""
    for witness in _witness_ops(finding):
        op = parse_op(witness.op)
        if op.kind in _INPUT_OF:
            yield witness.rank, op.stage, _INPUT_OF[op.kind], op.micro_batch, op.split


def same_text(_: Subject, finding: Finding) -> Iterator[Hashable]:
    """Operations of the witness on whichever rank."""
    for op in _witness_ops(finding):
        yield op.op


def same_channel(subject: Subject, finding: Finding) -> Iterator[Hashable]:
    """Channels of the witness's transfers, and of the transfers that its WAITs wait for."""
    graph = subject.graph
    for op_id in _op_ids(finding):
        for row in (op_id, int(graph.waits_for[op_id])):
            if row != NONE and graph.channel[row] != NONE:
                yield int(graph.channel[row])


def same_fault_of_a_channel(subject: Subject, finding: Finding) -> Iterator[Hashable]:
    """The block of messages in another order, else the shift of a channel by a missing end.

    A pair whose ends are both alone is a fault of its own: it has no key.
    """
    graph, by_channel = subject.graph, subject.once(FaultsByChannel)
    ids = [op_id for op_id in _op_ids(finding) if graph.channel[op_id] != NONE]
    channel = int(graph.channel[ids[0]])
    faults = by_channel[channel]
    if finding.code == "PP301":
        yield channel, "shift", 0
        return
    blocks = {faults.block_of[op_id] for op_id in ids if op_id in faults.block_of}
    yield from ((channel, "block", block) for block in blocks)
    if not blocks and any(op_id in faults.counterpart for op_id in ids):
        yield channel, "shift", faults.run_of[ids[0]]


def same_group(subject: Subject, finding: Finding) -> Iterator[Hashable]:
    """Groups of the witness's collectives."""
    graph = subject.graph
    for op_id in _op_ids(finding):
        if KINDS[graph.kind[op_id]] in COLLECTIVE_KINDS and graph.group[op_id] != NONE:
            yield int(graph.group[op_id])


def same_update(subject: Subject, finding: Finding) -> Iterator[Hashable]:
    """(rank, stage) of the steps of the witness, and of the reductions before them.

    If a member leaves a reduction out, the witness has only the others: all members of the group count.
    """
    graph = subject.graph
    for op_id in _op_ids(finding):
        parent = int(graph.parent[op_id])
        if KINDS[graph.kind[op_id if parent == NONE else parent]] in {OpKind.STEP, *UPDATE_KINDS}:
            group, stage = int(graph.group[op_id]), int(graph.stage[op_id])
            yield int(graph.rank[op_id]), stage
            if finding.code == "PP306" and group != NONE:
                yield from ((rank, stage) for rank in graph.groups[group].ranks)


def whole_step(_: Subject, __: Finding) -> Iterator[Hashable]:
    """One key for all: for findings that are not about a row."""
    yield None


def same_key_of_the_plan(_: Subject, finding: Finding) -> Iterator[Hashable]:
    """The key in the plan."""
    if finding.location is not None:
        yield finding.location


@dataclass(frozen=True, slots=True)
class Follows:
    """Findings of ``code`` follow from the first one of ``causes`` that has a key in common with them.

    A code that follows from itself follows from its first finding with the key.
    """

    code: str
    causes: tuple[str, ...]
    by: Keys


_MATCHING = ("PP301", "PP302")
_PLACED = ("PP122", "PP123", *_MATCHING)

FOLLOWS: tuple[Follows, ...] = (
    # A stage that a rank takes over is missing on its owner.
    Follows("PP121", ("PP124",), same_text),
    # Exchanged computations also run before the stage, or the split, that feeds them.
    Follows("PP127", ("PP123",), same_operation),
    Follows("PP129", ("PP123",), same_operation),
    # A FIFO matches by position: a missing end shifts all later messages, and a block in another order is one fault.
    Follows("PP302", ("PP301", "PP302"), same_fault_of_a_channel),
    # Mismatched ends also differ in their tensors.
    *(Follows(code, ("PP302",), same_operation) for code in ("PP303", "PP304", "PP305", "PP311")),
    # An announcement that is missing, or meets another, announces the wrong tensor.
    Follows("PP313", _MATCHING, same_operation),
    # Exchanged transfers, computations or collectives let ranks wait for each other.
    Follows("PP401", ("PP123", "PP302", "PP306"), same_operation),
    # On an unbalanced channel the last end is never met; a missing transfer leaves its wait behind, and a late one is
    # not under way when it is waited for; a member that is short of a collective never joins the last one.
    Follows("PP402", ("PP301",), same_channel),
    Follows("PP402", _MATCHING, same_operation),
    Follows("PP402", ("PP306",), same_group),
    # A transfer that is issued twice is waited for once.
    Follows("PP505", ("PP301", "PP126"), same_operation),
    # The input of a missing computation is received, and not waited for.
    Follows("PP505", ("PP121",), same_input),
    # Buffers: an operation at the wrong position, or twice, reads and writes its buffers there.
    *(Follows(code, (*_PLACED, "PP505"), same_operation) for code in ("PP501", "PP502", "PP503", "PP507", "PP508")),
    Follows("PP506", ("PP121", *_PLACED, "PP306"), same_operation),
    Follows("PP509", _PLACED, same_operation),
    # Every computation reads weights too early that are written late, or not gathered at all.
    Follows("PP506", ("PP506",), same_operation),
    # So are its result, and its contribution to a sum.
    Follows("PP510", _PLACED, same_operation),
    Follows("PP514", ("PP122",), same_operation),
    # An operation before its buffer's writer also sends, or receives into, the buffer too early.
    Follows("PP501", ("PP506",), same_operation),
    Follows("PP502", ("PP506",), same_operation),
    # One number of slots is for all pools.
    Follows("PP504", ("PP504",), same_key_of_the_plan),
    # A reduction that a member leaves out sums nothing there.
    Follows("PP601", ("PP306",), same_update),
    Follows("PP603", ("PP306",), same_update),
    # A step that never ends has no memory use.
    Follows("PP702", ("PP301", "PP401", "PP402"), whole_step),
    # A backward that runs twice is added twice, and its tokens count twice.
    Follows("PP605", ("PP122",), same_operation),
    Follows("PP606", ("PP122", "PP605"), same_operation),
)


def with_causes(subject: Subject, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the findings with their causes, each followed by those that follow from it.

    Args:
        subject: the checked subject.
        findings: the findings, in the order in which they are to be shown.
    """
    search = _Search(subject, findings)
    following: dict[int, list[Finding]] = {}
    for index, finding in enumerate(findings):
        root = search.root(index)
        following.setdefault(root, []).append(finding if root == index else replace(finding, cause=findings[root]))
    return tuple(
        finding
        for root in sorted(following)
        for finding in sorted(following[root], key=lambda finding: finding.cause is not None)
    )


class _Search:
    """The cause of each finding, as an index; keys are made only for codes that can be causes here."""

    def __init__(self, subject: Subject, findings: Sequence[Finding]) -> None:
        self._subject, self._findings = subject, findings
        self._of_code = grouped((finding.code, index) for index, finding in enumerate(findings))
        self._first: dict[tuple[str, Keys], dict[Hashable, int]] = {}

    def root(self, index: int) -> int:
        """The finding at the beginning of the chain of causes."""
        while (cause := self._cause(index)) is not None:
            index = cause
        return index

    def _cause(self, index: int) -> int | None:
        finding = self._findings[index]
        for row in FOLLOWS:
            if row.code == finding.code:
                for code in row.causes:
                    by_key = self._with_key(code, row.by)
                    causes = [by_key[key] for key in row.by(self._subject, finding) if key in by_key] if by_key else []
                    if causes and (code != finding.code or min(causes) < index):
                        return min(causes)
        return None

    def _with_key(self, code: str, by: Keys) -> dict[Hashable, int]:
        """By key the first finding of a code with it."""
        if (code, by) not in self._first:
            first: dict[Hashable, int] = {}
            for index in self._of_code.get(code, ()):
                for key in by(self._subject, self._findings[index]):
                    first.setdefault(key, index)
            self._first[code, by] = first
        return self._first[code, by]


CHECK_CODES: tuple[str, ...] = tuple(sorted(doc.code for doc in (*(rule.doc for rule in RULES), *SUPPRESSION_CODES)))
"""The codes of every rule that ``check`` runs, which can be selected and left out."""

OnProgress = Callable[[str, int, int], None]
"""Callback for progress: the current task, the number of rules done and of all."""


WHOLE_STEP = (*(f"PP12{digit}" for digit in range(1, 10)), "PP3")
"""Code prefixes of the rules on a whole step: all is computed once, in order, and sent to its receiver."""


@dataclass(frozen=True)
class Report:
    """Result of ``check`` for one plan, whose identity is the graph digest ``digest``.

    ``suppressed`` are the warnings and notes that the plan declares as wanted;
    ``not_run`` the codes of the rules that a selection left out, and ``undecided`` the values that an importer has not
    understood: the plan may then differ from the job's.
    """

    subject: Subject
    digest: str
    findings: tuple[Finding, ...]
    in_flight: tuple[InFlight, ...]
    suppressed: tuple[Suppressed, ...] = ()
    not_run: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that make the plan unfit to run."""
        return tuple(f for f in self.findings if f.severity is Severity.ERROR)

    @property
    def verdict(self) -> Verdict:
        """Undecided for input that is not understood; refused with errors; incomplete without every rule."""
        if self.undecided:
            return Verdict.UNDECIDED
        if self.errors:
            return Verdict.REFUSED
        return Verdict.INCOMPLETE if self.not_run else Verdict.PROVED

    @property
    def conclusion(self) -> Certificate:
        """The graph digest and the verdict, with the versions of the rules and of the backend's table."""
        return certificate_of(self.subject, self.digest, self.verdict)

    @property
    def certificate(self) -> Certificate | None:
        """The conclusion for a proved plan, else None; the executor runs no plan without it."""
        return self.conclusion if self.verdict is Verdict.PROVED else None

    def to_json(self) -> dict[str, Any]:
        """The form of ``check --format json``; see ``docs/schemas/check.schema.json``."""
        return {
            "digest": self.digest,
            "certified": self.certificate is not None,
            "findings": [finding_to_json(f) for f in self.findings],
            "suppressed": [{**finding_to_json(s.finding), "reason": s.reason} for s in self.suppressed],
            "not_run": list(self.not_run),
            **({"undecided": list(self.undecided)} if self.undecided else {}),
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


def require_whole_step(lowered: LoweredPlan, source: SourceMap | None, codes: tuple[str, ...] = WHOLE_STEP) -> None:
    """Refuse a plan whose own schedule is not a whole step: its timeline would not show a real step.

    An evaluation, which has no backward, is whole without one. ``codes`` are the prefixes of the codes of
    the rules to run, ``source`` the text of the plan, if there is one.

    Raises:
        SimulationError: with the errors of those rules.
    """
    if lowered.foreign is None:
        return
    subject = lowered_subject(lowered, source)
    rules = _rules_for(subject, [code for code in CHECK_CODES if code.startswith(codes)])
    findings = [subject.placed(finding) for rule in rules for finding in rule.check(subject)]
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        from pipeproof.sim.outcome import SimulationError  # a check loads no simulator

        raise SimulationError(*with_causes(subject, sorted(errors, key=code_order)), source=source)


def check_subject(
    subject: Subject, selection: Selection = ALL_RULES, on_progress: OnProgress | None = None
) -> Report:  # fmt: skip
    """Check a subject by every selected rule that applies to it; ``on_progress`` is called before each rule.

    Findings are in the order of the codes, each followed by those that follow from it.
    Findings that the plan suppresses are listed apart, with the plan's reason.
    """
    run = [code for code in CHECK_CODES if selection.picks(code)]
    rules = _rules_for(subject, run)
    all_findings = []
    for number, rule in enumerate(rules):
        if on_progress is not None:
            on_progress(f"checking {rule.doc.code}", number, len(rules))
        all_findings += [subject.placed(finding) for finding in rule.check(subject)]
    kept, suppressed = suppress(subject, all_findings, {rule.doc.code: rule.doc for rule in RULES}, run)
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

    ``backend`` is the table whose promises hold (default: Paddle's gloo);
    ``origins`` the source locations of rows by the graph's ``origin`` column;
    ``facts`` are additional facts.
    """
    return check_subject(graph_subject(graph, backend=backend, origins=origins, facts=facts))


def check_program(
    text: str, *, file: str = "<program>", backend: BackendTable | None = None, facts: Facts = NO_FACTS
) -> Report:
    """Check a program in text form (``schedule.text_form``) by every rule that needs no plan.

    ``file`` is its name in findings; ``backend`` and ``facts`` as for ``check_graph``.

    Raises:
        BadPlanError: the text is not a program; the findings have line and column.
    """
    return check_subject(program_subject(text, file=file, backend=backend, facts=facts))
