"""Verdict about a job: its state, the ranks that cause its hang, and the ranks that wait because of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.diagnostics.units import time_text
from pipeproof.diagnostics.wait_graph import minority, ranks_text
from pipeproof.exec.monitor.job import JobNow, ProcessState
from pipeproof.exec.store.process_state import ProcessId, boot_id, environment_of, siblings
from pipeproof.interop.hang.py_spy import Stack, ask_py_spy

# --- Stacks of ranks by py-spy: from files, or from the ranks on this host that cause a hang ---


_MOST_ASKED: Final = 4
_RANK_VARIABLES: Final = ("RANK", "PADDLE_TRAINER_ID", "SLURM_PROCID")
"""Variables with the rank, by the launchers of PyTorch and Paddle, and by Slurm."""


@dataclass(frozen=True)
class RankStacks:
    """Stacks of ranks, and notes about ranks without one."""

    stacks: Mapping[int, Stack]
    notes: tuple[str, ...] = ()

    def lines(self, ranks: Sequence[int]) -> Iterator[str]:
        """Return a line for each of these ranks that has a stack, and the notes."""
        yield from (f"rank {rank}, by py-spy: {self.stacks[rank].text}" for rank in ranks if rank in self.stacks)
        yield from self.notes

    def to_json(self) -> list[dict[str, Any]]:
        """The stacks as JSON data."""
        return [
            {
                "rank": rank,
                "pid": stack.pid,
                "active": stack.is_active,
                "frames": [{"function": each.function, "file": each.file, "line": each.line} for each in stack.frames],
            }
            for rank, stack in sorted(self.stacks.items())
        ]

    @property
    def outside(self) -> tuple[int, ...]:
        """Ranks that are not in communication while others are."""
        ranks = tuple(sorted(rank for rank, stack in self.stacks.items() if not stack.is_communicating))
        return ranks if len(ranks) < len(self.stacks) else ()

    @property
    def different(self) -> tuple[int, ...]:
        """Ranks that are in another call of the program than most; all ranks if no call is the most frequent."""
        calls = {rank: stack.own[:1] or stack.frames[:1] for rank, stack in self.stacks.items()}
        return minority(calls) or (tuple(sorted(calls)) if len(set(calls.values())) > 1 else ())

    def comparison(self) -> str:
        """Return which ranks to look at first, in one line."""
        outside, different = self.outside, self.different
        if outside:
            return f"not in communication: {ranks_text(outside)}"
        if not different:
            return "all ranks are in one call"
        if len(different) < len(self.stacks):
            return f"in another call than the others: {ranks_text(different)}"
        return "the ranks are in different calls"


def ask_for_causes(job: JobNow, causes: Sequence[int]) -> RankStacks:
    """Ask py-spy for the stacks of the ranks of a cause that run on this host.

    A rank without a ring is found by its environment among the processes that the same launcher started.
    """
    stacks, notes = {}, []
    for rank in causes[:_MOST_ASKED]:
        pid = _pid_here(job, rank)
        answer = None if pid is None else ask_py_spy(pid)
        if isinstance(answer, Stack):
            stacks[rank] = answer
        elif answer is not None and (rank not in job.by_rank or not job.by_rank[rank].own_line):
            notes.append(f"no stack of rank {rank}: {answer}")
    return RankStacks(stacks, tuple(notes))


def _pid_here(job: JobNow, rank: int) -> int | None:
    own_host = socket.gethostname(), boot_id()
    local_ranks = [each for each in job.ranks if (each.ring.header.host, each.ring.header.boot_id) == own_host]
    now = next((each for each in local_ranks if each.rank == rank), None)
    if now is not None:
        header = now.ring.header
        is_running = now.state is ProcessState.RUNNING and ProcessId(header.pid, header.process_start).is_alive
        return header.pid if is_running else None
    if rank in job.by_rank:
        return None
    for other in local_ranks:
        for pid in siblings(other.ring.header.pid):
            environment = environment_of(pid)
            if any(environment.get(name) == str(rank) for name in _RANK_VARIABLES):
                return pid
    return None


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
    """A rank does not come: its host is outside of communication."""
    RAISED = "raised"
    KILLED = "killed"
    STOPPED = "stopped"
    UNFINISHED = "unfinished"
    """All parts are issued, and the operation does not end."""


@dataclass(frozen=True, slots=True)
class BlockedRank:
    """A rank that waits: the operation that blocks it, its line, the seconds, and the ranks that it waits for."""

    rank: int
    op: str
    at: str
    seconds: float
    ranks: tuple[int, ...]
    meaning: str = ""
    """Operation of the plan, its micro-batch and its stage, if known."""


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
    """Stacks of ranks by py-spy; the text has the stacks of the cause."""

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
