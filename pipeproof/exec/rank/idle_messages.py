"""Times of single messages over the channels of the plan, one at a time and without other work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Protocol

import numpy as np

from pipeproof.comm.channel_models import message_bytes
from pipeproof.exec.rank.framework_protocol import Arrays, Channels, World
from pipeproof.schedule.op_table import Channel, OpGraph
from pipeproof.schedule.ops import SEND_KINDS

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


REPEATS = 5
"""Number of messages of each size on each channel."""

USUAL_BYTES = (2**10, 2**14, 2**18, 2**20)
"""Sizes in addition to the plan's message sizes."""


@dataclass(frozen=True, slots=True)
class IdleMessageEnd:
    """One end of an idle message; times are the machine's monotonic clock in nanoseconds, ``channel`` is a text."""

    channel: str
    is_send: bool
    num_bytes: int
    posted_ns: int
    end_ns: int


def idle_message_sizes(graph: OpGraph) -> tuple[int, ...]:
    """Return the bytes of the messages to time, in order; the result is the same on every rank."""
    planned = message_bytes(graph)[np.flatnonzero(graph.is_kind(SEND_KINDS))]
    return tuple(sorted({*planned.tolist(), *USUAL_BYTES}))


_HEAD_START_S = 0.005
"""Time after the barrier in which the receiver posts before the sender."""


def time_idle_messages(world: World, arrays: Arrays, graph: OpGraph, *, on_device: bool) -> list[IdleMessageEnd]:
    """Time all idle messages and return this rank's ends, channel by channel; every rank must call this.

    All ranks wait at a barrier before each message: only one message is under way. A wait does not block the host of a
    device (``on_device``), so the host waits for the device to get the end time.
    """
    ends = []
    for channel in graph.channels:
        for num_bytes in idle_message_sizes(graph):
            buffer = arrays.empty([num_bytes], "uint8")
            for _ in range(REPEATS):
                world.barrier()
                if world.rank not in (channel.src, channel.dst):
                    continue
                is_send = world.rank == channel.src
                if is_send:
                    time.sleep(_HEAD_START_S)
                transfer = world.channels.post(channel, buffer)
                transfer.wait()
                end_ns = transfer.end_ns
                if on_device:
                    arrays.synchronize()
                    end_ns = time.monotonic_ns()
                ends.append(IdleMessageEnd(str(channel), is_send, num_bytes, transfer.posted_ns, end_ns))
    return ends
