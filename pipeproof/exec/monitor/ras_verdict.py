"""Verdict about a job from two looks at NCCL's RAS server: the ranks that did not launch the collectives of others.

Counts that differ while a job runs are normal. If no count of a job has changed between two looks, a rank that launched
more collectives of a communicator waits for ranks that launched fewer. Following these waits over all communicators
leads to the cause. RAS counts collectives only, so it cannot distinguish ranks that wait for messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.problems import grouped
from pipeproof.diagnostics.units import time_text
from pipeproof.diagnostics.wait_graph import Wait, WaitGraph, minority
from pipeproof.exec.monitor.job import ProcessState
from pipeproof.exec.monitor.monitor_codes import RANK_FAILED, RANK_STOPPED
from pipeproof.exec.monitor.verdict import PATIENCE_S, BlockedRank, Kind, Status, Verdict
from pipeproof.interop.hang.hang_codes import DISAGREEMENT, HANG_CYCLE, NEVER_ISSUED
from pipeproof.interop.hang.nccl_ras import PORT, RasCommunicator, RasRank, RasStatus, ask_ras


@dataclass
class RasFollower:
    """Repeated verdicts of a RAS server: compares the counts with the last change, if it is long enough ago."""

    host: str
    port: int = PORT
    patience_s: float = PATIENCE_S
    _last: tuple[RasStatus, float] | None = field(default=None, init=False)

    def look(self) -> tuple[Verdict, None] | None:
        """Return the verdict; None until no count has changed for ``patience_s`` seconds.

        Raises:
            PlanFileError: PP956, no server answers there, or its output is not understood.
        """
        now, now_s = ask_ras(self.host, self.port), time.monotonic()
        if self._last is None or _counts(self._last[0]) != _counts(now):
            self._last = now, now_s
        before, before_s = self._last
        if now_s - before_s < self.patience_s:
            return None
        return check_ras(before, now, now_s - before_s), None


def check_ras(before: RasStatus, now: RasStatus, seconds: float) -> Verdict:
    """Return the verdict from two looks that are ``seconds`` apart.

    Ranks are counted in the largest communicator; a process outside of it has its number in its own communicator.
    """
    numbers = _Numbers(now)
    states = {
        number: ProcessState.GONE if rank.is_dead else ProcessState.SILENT if rank.is_silent else ProcessState.RUNNING
        for number, rank in numbers.ranks()
    }
    broken = _broken(before, numbers)
    if broken is not None:
        kind, causes, finding = broken
        return Verdict(Status.HANG, kind, causes, (), (finding,), (), states, ())
    differences = [] if _counts(before) != _counts(now) else list(_differences(now, numbers))
    if not differences:
        return Verdict(Status.RUNNING, Kind.NONE, (), (), (), (), states, ())
    waits = tuple(
        BlockedRank(rank, f"{each.op} #{each.most - 1} of communicator {each.communicator}", "", seconds, each.behind)
        for each in differences
        for rank in each.ahead
    )
    kind, causes = _cause(differences)
    return Verdict(Status.HANG, kind, causes, waits, (_finding(kind, differences, seconds),), (), states, ())


@dataclass(frozen=True)
class _Difference:
    """Ranks of a communicator that launched the most collectives of a kind, and ranks that launched fewer."""

    communicator: str
    op: str
    most: int
    ahead: tuple[int, ...]
    behind: tuple[int, ...]
    lines: tuple[str, ...]


class _Numbers:
    """Numbers of ranks in the largest communicator."""

    def __init__(self, status: RasStatus) -> None:
        self._status = status
        largest = max(status.values(), key=lambda each: each.size, default=None)
        ranks: Mapping[int, RasRank] = {} if largest is None else largest.ranks
        self._known = {(rank.host, rank.pid, rank.gpu): number for number, rank in ranks.items() if rank.pid}

    def of(self, rank: RasRank) -> int:
        return self._known.get((rank.host, rank.pid, rank.gpu), rank.rank)

    def ranks(self) -> Iterator[tuple[int, RasRank]]:
        for communicator in self._status.values():
            for rank in communicator.ranks.values():
                yield self.of(rank), rank


def _counts(status: RasStatus) -> dict[tuple[str, int], dict[str, int]]:
    return {
        (name, number): rank.counts
        for name, communicator in status.items()
        for number, rank in communicator.ranks.items()
    }


def _broken(before: RasStatus, numbers: _Numbers) -> tuple[Kind, tuple[int, ...], Finding] | None:
    """Return faults of processes themselves: dead, without an answer in both looks, with an error."""
    silent_before = {(number, rank.pid) for number, rank in _Numbers(before).ranks() if rank.is_silent}
    lines: dict[Kind, dict[int, str]] = {Kind.KILLED: {}, Kind.RAISED: {}, Kind.STOPPED: {}}
    for number, rank in numbers.ranks():
        name = _name(number, rank)
        if rank.is_dead:
            lines[Kind.KILLED][number] = f"{name} is dead: NCCL has not reached it for 60 s"
        if rank.error:
            lines[Kind.RAISED][number] = f"{name} reported {rank.error}"
        if rank.is_silent and (number, rank.pid) in silent_before:
            lines[Kind.STOPPED][number] = f"{name} did not answer to two questions of NCCL"
    for kind, by_rank in lines.items():
        if by_rank:
            code = RANK_STOPPED if kind is Kind.STOPPED else RANK_FAILED
            return kind, tuple(sorted(by_rank)), code.finding("\n".join(by_rank.values()))
    return None


def _name(number: int, rank: RasRank) -> str:
    return f"rank {number}{f' ({rank.text})' if rank.text else ''}"


def _differences(status: RasStatus, numbers: _Numbers) -> Iterator[_Difference]:
    for communicator in status.values():
        for op in sorted({op for rank in communicator.ranks.values() for op in rank.counts}):
            yield from _difference(communicator, op, numbers)


def _difference(communicator: RasCommunicator, op: str, numbers: _Numbers) -> Iterator[_Difference]:
    ranks = [rank for rank in communicator.ranks.values() if op in rank.counts]
    most = max(rank.counts[op] for rank in ranks)
    behind = [rank for rank in ranks if rank.counts[op] < most]
    if not behind:
        return
    ahead = [rank for rank in ranks if rank.counts[op] == most]
    fewer = behind if len(behind) <= len(ahead) else ahead
    lines = [f"{_name(numbers.of(rank), rank)} launched {rank.counts[op]} {op}, "
             f"{len(ranks) - len(fewer)} others {most if fewer is behind else behind[0].counts[op]}"
             for rank in fewer]  # fmt: skip
    yield _Difference(
        communicator.name, op, most, tuple(sorted(map(numbers.of, ahead))), tuple(sorted(map(numbers.of, behind))),
        tuple(lines),
    )  # fmt: skip


def _cause(differences: Sequence[_Difference]) -> tuple[Kind, tuple[int, ...]]:
    """Return the ranks behind that wait for nobody; if ranks left the common order, the minority."""
    by_communicator = grouped((each.communicator, each) for each in differences)
    for group in by_communicator.values():
        ahead = {rank for each in group for rank in each.ahead}
        behind = {rank for each in group for rank in each.behind}
        one = group[0]
        if ahead & behind or len(one.ahead) < len(one.behind):
            counts = {rank: tuple(rank in each.ahead for each in group) for rank in ahead | behind}
            return Kind.MISMATCH, minority(counts) or tuple(sorted(counts))
    graph: WaitGraph[int] = WaitGraph(sorted({rank for each in differences for rank in (*each.ahead, *each.behind)}))
    for each in differences:
        for rank in each.ahead:
            for other in each.behind:
                graph.add(rank, other, Wait(rank, each.op, f"rank {other}"))
    ends = list(graph.ends())
    cycle = next((members for members in ends if len(members) > 1), None)
    return (Kind.ABSENT, tuple(sorted(rank for (rank,) in ends))) if cycle is None else (Kind.CYCLE, cycle)


def _finding(kind: Kind, differences: Sequence[_Difference], seconds: float) -> Finding:
    lines = [f"{each.op} of communicator {each.communicator}: {line}" for each in differences for line in each.lines]
    still = f"no rank has launched a collective for {time_text(seconds * 1e6)}, and the counts differ"
    code = {Kind.MISMATCH: DISAGREEMENT, Kind.CYCLE: HANG_CYCLE}.get(kind, NEVER_ISSUED)
    return code.finding("\n".join((still, *lines)))
