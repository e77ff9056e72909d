"""Stacks of ranks by py-spy: from files, or asked now of the ranks that cause a hang and run on this host."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pipeproof.diagnostics.wait_graph import minority, ranks_text
from pipeproof.exec.monitor.job import JobNow, ProcessState
from pipeproof.exec.store.process_state import ProcessId, boot_id, environment_of, siblings
from pipeproof.interop.hang.py_spy import Stack, ask_py_spy

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
        """Ranks that are in another call of the program than most; all of them without a most frequent one."""
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

    A rank without a ring is found by its environment among the processes that the launcher of the others started.
    """
    stacks, notes = {}, []
    for rank in causes[:_MOST_ASKED]:
        pid = _pid_here(job, rank)
        answer = None if pid is None else ask_py_spy(pid)
        if isinstance(answer, Stack):
            stacks[rank] = answer
        elif answer is not None and not _has_line(job, rank):
            notes.append(f"no stack of rank {rank}: {answer}")
    return RankStacks(stacks, tuple(notes))


def _has_line(job: JobNow, rank: int) -> bool:
    now = job.by_rank.get(rank)
    return now is not None and bool(now.own_line)


def _pid_here(job: JobNow, rank: int) -> int | None:
    here = [each for each in job.ranks if _is_here(each.ring.header.host, each.ring.header.boot_id)]
    now = next((each for each in here if each.rank == rank), None)
    if now is not None:
        header = now.ring.header
        is_running = now.state is ProcessState.RUNNING and ProcessId(header.pid, header.process_start).is_alive
        return header.pid if is_running else None
    if rank in job.by_rank:
        return None
    for other in here:
        for pid in siblings(other.ring.header.pid):
            environment = environment_of(pid)
            if any(environment.get(name) == str(rank) for name in _RANK_VARIABLES):
                return pid
    return None


def _is_here(host: str, boot: str) -> bool:
    return (host, boot) == (socket.gethostname(), boot_id())
