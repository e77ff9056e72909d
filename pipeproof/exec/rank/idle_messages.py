"""Idle messages: timed before the first step, one at a time and without other work, over the channels of the plan."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pipeproof.comm.channel_models import message_bytes
from pipeproof.exec.rank.framework_protocol import Arrays, World
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import SEND_KINDS

REPEATS = 5
"""Number of messages of each size on each channel."""

USUAL_BYTES = (2**10, 2**14, 2**18, 2**20)
"""Sizes in addition to those of the plan's messages."""


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

    All ranks wait at a barrier before each message, so that only one is under way. A wait does not block the host of a
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
