"""The documentation of one code, as ``pipeproof --explain`` prints it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from pipeproof.diagnostics.finding import Finding, Location, Severity, Witness


class ExampleKind(StrEnum):
    """Kind of the two examples of a code: tests run them, and pages show them."""

    PLAN = "plan"
    """Sections of a plan file, which replace those of a small complete plan."""
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

    ``severity`` is that of the code's findings: ``error``, if nothing else is given, ``warning`` or ``note``.
    ``kind`` is the kind of the examples; without it, it follows from their text:
    lines of ranks are a program, imports are Python, anything else is a plan.
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
