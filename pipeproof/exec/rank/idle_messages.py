"""Idle messages: timed before the first step, one at a time and without other work, over the channels of the plan."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from pipeproof.comm.channel_models import message_bytes
from pipeproof.exec.rank.framework_protocol import Arrays, Tensor, World
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


_FIRST_SIZE, _LARGEST_SIZE = 128, 8192
"""Rows of the smallest and of the largest product; the size doubles until a product is long enough."""
_LONG_ENOUGH_S = 0.005
_REPEATS_S = 0.1
"""Time in which the product of the last size is repeated; it runs once at least."""


def product_peak(arrays: Arrays, dtype: str) -> float:
    """Return the FLOP/s of the fastest of several square products on the device of ``arrays``, in a tenth of a second.

    The host waits for each product. Values are random, because a GPU multiplies zeros faster.
    """
    size = _FIRST_SIZE
    left, right = _matrix(arrays, size, dtype), _matrix(arrays, size, dtype)
    _seconds(arrays, left, right)  # loads the kernels
    while _seconds(arrays, left, right) < _LONG_ENOUGH_S and size < _LARGEST_SIZE:
        size *= 2
        left, right = _matrix(arrays, size, dtype), _matrix(arrays, size, dtype)
        _seconds(arrays, left, right)
    shortest, ends = _seconds(arrays, left, right), time.monotonic() + _REPEATS_S
    while time.monotonic() < ends:
        shortest = min(shortest, _seconds(arrays, left, right))
    return 2.0 * size**3 / shortest


def _seconds(arrays: Arrays, left: Tensor, right: Tensor) -> float:
    arrays.synchronize()
    start = time.perf_counter()
    left @ right
    arrays.synchronize()
    return time.perf_counter() - start


def _matrix(arrays: Arrays, size: int, dtype: str) -> Tensor:
    values = np.random.default_rng(0).uniform(-1, 1, 2**16).astype("float32")
    is_upper_half = dtype == "bfloat16"  # of float32; numpy has no such type
    typed = (values.view(np.uint32) >> 16).astype(np.uint16) if is_upper_half else values.astype(dtype)
    return arrays.from_bytes(np.resize(typed, size * size).view(np.uint8), [size, size], dtype)
