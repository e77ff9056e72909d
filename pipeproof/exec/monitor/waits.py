"""Waits of the ranks of a watched job: the operation that blocks a rank, and the ranks that have not come to it.

A rank waits for another rank if the operation that blocks it needs an operation that the other rank has not issued, or
has queued on its device behind an unfinished operation. The second case needs a device that has reached the blocking
operation: while a call makes a communicator, hosts wait for hosts; and an operation that is behind another one on its
own device waits for that one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.wait_graph import Wait, WaitGraph
from pipeproof.exec.monitor.job import JobNow, ProcessState, RankNow
from pipeproof.exec.monitor.ring import OpState, RingOp
from pipeproof.exec.monitor.verdict import SLOW_S, BlockedRank
from pipeproof.interop.hang.collective_matches import Matches, match_entries
from pipeproof.interop.hang.flight_recorder import Channel, Dump, Entry, Group, Launch, State


@dataclass
class Analysis:
    """The operations of all ranks, their matches, and the waits between ranks."""

    job: JobNow
    matches: Matches
    entries: dict[tuple[int, int], Entry]
    ops: dict[tuple[int, int], RingOp]
    blocking: dict[int, list[Entry]] = field(default_factory=dict)
    graph: WaitGraph[int] = field(default_factory=WaitGraph)
    """Waits between ranks."""

    def op(self, entry: Entry) -> RingOp:
        """Operation of an entry."""
        return self.ops[entry.rank, entry.index]

    def seconds(self, entry: Entry) -> float:
        """Seconds since the last event of an operation, or since it blocks its rank."""
        now, op = self.job.by_rank[entry.rank], self.op(entry)
        return (
            self._device_seconds(now, now.since_of(op))
            if op.state is OpState.QUEUED
            else self._seconds(now.since_of(op))
        )

    def seconds_for(self, entry: Entry, other: int) -> float:
        """Seconds for which an operation has waited for another rank without an event there."""
        now = self.job.by_rank.get(other)
        if now is None:
            return self.seconds(entry)
        is_issued = self.part(entry, other) is not None
        other_s = self._device_seconds(now, now.device_since_ns) if is_issued else self._seconds(now.host_since_ns)
        return min(self.seconds(entry), other_s)

    def _seconds(self, since_ns: int) -> float:
        return max(0.0, (self.job.now_ns - since_ns) / 1e9)

    def _device_seconds(self, now: RankNow, since_ns: int) -> float:
        """Seconds until the last heartbeat, which notes ends on the device; until now if it is very old or the last."""
        if now.has_left:
            return self._seconds(since_ns)
        heartbeat_ns = now.ring.header.heartbeat_ns
        seconds = self._seconds(since_ns) - self._seconds(heartbeat_ns)
        return max(0.0, seconds) if self._seconds(heartbeat_ns) < SLOW_S else self._seconds(since_ns)

    def parts(self, entry: Entry) -> tuple[Entry, ...]:
        """An operation and its issued parts on other ranks."""
        return (entry, *self.matches.partners.get((entry.rank, entry.index), ()))

    def part(self, entry: Entry, other: int) -> Entry | None:
        """Part of an operation on another rank; None if it is not issued."""
        return next((part for part in self.parts(entry) if part.rank == other), None)

    def missing(self, entry: Entry) -> tuple[int, ...]:
        """Ranks that have not issued their part of an operation, or whose device cannot reach it."""
        missing = set(self.matches.missing.get((entry.rank, entry.index), ()))
        if self.op(entry).state is not OpState.ISSUED and not self.is_behind(entry):
            parts = (part for part in self.parts(entry) if not self.job.by_rank[part.rank].has_left)
            missing.update(part.rank for part in parts if self.is_behind(part))
        return tuple(sorted(missing))

    def wait(self, entry: Entry, other: int) -> Wait:
        """Return the wait of an operation for another rank."""
        part, at = self.part(entry, other), self.op(entry).at
        why = "which has not issued its part"
        if part is not None:
            why = f"whose part{at_text(self.op(part))} is queued behind"
        seconds = self.seconds_for(entry, other)
        return Wait(entry.rank, entry.text, f"rank {other}", why, at, entry.location, entry.tensor_text, seconds)

    def is_behind(self, entry: Entry) -> bool:
        """True for an operation that is queued on its rank's device behind an unfinished one."""
        return self.job.by_rank[entry.rank].is_behind(self.op(entry))

    def share(self, entry: Entry) -> float:
        """Fraction of the members of an operation that have issued it."""
        num_members = len(entry.group.ranks) if entry.channel is None else 2
        return 1 - len(self.missing(entry)) / max(num_members, 1)


def analyse(job: JobNow) -> Analysis:
    """Match the operations of all ranks, and return the waits between them."""
    dumps, ops = [], {}
    entries: dict[tuple[int, int], Entry] = {}
    for rank in job.ranks:
        launches = []
        for index, op in enumerate(rank.ring.ops):
            if op.is_message and op.peer is None:  # a receive from any rank has no channel yet
                continue
            entry = ring_entry(rank.rank, index, op)
            entries[rank.rank, index], ops[rank.rank, index] = entry, op
            launches.append(Launch(rank.rank, (entry,), entry.state, (entry.group,)))
        dumps.append(Dump(rank.rank, rank.ring.file, "ring", whole=True, launches=tuple(launches)))
    analysis = Analysis(job, match_entries(dumps), entries, ops, graph=WaitGraph(job.by_rank))
    for rank in job.ranks:
        blocking = {op.seq for op in rank.blocking}
        for index, op in enumerate(rank.ring.ops):
            entry_of = entries.get((rank.rank, index))
            if op.seq in blocking and entry_of is not None:
                analysis.blocking.setdefault(rank.rank, []).append(entry_of)
                for other in analysis.missing(entry_of):
                    if other != rank.rank:
                        analysis.graph.add(rank.rank, other, analysis.wait(entry_of, other))
    return analysis


def ring_entry(rank: int, index: int, op: RingOp) -> Entry:
    """Return an operation of a ring as an entry of a dump; ``index`` is its position in the ring."""
    group = Group(op.group.name, "" if op.group.about == "eager" else op.group.about, op.group.ranks)
    channel = None
    if op.is_message and op.peer is not None:
        tag = 0 if op.group.backend == "nccl" else op.tag
        src, dst = (rank, op.peer) if op.op == "send" else (op.peer, rank)
        channel = Channel(group, src, dst, tag)
    return Entry(
        rank, index, op.op, group, op.number, channel, op.batch is not None,
        State.COMPLETED if op.state is OpState.DONE else State.STARTED,
        _sizes(op, op.num_inputs), _sizes(op, op.num_outputs), (op.dtype,) if op.dtype else (), location_of(op.at),
    )  # fmt: skip


def _sizes(op: RingOp, num_elements: int) -> tuple[tuple[int, ...], ...]:
    """Return the shape if there is certainly only one tensor, else one flat shape of all elements."""
    if not num_elements:
        return ()
    return (op.shape if op.shape and prod(op.shape) == num_elements else (num_elements,),)


def location_of(at: str) -> Location | None:
    """Return the location of ``file:line``; None if it is unknown."""
    file, _, line = at.rpartition(":")
    return Location(file, int(line)) if file and line.isdigit() else None


def waits_of(analysis: Analysis) -> tuple[BlockedRank, ...]:
    """Return the wait of each blocked rank, the longest first; of several operations, one that another rank lacks."""
    waits = []
    for rank, entries in analysis.blocking.items():
        if analysis.job.by_rank[rank].state in (ProcessState.GONE, ProcessState.ENDED, ProcessState.RAISED):
            continue
        entry = max(entries, key=lambda entry: (bool(analysis.missing(entry)), analysis.seconds(entry)))
        ranks = tuple(sorted({other for each in entries for other in analysis.missing(each)} - {rank}))
        at = analysis.op(entry).at
        waits.append(BlockedRank(rank, entry.text, at, analysis.seconds(entry), ranks, analysis.op(entry).meaning))
    return tuple(sorted(waits, key=lambda wait: (-wait.seconds, wait.rank)))


def at_text(op: RingOp) -> str:
    """Return `` at file:line`` of an operation; empty if it is unknown."""
    return f" at {op.at}" if op.at else ""
