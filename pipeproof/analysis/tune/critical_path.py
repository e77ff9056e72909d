"""Cause of a step's length: the path of work and messages that it consists of.

The path is walked back from the last end. A computation that began when its
rank had just finished another follows that one; a computation that began later
waited for a message, and follows its sender. If messages take only their time,
such a path has no other part. If sends wait for their receives, a rank may also
be held up by another transfer; the path then stays on that rank. Either way the
parts add up to the makespan exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import Time, Timed, input_of

Edge = tuple[int, int]
"""The pipeline ranks at both ends of a message."""


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The parts of the makespan; times in the unit of the costs.

    ``compute`` is by rank, ``messages`` by edge and ``held_up`` by rank, all
    on the path only; together they are the makespan. ``rank`` computes
    longest on the path. ``warm_up`` is the time before its first computation
    there and ``cool_down`` the time after its last.
    """

    makespan: Time
    compute: Mapping[int, Time]
    messages: Mapping[Edge, Time]
    held_up: Mapping[int, Time]
    rank: int
    warm_up: Time
    cool_down: Time

    @property
    def steady(self) -> Time:
        """From the first to the last computation of ``rank`` on the path."""
        return self.makespan - self.warm_up - self.cool_down

    @property
    def waiting(self) -> Time:
        """All messages of the path, and other times in which a rank is held up."""
        return sum(self.messages.values(), 0) + sum(self.held_up.values(), 0)

    @property
    def edge(self) -> Edge | None:
        """The edge whose messages take longest on the path, the first of several; None if none takes any time."""
        return max(self.messages, key=lambda edge: self.messages[edge], default=None)

    def scaled(self, factor: Fraction) -> CriticalPath:
        """The same path in another unit of time."""
        return CriticalPath(
            makespan=self.makespan * factor,
            compute={rank: time * factor for rank, time in self.compute.items()},
            messages={edge: time * factor for edge, time in self.messages.items()},
            held_up={rank: time * factor for rank, time in self.held_up.items()},
            rank=self.rank,
            warm_up=self.warm_up * factor,
            cool_down=self.cool_down * factor,
        )


def critical_path(timed: Timed, latency: Time) -> CriticalPath:
    """Walk back from the last end; of several ranks that end last, from the first.

    Raises:
        ValueError: nothing is computed.
    """
    if not any(timed.programs):
        raise ValueError("a schedule without operations has no critical path")
    walk = _Walk(timed, latency)
    walk.run()
    rank = min(walk.compute, key=lambda rank: (-walk.compute[rank], rank))
    first, last = walk.within[rank]
    makespan = timed.makespan
    return CriticalPath(
        makespan=makespan,
        compute=dict(sorted(walk.compute.items())),
        messages=dict(sorted(walk.messages.items())),
        held_up=dict(sorted(walk.held_up.items())),
        rank=rank,
        warm_up=first,
        cool_down=makespan - last,
    )


class _Walk:
    """The walk from the last end back to 0, with the parts of the path."""

    def __init__(self, timed: Timed, latency: Time) -> None:
        self._timed, self._latency = timed, latency
        self._num_stages = 1 + max(op.stage for program in timed.programs for op in program)
        self._made = {
            (op.kind is OpKind.FORWARD, op.stage, op.micro_batch, op.split): (rank, position)
            for rank, program in enumerate(timed.programs)
            for position, op in enumerate(program)
            if op.kind is not OpKind.BACKWARD_WEIGHT
        }
        self.compute: dict[int, Time] = defaultdict(int)
        self.messages: dict[Edge, Time] = defaultdict(int)
        self.held_up: dict[int, Time] = defaultdict(int)
        self.within: dict[int, tuple[Time, Time]] = {}
        """The first start and the last end of each rank on the path."""

    def run(self) -> None:
        ends = self._timed.ends
        rank = min((rank for rank, mine in enumerate(ends) if mine), key=lambda rank: (-ends[rank][-1], rank))
        at: tuple[int, int] | None = (rank, len(ends[rank]) - 1)
        while at is not None:
            at = self._before(*at)

    def _before(self, rank: int, position: int) -> tuple[int, int] | None:
        """Count a computation, or two parallel ones; return the predecessor on the path, None at its beginning."""
        starts, ends = self._timed.starts[rank], self._timed.ends[rank]
        start, end = starts[position], ends[position]
        first = last = position
        while first and (starts[first - 1], ends[first - 1]) == (start, end):
            first -= 1
        while last + 1 < len(ends) and (starts[last + 1], ends[last + 1]) == (start, end):
            last += 1
        self.compute[rank] += end - start
        self.within[rank] = start, max(end, self.within.get(rank, (0, end))[1])
        free_at = ends[first - 1] if first else 0
        if free_at < start:
            for source, position in self._sources(rank, first, last):
                if self._timed.ends[source][position] + self._latency == start:
                    if self._latency:
                        self.messages[source, rank] += self._latency
                    return source, position
            self.held_up[rank] += start - free_at
        return (rank, first - 1) if first else None

    def _sources(self, rank: int, first: int, last: int) -> list[tuple[int, int]]:
        """Sources of the tensors that these computations receive from other ranks: rank and position."""
        needed = (input_of(op, self._num_stages) for op in self._timed.programs[rank][first : last + 1])
        return [made for key in needed if key is not None and (made := self._made[key])[0] != rank]
