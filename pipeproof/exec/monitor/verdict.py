"""Verdict about a job: its state, the ranks that cause its hang, and the ranks that wait because of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.diagnostics.units import time_text
from pipeproof.diagnostics.wait_graph import ranks_text
from pipeproof.exec.monitor.job import ProcessState
from pipeproof.exec.monitor.rank_stacks import RankStacks

PATIENCE_S: Final = 5.0
"""Wait of a rank from which a job counts as hung."""
SLOW_S: Final = 60.0
"""Wait for a rank that computes from which a job counts as hung."""
MOST_WAITS: Final = 16
"""Waits that a text lists."""


class Status(StrEnum):
    """State of a job."""

    RUNNING = "running"
    SLOW = "slow"
    HANG = "hang"
    ERROR = "error"
    """It runs, and computes wrong numbers: members of a collective differ."""
    ENDED = "ended"


FAILURES: Final = (Status.HANG, Status.ERROR)


class Kind(StrEnum):
    """Kind of a hang."""

    NONE = "none"
    MISMATCH = "mismatch"
    """Members of a collective, or ends of a message, differ."""
    CYCLE = "cycle"
    """Ranks wait for each other."""
    ENDED = "ended"
    """A rank has ended its program, and others wait for it."""
    ABSENT = "absent"
    """A rank does not come: its host is elsewhere than in communication."""
    RAISED = "raised"
    KILLED = "killed"
    STOPPED = "stopped"
    UNFINISHED = "unfinished"
    """All parts are issued, and the operation does not end."""


@dataclass(frozen=True, slots=True)
class BlockedRank:
    """A rank that waits: the operation that blocks it, its line, for how long, and for which ranks."""

    rank: int
    op: str
    at: str
    seconds: float
    ranks: tuple[int, ...]
    meaning: str = ""
    """Operation of the plan, its micro-batch and its stage, where they are known."""


@dataclass(frozen=True)
class Verdict:
    """State of a job, the ranks that cause its hang, those that wait, and the findings."""

    status: Status
    kind: Kind
    causes: tuple[int, ...]
    waits: tuple[BlockedRank, ...]
    findings: tuple[Finding, ...]
    reasons: tuple[str, ...]
    states: Mapping[int, ProcessState]
    missing: tuple[int, ...]
    plan: tuple[str, ...] = ()
    """Positions of the ranks of the cause in the plan, in sentences."""
    stacks: RankStacks = field(default_factory=lambda: RankStacks({}))
    """Stacks of ranks by py-spy; the text has those of the cause."""

    def lines(self) -> Iterator[str]:
        """Return the verdict as text, apart from its findings: the cause, the reasons, and the ranks that wait."""
        if self.status in (*FAILURES, Status.SLOW):
            named = ranks_text(self.causes) if self.causes else "rank unknown"
            yield f"{'slow' if self.status is Status.SLOW else 'cause'}: {named}"
            yield from (f"  because {reason}" for reason in self.reasons)
            yield from (f"  by the plan, {note}" for note in self.plan)
            yield from (f"  {line}" for line in self.stacks.lines(self.causes))
        else:
            yield f"{self.status}: no rank is the cause of a hang"
        for wait in self.waits[:MOST_WAITS]:
            meaning = f" ({wait.meaning})" if wait.meaning else ""
            at = f" at {wait.at}" if wait.at else ""
            others = f" for {ranks_text(wait.ranks)}" if wait.ranks else ""
            yield f"rank {wait.rank} waits {time_text(wait.seconds * 1e6)} in {wait.op}{meaning}{at}{others}"
        if self.missing:
            yield f"no ring of {ranks_text(self.missing)}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON data."""
        return {
            "status": str(self.status),
            "kind": str(self.kind),
            "causes": list(self.causes),
            "reasons": list(self.reasons),
            "plan": list(self.plan),
            "waits": [
                {
                    "rank": wait.rank, "op": wait.op, "at": wait.at, "seconds": round(wait.seconds, 3),
                    "ranks": list(wait.ranks), "meaning": wait.meaning,
                }
                for wait in self.waits
            ],
            "ranks": [{"rank": rank, "state": str(state)} for rank, state in sorted(self.states.items())],
            "ranks_without_ring": list(self.missing),
            "stacks": self.stacks.to_json(),
            "findings": [finding_to_json(finding) for finding in self.findings],
        }  # fmt: skip
