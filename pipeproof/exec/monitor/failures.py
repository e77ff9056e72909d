"""Failures that are found without following waits: an error, a process that does not run, a mismatch.

Two of them need no patience, because no speed ends the job well: the program of
a rank noted the error that ended it, and a process is gone that noted no end.
The short grace is for their order: the first of several errors is the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pipeproof.diagnostics.finding import Finding
from pipeproof.exec.monitor.job import JobNow, ProcessState, RankNow
from pipeproof.exec.monitor.monitor_codes import RANK_FAILED, RANK_STOPPED
from pipeproof.exec.monitor.own_history import minority
from pipeproof.exec.monitor.ring import OpState
from pipeproof.exec.monitor.suspects import most_suspect, reasons_for
from pipeproof.exec.monitor.verdict import MOST_WAITS, PATIENCE_S, Kind, Status
from pipeproof.exec.monitor.waits import Analysis, at_text, location_of, ring_entry
from pipeproof.interop.hang.collective_matches import Disagreement, disagreements
from pipeproof.interop.hang.flight_recorder import State

_FAILURE_GRACE_S: Final = 1.0


@dataclass(frozen=True)
class Failure:
    """Kind of a hang, its causes, the findings about it, and what speaks for the causes."""

    kind: Kind
    causes: tuple[int, ...]
    findings: Sequence[Finding]
    reasons: tuple[str, ...] = ()
    status: Status = Status.HANG


def certain_failure(analysis: Analysis, patience_s: float, is_waiting: bool) -> Failure | None:
    """Return a failure that is found without following waits: a mismatch, an error, a process that does not run."""
    job = analysis.job
    raised = [rank for rank in job.ranks if rank.state is ProcessState.RAISED]
    in_call = [rank for rank in raised if rank.last is not None and _failed_last(rank)]
    own = sorted((rank for rank in raised if rank not in in_call), key=lambda rank: rank.ring.header.end_ns)
    gone = [rank for rank in job.ranks if rank.state is ProcessState.GONE and (in_call or _is_old(rank, job))]
    if own and (in_call or is_waiting or _is_old(own[0], job)):
        header = own[0].ring.header
        message = f"rank {header.rank} raised {header.error}"
        return Failure(Kind.RAISED, (header.rank,), [_rank_failed(own[0], message)])
    has_failed = bool(in_call or gone)
    mismatch = _unfinished_mismatch(analysis, 0 if has_failed else patience_s) if has_failed or is_waiting else None
    if mismatch is not None:
        ranks, finding = mismatch
        return Failure(Kind.MISMATCH, ranks, [finding], reasons_for(analysis, ranks))
    if gone:
        message = f"the process of rank {gone[0].rank} (PID {gone[0].ring.header.pid}) is gone and noted no end"
        ranks = tuple(rank.rank for rank in gone)
        return Failure(Kind.KILLED, ranks, [_rank_failed(rank, message) for rank in gone[:1]])
    halted = [
        rank
        for rank in job.ranks
        if rank.state is ProcessState.STOPPED and seconds_since_heartbeat(rank, job) >= min(patience_s, PATIENCE_S)
    ]
    if halted:
        ranks = tuple(rank.rank for rank in halted)
        return Failure(Kind.STOPPED, ranks, [stopped(rank, job, "is stopped (state T)") for rank in halted])
    if in_call and all(_is_old(rank, job) for rank in in_call):
        first = min(in_call, key=lambda rank: rank.ring.header.end_ns)
        message = f"rank {first.rank} raised {first.ring.header.error} in {last_text(first)}, before any other rank"
        return Failure(Kind.RAISED, (first.rank,), [_rank_failed(first, message)])
    return None


def _failed_last(rank: RankNow) -> bool:
    return any(op.state is OpState.FAILED for op in rank.ring.ops[-2:])


def _is_old(rank: RankNow, job: JobNow) -> bool:
    header = rank.ring.header
    return (job.now_ns - max(header.heartbeat_ns, header.end_ns)) / 1e9 > _FAILURE_GRACE_S


def seconds_since_heartbeat(rank: RankNow, job: JobNow) -> float:
    """Return the age of the last heartbeat of a rank."""
    return (job.now_ns - rank.ring.header.heartbeat_ns) / 1e9


def _rank_failed(rank: RankNow, message: str) -> Finding:
    last = rank.last
    lines = [message, f"its last operation is {last_text(rank)}"]
    suggested_fix = "look at the end of its own log first; the errors of the other ranks follow from it"
    if rank.state is ProcessState.GONE:
        suggested_fix = "look at the kernel's log (`dmesg -T | grep -i kill`) and at the scheduler's for PID "
        suggested_fix += str(rank.ring.header.pid)
    return RANK_FAILED.finding("\n".join(lines), None if last is None else location_of(last.at), suggested_fix)


def last_text(rank: RankNow) -> str:
    """Return the last operation of a rank, with its line."""
    op = rank.last
    if op is None:
        return "none"
    return f"{ring_entry(rank.rank, 0, op).text}{' at ' + op.at if op.at else ''}"


def stopped(rank: RankNow, job: JobNow, what: str) -> Finding:
    """Return finding PP954 about a rank that does not run."""
    header = rank.ring.header
    seconds = seconds_since_heartbeat(rank, job)
    return RANK_STOPPED.finding(
        f"rank {rank.rank} (PID {header.pid} on {header.host}) {what}; its last heartbeat is {seconds:.1f} s old\n"
        f"its last operation is {last_text(rank)}",
        None if rank.last is None else location_of(rank.last.at),
        f"if nobody debugs it: kill -CONT {header.pid}",
    )


def _unfinished_mismatch(analysis: Analysis, patience_s: float) -> tuple[tuple[int, ...], Finding] | None:
    """Return the ranks that differ, and the finding, of the first mismatch that is not done on one of its ranks.

    For ``patience_s`` nothing has happened to any part of it.
    """
    unfinished: list[Disagreement] = [
        disagreement
        for disagreement in disagreements(analysis.matches)
        if any(entry.state is not State.COMPLETED for entry in disagreement.entries)
        and all(analysis.seconds(entry) >= patience_s for entry in disagreement.entries)
    ]
    if not unfinished:
        return None
    first = min(unfinished, key=lambda each: min(analysis.op(entry).issued_ns for entry in each.entries))
    ranks = minority({entry.rank: (entry.kind, entry.num_elements, entry.dtypes) for entry in first.entries})
    if len(ranks) > 1:
        ranks = most_suspect(analysis, ranks)
    finding = first.finding
    lines = [f"rank {entry.rank} issued {entry.text} of {entry.tensor_text}{at_text(analysis.op(entry))}"
             for entry in first.entries[:MOST_WAITS]]  # fmt: skip
    message = "\n".join((finding.message, *lines))
    return ranks, Finding(finding.code, finding.severity, message, finding.location, finding.help, finding.witness)
