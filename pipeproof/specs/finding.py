"""What pipeproof tells a person: findings with a place, numbers, a witness and a mend.

A finding is the same whether a plan file could not be read, a rule refused a
plan or a run went wrong; the three differ in their code family only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a finding weighs: only errors change the exit status."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a plan file; line and column count from 1."""

    file: str
    line: int
    column: int
    end_column: int | None = None
    """Last column to underline (inclusive), when it is on the same line."""


@dataclass(frozen=True, slots=True)
class ElementRange:
    """A half-open range of flattened elements of the tensor that ``rank`` should hold.

    ``rank`` is the receiving rank; ``source_rank`` is the rank whose elements
    these are. ``start`` and ``stop`` count elements of the source's local
    tensor, flattened in C order; ``covers`` says in global coordinates which
    they are.
    """

    rank: int
    start: int
    stop: int
    source_rank: int
    covers: str = ""


@dataclass(frozen=True, slots=True)
class RangesWitness:
    """Elements that a receiver should hold and does not, and those it gets instead."""

    lost: tuple[ElementRange, ...]
    foreign: tuple[ElementRange, ...]


@dataclass(frozen=True, slots=True)
class WitnessOp:
    """One operation of a witness: the rank that issues it and its text form."""

    rank: int
    op: str
    op_id: int | None = None
    """Integer id in the op table; None for an operation that is missing there."""


@dataclass(frozen=True, slots=True)
class ProgramExcerpt:
    """Stretches of one rank's program in order, ``..`` for what is left out.

    ``numbers`` has, for each of ``ops``, its place in the witness counted
    from 1, or 0 for what only stands beside it.
    """

    rank: int
    ops: tuple[str, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CycleWitness:
    """A shortest wait-for cycle: each operation waits for the next, the last for the first.

    ``programs`` shows where these operations stand, a rank each.
    """

    ops: tuple[WitnessOp, ...]
    programs: tuple[ProgramExcerpt, ...] = ()


@dataclass(frozen=True, slots=True)
class OpsWitness:
    """The operations that a finding is about, in program order."""

    ops: tuple[WitnessOp, ...]


Witness = RangesWitness | CycleWitness | OpsWitness


@dataclass(frozen=True, slots=True)
class Finding:
    """One diagnostic: a stable code, a place, the fact with its numbers, and the mend."""

    code: str
    severity: Severity
    message: str
    location: Location | None = None
    help: str | None = None
    witness: Witness | None = None


class PipeproofError(Exception):
    """Anything that pipeproof refuses, with the findings that say why."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__("; ".join(f"{f.code}: {f.message}" for f in findings))
        self.findings = findings


class BadPlanError(PipeproofError):
    """The plan cannot be read or makes no sense before any communication is looked at."""


class BadPlanAtError(BadPlanError):
    """A bad plan whose blame is known as a plan key: ``path``, which whoever has the file turns into a place."""

    def __init__(self, finding: Finding, path: tuple[str | int, ...]) -> None:
        super().__init__(finding)
        self.path = path
