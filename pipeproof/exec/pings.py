"""Times messages between two ranks by round trips: bytes one way, a token back, one at a time and warm.

No clock is compared with another rank's: a message's time is that of its round
trip without the token's, and the token's is half of a round trip of two
tokens. So what the two ways of a pair differ by shows in what bytes take, and
not in the latency of small messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

from pipeproof.exec.framework import Arrays, Channels
from pipeproof.schedule.optable import Channel

TOKEN_BYTES = 8
_REPEATS = ((2**16, 20), (2**20, 10), (2**24, 5))
"""Up to so many bytes, how often a round trip is timed."""
_REPEATS_OF_LARGE = 3


class PingClock(Protocol):
    """What times round trips: the host's clock, or marks that a device passes."""

    def hold(self) -> None:
        """Keep a device back while the host queues what is about to be timed."""
        ...

    def mark(self) -> Any:
        """This moment, or this place in what the device carries out."""
        ...

    def between_us(self, first: Any, second: Any) -> float:
        """Microseconds from one mark to another; the host waits for both."""
        ...


class HostPingClock:
    """The host's clock, read once ``settle`` says that the device, if there is one, has done what it was given."""

    def __init__(self, settle: Callable[[], object] = lambda: None) -> None:
        self._settle = settle

    def hold(self) -> None:
        """Nothing is queued."""

    def mark(self) -> int:
        """Nanoseconds."""
        self._settle()
        return time.perf_counter_ns()

    def between_us(self, first: int, second: int) -> float:
        """Their difference."""
        return (second - first) / 1000


@dataclass(frozen=True, slots=True)
class Wire:
    """What one rank times messages with: its ends of channels, its tensors, and its clock."""

    rank: int
    channels: Channels
    arrays: Arrays
    clock: PingClock


def way_back(channels: Iterable[Channel], there: Channel) -> Channel | None:
    """The first channel that leads back; None where there is none."""
    return next((one for one in channels if (one.src, one.dst) == (there.dst, there.src)), None)


def repeats_of(num_bytes: int) -> int:
    """How often a message of this size is timed; both ends come to the same."""
    return next((repeats for most, repeats in _REPEATS if num_bytes <= most), _REPEATS_OF_LARGE)


def one_way_us(wire: Wire, there: Channel, back: Channel, sizes: Iterable[int]) -> dict[int, tuple[float, ...]]:
    """Microseconds of each message over ``there``, by its bytes; the rank that receives them has none to show.

    Both ranks of the channel call this, and no other rank communicates meanwhile.
    """
    tokens = _round_trips(wire, there, back, TOKEN_BYTES)
    token_us = median(tokens) / 2 if tokens else 0.0
    found = {}
    for num_bytes in sizes:
        trips = _round_trips(wire, there, back, num_bytes)
        # More bytes take no less than the token that comes back, whatever a busy machine makes of a round trip.
        found[num_bytes] = tuple(max(trip - token_us, trip / 2) for trip in trips)
    return found


def crossing_us(wire: Wire, there: Channel, back: Channel, num_bytes: int) -> tuple[float, ...]:
    """Microseconds in which both ranks get ``num_bytes`` from each other at once, time after time."""
    sends, receives = (there, back) if wire.rank == there.src else (back, there)
    out, into = (wire.arrays.empty([num_bytes], "uint8") for _ in range(2))
    wire.clock.hold()
    marks = []
    for _ in range(repeats_of(num_bytes) + 1):  # the first brings the two ranks together
        coming = wire.channels.post(receives, into)
        wire.channels.post(sends, out).wait()
        coming.wait()
        marks.append(wire.clock.mark())
    return tuple(wire.clock.between_us(*pair) for pair in pairwise(marks))


def _round_trips(wire: Wire, there: Channel, back: Channel, num_bytes: int) -> tuple[float, ...]:
    """Microseconds of each, on the rank that begins."""
    content, token = wire.arrays.empty([num_bytes], "uint8"), wire.arrays.empty([TOKEN_BYTES], "uint8")
    num_trips = repeats_of(num_bytes) + 1  # the first brings the two ranks together
    wire.clock.hold()
    marks = []
    if wire.rank == there.src:
        for _ in range(num_trips):
            answer = wire.channels.post(back, token)
            wire.channels.post(there, content).wait()
            answer.wait()
            marks.append(wire.clock.mark())
    else:
        for _ in range(num_trips):
            wire.channels.post(there, content).wait()
            wire.channels.post(back, token).wait()
    return tuple(wire.clock.between_us(*pair) for pair in pairwise(marks))
