"""Correction of a host's times to the clock of rank 0's host, with a guaranteed error.

The monotonic clocks of two hosts have different origins and slightly different rates. The *offset* of a host at some
moment is the reading of rank 0's clock less the reading of the host's own clock.

**One message gives one side.** A message that leaves the host at its reading ``sent`` and that rank 0's host has read
at its own reading ``arrived`` took no negative time. Rank 0's clock showed ``sent + offset`` when the message left, and
not more than ``arrived``: the offset at ``sent`` is at most ``arrived - sent``. An answer that rank 0 sends at its
``answered`` and that the host has read at ``returned`` gives the other side: the offset at ``returned`` is at least
``answered - returned``. An exchange therefore gives an interval as wide as its round trip without the time at rank 0.
Nothing is assumed about delays: they may be asymmetric and of any length. Readings are rounded down to nanoseconds,
which moves each side by less than 1 ns.

**Drift.** While the host's clock advances by d, its offset changes by at most ``drift_ppm`` millionths of d. A side
that is known at one reading is therefore known, d farther out, at each other reading. The sides of all exchanges of a
measurement, moved to one reading, intersect in one interval: a ``Knot``.

**Between measurements** the offset is interpolated linearly. It lies within the intersection of the intervals of both
neighbours, each widened by what drift allows over the distance; the error is the farther end of that intersection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeproof.exec.rank.idle_messages import IdleMessageEnd
from pipeproof.exec.rank.op_log import LogEntry

MAX_DRIFT_PPM = 200
"""Two free-running crystals of 100 ppm each. A clock that is slewed faster breaks the assumption."""


class ClockDriftError(ValueError):
    """Measurements contradict each other: a clock drifted by more than the assumed rate, or was stepped."""


@dataclass(frozen=True, slots=True)
class ClockExchange:
    """Readings of one exchange in nanoseconds, the outer two of the host's clock, the inner two of rank 0's."""

    sent_ns: int
    arrived_ns: int
    answered_ns: int
    returned_ns: int


@dataclass(frozen=True, slots=True)
class Knot:
    """Offset to rank 0's clock at one reading of the own clock; the true one differs by at most ``error_ns``."""

    own_ns: int
    offset_ns: int
    error_ns: int

    @property
    def lower_ns(self) -> int:
        """Least possible offset."""
        return self.offset_ns - self.error_ns

    @property
    def upper_ns(self) -> int:
        """Greatest possible offset."""
        return self.offset_ns + self.error_ns


def knot_of(exchanges: Sequence[ClockExchange], drift_ppm: int = MAX_DRIFT_PPM) -> Knot:
    """Return the intersection of the intervals of some exchanges, in the middle of the one that is the narrowest.

    Raises:
        ClockDriftError: the intersection is empty.
        ValueError: there is no exchange.
    """
    best = min(exchanges, key=lambda each: each.arrived_ns - each.sent_ns - each.answered_ns + each.returned_ns)
    own_ns = (best.sent_ns + best.returned_ns) // 2
    upper = min(each.arrived_ns - each.sent_ns + 1 + _drift(own_ns - each.sent_ns, drift_ppm) for each in exchanges)
    lower = max(
        each.answered_ns - each.returned_ns - 1 - _drift(own_ns - each.returned_ns, drift_ppm) for each in exchanges
    )
    return _knot(own_ns, lower, upper, drift_ppm)


@dataclass(frozen=True, slots=True)
class ClockCorrection:
    """Knots of a host in order of their times; without knots the clock is that of rank 0's host."""

    knots: tuple[Knot, ...] = ()
    drift_ppm: int = MAX_DRIFT_PPM

    def at(self, own_ns: int) -> Knot:
        """Return the offset at a reading of the own clock, with its error; both are 0 on rank 0's host."""
        index = bisect_right(self.knots, own_ns, key=lambda knot: knot.own_ns)
        near = self.knots[max(0, index - 1) : index + 1]
        if not near:
            return Knot(own_ns, 0, 0)
        first, last = near[0], near[-1]
        offset = first.offset_ns
        if first is not last:
            rise, run = last.offset_ns - first.offset_ns, last.own_ns - first.own_ns
            offset += rise * (own_ns - first.own_ns) // run
        upper = min(knot.upper_ns + _drift(own_ns - knot.own_ns, self.drift_ppm) for knot in near)
        lower = max(knot.lower_ns - _drift(own_ns - knot.own_ns, self.drift_ppm) for knot in near)
        return Knot(own_ns, offset, max(upper - offset, offset - lower))

    def corrected_ns(self, own_ns: int) -> int:
        """Return the reading of rank 0's clock at a reading of the own clock; 0 is no reading and remains 0."""
        return own_ns + self.at(own_ns).offset_ns if own_ns else 0


def correction_of(knots: Sequence[Knot], drift_ppm: int = MAX_DRIFT_PPM) -> ClockCorrection:
    """Return the correction of a host from its measurements; each knot also narrows the earlier and the later ones.

    Raises:
        ClockDriftError: two measurements contradict each other.
        ValueError: there is no measurement.
    """
    if not knots:
        raise ValueError("the clock of the host was never measured")
    ordered = sorted(knots, key=lambda knot: knot.own_ns)
    for indices in (range(len(ordered)), range(len(ordered) - 1, -1, -1)):
        for before, index in pairwise(indices):
            ordered[index] = _narrowed(ordered[index], ordered[before], drift_ppm)
    return ClockCorrection(tuple(ordered), drift_ppm)


def _narrowed(knot: Knot, by: Knot, drift_ppm: int) -> Knot:
    allowed = _drift(knot.own_ns - by.own_ns, drift_ppm)
    upper, lower = min(knot.upper_ns, by.upper_ns + allowed), max(knot.lower_ns, by.lower_ns - allowed)
    return _knot(knot.own_ns, lower, upper, drift_ppm)


def _knot(own_ns: int, lower: int, upper: int, drift_ppm: int) -> Knot:
    if lower > upper:
        raise ClockDriftError(
            f"the offset to rank 0's clock changed by {lower - upper} ns more than {drift_ppm} ppm allow: a clock was "
            "slewed faster or stepped"
        )
    middle = (lower + upper) // 2
    return Knot(own_ns, middle, upper - middle)


def _drift(distance_ns: int, drift_ppm: int) -> int:
    """Largest change of the offset over a distance, rounded up."""
    return -(-abs(distance_ns) * drift_ppm // 1_000_000)


def corrected(entries: Sequence[LogEntry], correction: ClockCorrection) -> list[LogEntry]:
    """Return a rank's log in times of rank 0's clock."""
    to_zero = correction.corrected_ns
    return [
        replace(
            entry,
            start_ns=to_zero(entry.start_ns),
            end_ns=to_zero(entry.end_ns),
            posted_ns=to_zero(entry.posted_ns),
            split_ns=to_zero(entry.split_ns),
        )
        for entry in entries
    ]


def corrected_ends(ends: Sequence[IdleMessageEnd], correction: ClockCorrection) -> list[IdleMessageEnd]:
    """Return a rank's ends of the idle messages in times of rank 0's clock."""
    to_zero = correction.corrected_ns
    return [replace(end, posted_ns=to_zero(end.posted_ns), end_ns=to_zero(end.end_ns)) for end in ends]


def largest_error_ns(entries: Sequence[LogEntry | IdleMessageEnd], correction: ClockCorrection) -> int:
    """Return the largest error of the offsets that correct some entries."""
    times = {time for entry in entries for time in (entry.posted_ns, entry.end_ns) if time}
    times |= {entry.start_ns for entry in entries if isinstance(entry, LogEntry)}
    return max((correction.at(time).error_ns for time in times), default=0)
