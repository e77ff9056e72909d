"""Lateness of ranks at their collectives: a rank that the others wait for again and again is a straggler.

At each collective the rank that comes last costs the time between its arrival
and that of the last but one. These losses are added up in ``NUM_BLOCKS`` blocks
of consecutive collectives. Jitter makes another rank the costliest in each
block, a straggler is the costliest in nearly all of them. The loss that is
reported is the median of its blocks, so one long pause does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.units import time_text
from pipeproof.exec.monitor.job import JobNow
from pipeproof.exec.monitor.monitor_codes import SLOW_RANK
from pipeproof.exec.monitor.ring import OpState, RingOp

NUM_BLOCKS: Final = 16
ENOUGH_BLOCKS: Final = 14
"""Blocks in which a straggler is the costliest rank; by chance one of two equal ranks reaches it in 0.2 % of jobs."""
MIN_SHARE: Final = 0.05
"""Part of the time that a straggler costs at least."""
_MIN_COLLECTIVES: Final = 2 * NUM_BLOCKS
_ROOTED: Final = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""Collectives that some members leave before others have come."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """Lateness of a rank: the collectives to which it came last, and the part of the time that it costs.

    ``delay_s`` is the median time between its arrival and that of the last but
    one, over the collectives to which it came last.
    """

    rank: int
    num_last: int
    num_collectives: int
    delay_s: float
    share: float
    is_straggler: bool


def lateness(arrivals: Sequence[Mapping[int, float]], seconds: float) -> tuple[Lateness, ...]:
    """Return the lateness of each rank.

    Args:
        arrivals: seconds at which each member came, for each collective in order; the zero may differ between them.
        seconds: length of the time in which the collectives were issued.
    """
    usable = [members for members in arrivals if len(members) > 1]
    if len(usable) < _MIN_COLLECTIVES or seconds <= 0:
        return ()
    ranks = sorted({rank for members in usable for rank in members})
    blocks = [dict.fromkeys(ranks, 0.0) for _ in range(NUM_BLOCKS)]
    delays: dict[int, list[float]] = {rank: [] for rank in ranks}
    for index, members in enumerate(usable):
        before, last = sorted(members, key=lambda rank: (members[rank], rank))[-2:]
        delay = members[last] - members[before]
        delays[last].append(delay)
        blocks[index * NUM_BLOCKS // len(usable)][last] += delay
    costliest = [max(ranks, key=block.__getitem__) for block in blocks]
    rows = []
    for rank in ranks:
        share = median(block[rank] for block in blocks) * NUM_BLOCKS / seconds
        is_straggler = costliest.count(rank) >= ENOUGH_BLOCKS and share >= MIN_SHARE
        delay = median(delays[rank]) if delays[rank] else 0.0
        rows.append(Lateness(rank, len(delays[rank]), len(usable), delay, share, is_straggler))
    return tuple(rows)


def job_lateness(job: JobNow) -> dict[str, tuple[Lateness, ...]]:
    """Return the lateness of the members of each group, by its name, from the collectives that all members finished.

    Groups of NCCL are left out: hosts issue its collectives ahead of their
    devices. Clocks of other hosts are corrected by the ends of the
    collectives, which members reach together.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, RingOp]]] = {}
    for rank in job.ranks:
        for op in rank.ring.ops:
            if not op.is_message and op.op not in _ROOTED and op.group.backend != "nccl" and op.state is OpState.DONE:
                key = op.group.name, op.group.ranks
                groups.setdefault(key, {}).setdefault(op.number, {})[rank.rank] = op
    found = {}
    for (name, ranks), collectives in groups.items():
        whole = [members for _, members in sorted(collectives.items()) if len(members) == len(ranks) > 1]
        if not whole:
            continue
        offsets = _clock_offsets(job, whole)
        arrivals = [{rank: op.issued_ns / 1e9 - offsets[rank] for rank, op in members.items()} for members in whole]
        rows = lateness(arrivals, max(arrivals[-1].values()) - min(arrivals[0].values()))
        if rows:
            found[name] = rows
    return found


def _clock_offsets(job: JobNow, collectives: Sequence[Mapping[int, RingOp]]) -> dict[int, float]:
    """Return the seconds by which the clock of each rank is ahead of that of the first; 0 on the same host."""
    ranks = sorted(collectives[0])
    hosts = {rank: job.by_rank[rank].ring.header.boot_id for rank in ranks}
    return {
        rank: 0.0
        if hosts[rank] == hosts[ranks[0]]
        else median((members[rank].done_ns - members[ranks[0]].done_ns) / 1e9 for members in collectives)
        for rank in ranks
    }


def straggler_findings(groups: Mapping[str, Sequence[Lateness]]) -> Iterator[Finding]:
    """Find PP955: the straggler of each group."""
    for name, rows in groups.items():
        for row in rows:
            if row.is_straggler:
                yield SLOW_RANK.finding(
                    f"rank {row.rank} came last to {row.num_last} of {row.num_collectives} collectives of group "
                    f"{name}, {time_text(row.delay_s * 1e6)} after the others by the median; "
                    f"they wait {row.share:.0%} of the time for it alone",
                    None,
                    "a straggler, no hang: compare its computation, clock rate and data with those of the other ranks; "
                    "if the group has several stages of a pipeline, the schedule may end later on this rank",
                )
