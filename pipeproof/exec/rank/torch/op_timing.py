"""Times of operations with PyTorch: as a GPU saw them by events, or on a CPU by threads that wait for gloo.

- A computation's start and end are events on the compute stream. If the host is late, the start is when the GPU reached
  the event, and the gap belongs to no operation.
- A transfer was posted when the compute stream reached its post. It ended when its communicator's stream executed it: a
  separate stream for each channel waits for it and records an event. The times show when both ends run, but not when
  the first byte moved.
- Events have no absolute time. At the beginning of each step an event is recorded between two reads of the host's
  monotonic clock, several times; the closest pair gives the event's time and its accuracy.
- gloo reports the end of a transfer only to a thread that waits for it, and the rank's own wait may be much later. So a
  thread for each channel waits for its transfers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import record_function

from pipeproof.exec.rank.framework_protocol import Channels, World
from pipeproof.exec.rank.group_channels import PostedTransfer, Task, TaskQueue
from pipeproof.exec.rank.op_log import HOST_QUEUE, Clock, HostClock, LogEntry, Timing
from pipeproof.exec.rank.torch.comm import TorchWorld
from pipeproof.schedule.op_table import Channel
from pipeproof.schedule.ops import TRACE_PREFIX

_ANCHOR_TRIALS = 20
"""Number of trials to find the host's time of an event."""
_NS_OF_MS = 1e6


class DeviceClock:
    """Events on the current GPU; a ``Clock`` whose times are numbers of a step's events, from 1."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._num_used = 0
        self._side: torch.cuda.Stream | None = None
        self._anchor, self._anchor_ns = torch.cuda.Event(enable_timing=True), 0
        self.accuracy_ns = 0
        """Largest error of a time: half of the time between the two reads of the clock, the maximum of all steps."""

    def begin(self) -> None:
        """Wait for the GPU, find the host's time of an event, and reset the allocator's peaks."""
        self._num_used = 0
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        closest = None
        for _ in range(_ANCHOR_TRIALS):
            event = torch.cuda.Event(enable_timing=True)
            before = time.monotonic_ns()
            event.record()
            event.synchronize()
            between = time.monotonic_ns() - before
            if closest is None or between < closest:
                closest, self._anchor, self._anchor_ns = between, event, before + between // 2
        assert closest is not None
        self.accuracy_ns = max(self.accuracy_ns, closest // 2 + 1)

    def now(self) -> int:
        """Record an event on the current stream; all steps reuse the same events."""
        if self._num_used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[self._num_used].record()
        self._num_used += 1
        return self._num_used

    def end_of(self, block: Callable[[], object]) -> int:
        """Record an event on another stream, which ``block`` makes wait for the work."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._side):
            block()
            return self.now()

    def timed_entries(self, entries: Sequence[LogEntry]) -> list[LogEntry]:
        """Wait for the GPU and read the events; a transfer starts when it is posted and its channel is free."""
        torch.cuda.synchronize(self._device)
        after_ms = [self._anchor.elapsed_time(event) for event in self._events[: self._num_used]]
        times = [0, *(self._anchor_ns + round(each * _NS_OF_MS) for each in after_ms)]
        free_ns: dict[str, int] = {}
        timed: dict[int, LogEntry] = {}
        for index, entry in sorted(enumerate(entries), key=lambda pair: pair[1].posted_ns):
            posted = times[entry.posted_ns]
            start, end, split = times[entry.start_ns], times[entry.end_ns], times[entry.split_ns]
            if entry.queue != HOST_QUEUE:
                start = max(posted, free_ns.get(entry.queue, 0))
                end = max(start, end)  # events of two streams may be a tick apart
                free_ns[entry.queue] = end
            timed[index] = replace(entry, start_ns=start, end_ns=end, posted_ns=posted, split_ns=split)
        return [timed[index] for index in range(len(entries))]


class DeviceTransfer(PostedTransfer):
    """A posted transfer; its times are numbers of the device's clock."""

    def wait(self) -> None:
        """Make the current stream wait for the transfer."""
        self.work.wait()


class DeviceChannels:
    """A rank's channels with transfers timed on the GPU."""

    def __init__(self, channels: Channels, clock: DeviceClock, device: torch.device) -> None:
        self._channels, self._clock, self._device = channels, clock, device
        self._streams: dict[Channel, torch.cuda.Stream] = {}

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[DeviceTransfer] = ()) -> DeviceTransfer:
        """Post a transfer, see ``Channels.post``, with an event before it and one at its end."""
        stream = self._streams.get(channel)
        if stream is None:
            stream = self._streams[channel] = torch.cuda.Stream(self._device)
        posted = self._clock.now()
        transfer: Any = self._channels.post(channel, buffer)
        with torch.cuda.stream(stream):
            transfer.work.wait()  # blocks the stream; the buffer lives at least until the rank's own wait
            return DeviceTransfer(buffer, transfer.work, posted, posted, self._clock.now())

    def close(self) -> None:
        """Close the channels, see ``Channels.close``."""
        self._channels.close()


class WatchedChannels:
    """A rank's channels over gloo with the end times of transfers."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._queues: dict[Channel, TaskQueue] = {}

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[Task] = ()) -> Task:
        """Post a transfer, see ``Channels.post``."""
        if channel not in self._queues:
            self._queues[channel] = TaskQueue(f"times {channel}")
        posted = self._channels.post(channel, buffer)
        return self._queues[channel].post(buffer, posted.wait, begun_ns=posted.posted_ns)

    def close(self) -> None:
        """End the threads, after all waits: one that is in C++ when the interpreter ends would abort the process."""
        for each in self._queues.values():
            each.close()
        self._channels.close()


def timed_channels(channels: Channels, device: torch.device) -> tuple[Channels, Clock]:
    """Return the channels with timed transfers, and the clock of operations."""
    if device.type == "cpu":
        return WatchedChannels(channels), HostClock()
    clock = DeviceClock(device)
    return DeviceChannels(channels, clock, device), clock


def timed(world: World) -> tuple[World, Clock]:
    """Return the world, made by ``connect``, with timed transfers, and the clock of its operations."""
    assert isinstance(world, TorchWorld)
    channels, clock = timed_channels(world.channels, world.device)
    return replace(world, channels=channels), clock


def timing_of(clock: Clock) -> Timing:
    """Return the clock at the end of the steps, and the memory peaks of the last step."""
    if not isinstance(clock, DeviceClock):
        return Timing()
    return Timing(
        "device",
        clock.accuracy_ns,
        torch.cuda.get_device_name(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
    )


_HELD_CYCLES = 20_000_000
"""A hundredth of a second at 2 GHz; the host queues about forty messages in a tenth of it."""


class CudaPingClock:
    """Events on the current stream; a ``PingClock``."""

    def hold(self) -> None:
        """Let the GPU sleep: the measured time then does not contain the host's launches."""
        torch.cuda._sleep(_HELD_CYCLES)  # noqa: SLF001 - no public function makes a GPU sleep

    def mark(self) -> torch.cuda.Event:
        """Return an event that the GPU records when it reaches it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_us(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Return the GPU's microseconds from one event to the other."""
        second.synchronize()
        return float(first.elapsed_time(second)) * 1000


def op_ranges() -> Callable[[str], AbstractContextManager[object]] | None:
    """Return a function from an operation's text to its range; None unless a profiler runs."""
    if not torch.autograd._profiler_enabled():  # noqa: SLF001 - no public query
        return None
    return lambda text: record_function(f"{TRACE_PREFIX}{text}")
