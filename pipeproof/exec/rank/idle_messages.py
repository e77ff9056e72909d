"""Times of single messages over the channels of a plan, one at a time and without other work, by round trips."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import numpy as np

from pipeproof.comm.channel_models import message_bytes
from pipeproof.exec.rank.framework_protocol import Arrays, Channels, World
from pipeproof.schedule.op_table import Channel, OpGraph
from pipeproof.schedule.ops import SEND_KINDS
from pipeproof.specs.profile_file import SizedSpread, by_size

# --- Message times between two ranks by round trips: bytes one way, a token back, one at a time and warm ---
# Clocks of different ranks are not compared: a message's time is the time of its round trip minus the token's, and the
# token's time is half of a round trip of two tokens. So a difference between the two directions shows in large
# messages, but not in the latency of small messages.


TOKEN_BYTES = 8
_REPEATS = ((2**16, 20), (2**20, 10), (2**24, 5))
"""Number of timed round trips for messages of at most so many bytes."""
_REPEATS_OF_LARGE = 3


class PingClock(Protocol):
    """Clock of round trips: the host's, or marks that a device passes."""

    def hold(self) -> None:
        """Keep a device busy while the host queues the timed work."""

    def mark(self) -> Any:
        """Return the current time, or a mark in the device's work."""

    def between_us(self, first: Any, second: Any) -> float:
        """Return the microseconds from one mark to another; the host waits for both."""


class HostPingClock:
    """The host's clock, read after ``settle`` has waited for the device if there is one."""

    def __init__(self, settle: Callable[[], object] = lambda: None) -> None:
        self._settle = settle

    def hold(self) -> None:
        """Do nothing."""

    def mark(self) -> int:
        """Return nanoseconds."""
        self._settle()
        return time.perf_counter_ns()

    def between_us(self, first: int, second: int) -> float:
        """Return the difference in microseconds."""
        return (second - first) / 1000


@dataclass(frozen=True, slots=True)
class Wire:
    """Ends of channels, tensors and clock with which one rank times messages."""

    rank: int
    channels: Channels
    arrays: Arrays
    clock: PingClock


def way_back(channels: Iterable[Channel], channel: Channel) -> Channel | None:
    """Return the first channel in the opposite direction, if any."""
    return next((back for back in channels if (back.src, back.dst) == (channel.dst, channel.src)), None)


def repeats_of(num_bytes: int) -> int:
    """Number of timed messages of this size; the same on both ends."""
    return next((repeats for most, repeats in _REPEATS if num_bytes <= most), _REPEATS_OF_LARGE)


def one_way_us(wire: Wire, channel: Channel, back: Channel, sizes: Iterable[int]) -> dict[int, tuple[float, ...]]:
    """Microseconds of each message over ``channel``, by bytes; empty on the rank that receives them.

    Both ranks of the channel call this, and no other rank communicates meanwhile.
    """
    tokens = _round_trips(wire, channel, back, TOKEN_BYTES)
    token_us = median(tokens) / 2 if tokens else 0.0
    times = {}
    for num_bytes in sizes:
        trips = _round_trips(wire, channel, back, num_bytes)
        # A message takes at least as long as the token that comes back, even if a busy machine disturbs a round trip.
        times[num_bytes] = tuple(max(trip - token_us, trip / 2) for trip in trips)
    return times


def _round_trips(wire: Wire, channel: Channel, back: Channel, num_bytes: int) -> tuple[float, ...]:
    """Microseconds of each round trip, on the rank that begins; empty on the other."""
    content, token = wire.arrays.empty([num_bytes], "uint8"), wire.arrays.empty([TOKEN_BYTES], "uint8")
    num_trips = repeats_of(num_bytes) + 1  # the first one synchronizes the two ranks
    wire.clock.hold()
    marks = []
    if wire.rank == channel.src:
        for _ in range(num_trips):
            answer = wire.channels.post(back, token)
            wire.channels.post(channel, content).wait()
            answer.wait()
            marks.append(wire.clock.mark())
    else:
        for _ in range(num_trips):
            wire.channels.post(channel, content).wait()
            wire.channels.post(back, token).wait()
    return tuple(wire.clock.between_us(*pair) for pair in pairwise(marks))


USUAL_BYTES = (TOKEN_BYTES, 2**16, 2**20)
"""Sizes in addition to the plan's smallest and largest message."""
LARGE_BYTES = 2**24
"""Additional size on GPUs, whose links smaller messages do not saturate."""

EdgeTimes = dict[str, dict[int, tuple[float, ...]]]
"""Microseconds of each message, by the channel's text and the message's bytes."""


def ping_sizes(graph: OpGraph, device: str) -> tuple[int, ...]:
    """Return the bytes of the messages to time, in order; the result is the same on every rank."""
    planned = message_bytes(graph)[np.flatnonzero(graph.is_kind(SEND_KINDS))]
    extremes = (int(planned.min()), int(planned.max())) if len(planned) else ()
    return tuple(sorted({*extremes, *USUAL_BYTES, *((LARGE_BYTES,) if device == "gpu" else ())}))


def ping_edges(
    world: World,
    arrays: Arrays,
    clock: PingClock,
    graph: OpGraph,
    device: str,
    progress: Callable[[str], None],
) -> EdgeTimes:
    """Time every channel that has a way back, one after the other; every rank must call this.

    The result has the channels on which this rank sends. All ranks wait at a barrier before each channel: nothing else
    is then under way.
    """
    wire, sizes = Wire(world.rank, world.channels, arrays, clock), ping_sizes(graph, device)
    measured = {}
    for channel in graph.channels:
        progress(f"timing {channel}")
        world.barrier()
        back = way_back(graph.channels, channel)
        if back is not None and world.rank in (channel.src, channel.dst):
            times = one_way_us(wire, channel, back, sizes)
            if world.rank == channel.src:
                measured[str(channel)] = times
    return measured


def spread_by_size(channels: Iterable[Mapping[int, Sequence[float]]]) -> tuple[SizedSpread, ...]:
    """Return the spread of the messages of some channels together, by bytes."""
    return by_size(
        (num_bytes, round(microseconds * 1000))
        for times in channels
        for num_bytes, of_size in times.items()
        for microseconds in of_size
    )
