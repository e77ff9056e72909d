"""Findings: diagnostics with a location, numbers, a witness and a suggested fix.

Findings of plan files, of rules and of runs have the same form; they differ
in their code family only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path


class Severity(StrEnum):
    """Severity of a finding: only errors change the exit status."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Location:
    """A position in a file of the user; line and column count from 1.

    As text it is ``file:line:column`` in every output.
    """

    file: str
    line: int = 1
    column: int = 1
    end_column: int | None = None
    """Last column to underline (inclusive), when it is on the same line."""

    def __str__(self) -> str:
        return f"{shown_path(self.file)}:{self.line}:{self.column}"

    def part(self, start: int, stop: int) -> Location:
        """Return the location of the characters ``start : stop``, at least one, of the text that begins here."""
        column = self.column + start
        return Location(self.file, self.line, column, max(column, self.column + stop - 1))


def shown_path(file: str) -> str:
    """Return a path relative to the working directory if the file is below it, else unchanged."""
    path = Path(file)
    if not path.is_absolute():
        return file
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the working directory no longer exists
        return file


@dataclass(frozen=True, slots=True)
class ElementRange:
    """A half-open range of flattened elements of the tensor that ``rank`` should hold.

    ``rank`` is the receiving rank; ``source_rank`` is the rank that sent the
    elements. ``start`` and ``stop`` count elements of the source's local
    tensor, flattened in C order; ``covers`` has them in global coordinates.
    """

    rank: int
    start: int
    stop: int
    source_rank: int
    covers: str = ""


@dataclass(frozen=True, slots=True)
class RangesWitness:
    """Elements that a receiver lacks, and elements that it gets instead."""

    lost: tuple[ElementRange, ...]
    foreign: tuple[ElementRange, ...]


@dataclass(frozen=True, slots=True)
class WitnessOp:
    """One operation of a witness: the issuing rank and its text form."""

    rank: int
    op: str
    op_id: int | None = None
    """Integer id in the op table; None for an operation that is missing there."""


@dataclass(frozen=True, slots=True)
class ProgramExcerpt:
    """Excerpts of one rank's program in order, ``..`` for omitted operations.

    ``numbers`` has, for each of ``ops``, its position in the witness counted
    from 1, or 0 for an operation that is only context.
    """

    rank: int
    ops: tuple[str, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CycleWitness:
    """A shortest wait-for cycle: each operation waits for the next, the last for the first.

    ``programs`` shows these operations in the programs of their ranks.
    """

    ops: tuple[WitnessOp, ...]
    programs: tuple[ProgramExcerpt, ...] = ()


@dataclass(frozen=True, slots=True)
class OpsWitness:
    """The operations of a finding, in program order."""

    ops: tuple[WitnessOp, ...]


Witness = RangesWitness | OpsWitness | CycleWitness  # in this order JSON without `programs` is read as an OpsWitness


@dataclass(frozen=True, slots=True)
class Finding:
    """One diagnostic: a stable code, a location, the fact with its numbers, and the suggested fix (``help``).

    ``cause`` is the finding that this one follows from; it has no cause itself.
    """

    code: str
    severity: Severity
    message: str
    location: Location | None = None
    help: str | None = None
    witness: Witness | None = None
    cause: Finding | None = None

    def __str__(self) -> str:
        """Return the message."""
        return self.message


def by_cause(findings: Iterable[Finding]) -> list[tuple[Finding, list[Finding]]]:
    """Return the findings to show, in their order, each with its consequences.

    A finding whose cause is not among them, such as one that was left out, is shown on its own.
    """
    findings = tuple(findings)
    causes = {finding for finding in findings if finding.cause is None}
    shown: list[Finding] = []
    following: dict[Finding, list[Finding]] = {}
    for finding in findings:
        if finding.cause in causes:
            following.setdefault(finding.cause, []).append(finding)
        else:
            shown.append(finding)
    return [(finding, following.pop(finding, [])) for finding in shown]


def code_order(finding: Finding) -> str:
    """Return the sort key for the order of the codes; a finding that follows from another stays after it."""
    return finding.code if finding.cause is None else finding.cause.code


def relinked(findings: Sequence[Finding], rewritten: Sequence[Finding]) -> list[Finding]:
    """Return rewritten findings, one for each of ``findings``, with the rewritten ones as their causes."""
    new = dict(zip(findings, rewritten, strict=True))
    return [f if f.cause is None else replace(f, cause=new.get(f.cause, f.cause)) for f in rewritten]


def file_order(finding: Finding) -> tuple[int, int, str]:
    """Return the sort key for the order of a file; findings without a location come first."""
    location = finding.location
    return (location.line, location.column, finding.code) if location is not None else (0, 0, finding.code)


class PipeproofError(Exception):
    """An input that pipeproof refuses, with the findings that explain it."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__("; ".join(f"{f.code}: {f.message}" for f in findings))
        self.findings = findings


class BadPlanError(PipeproofError):
    """A plan that cannot be read, or is invalid before its communication is checked."""


class BadPlanAtError(BadPlanError):
    """A bad plan with the key at fault: ``path``, which a caller with the file converts to a location."""

    def __init__(self, finding: Finding, path: tuple[str | int, ...]) -> None:
        super().__init__(finding)
        self.path = path


class ExampleKind(StrEnum):
    """Kind of the two examples of a code: tests run them, and pages show them."""

    PLAN = "plan"
    """Sections of a plan file, which replace sections of a small complete plan."""
    PROGRAM = "program"
    """A program text, one line per rank, which is checked without a plan."""
    PYTHON = "python"
    """Python code that assigns the object to check to ``subject``."""
    JOB = "job"
    """Settings of another tool: training arguments of PaddleFormers, or a Fleet strategy as text."""
    COMMAND = "command"
    """A command line."""
    OUTCOME = "outcome"
    """The observation of a run, for codes without an input that could be shown."""


@dataclass(frozen=True, slots=True)
class RuleDoc:
    """A stable code, its one-line title, why it matters, and a wrong and a right example.

    ``severity`` is the severity of the code's findings: ``error`` by default, ``warning`` or ``note``.
    ``kind`` is the kind of the examples; without it, it follows from their text:
    lines of ranks are a program, imports are Python, other texts are plans.
    """

    code: str
    title: str
    explanation: str
    wrong: str
    right: str
    severity: str = "error"
    kind: ExampleKind | None = None

    @property
    def example_kind(self) -> ExampleKind:
        """Kind of the examples, given or from their text."""
        if self.kind is not None:
            return self.kind
        if _RANK.search(self.wrong):
            return ExampleKind.PROGRAM
        return ExampleKind.PYTHON if _IMPORT.search(self.wrong) else ExampleKind.PLAN

    def finding(
        self, message: str, location: Location | None = None, help: str | None = None, witness: Witness | None = None
    ) -> Finding:
        """Return a finding with this code and severity."""
        return Finding(self.code, Severity(self.severity), message, location, help, witness)


_RANK = re.compile(r"^rank \d+:", re.MULTILINE)
_IMPORT = re.compile(r"^(from|import) ", re.MULTILINE)
