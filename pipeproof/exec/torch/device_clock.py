"""Times of operations as a GPU saw them: events on the streams on which the work is issued.

- A computation's start and end are events on the stream that computes. If the
  host is late, the start is when the GPU had come to the event, and the time in
  between belongs to no operation.
- A transfer was posted when the computing stream came to its post. It ended
  when its communicator's stream had carried it out: a stream of its own for
  each channel waits for it and records an event. That the two ends of a channel
  run is known, when the first byte moved is not.
- Events know no time of day. At the beginning of each step one is recorded
  between two looks at the host's monotonic clock, several times; the closest
  pair says what time it was, and how well that is known.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from pipeproof.exec.oplog import HOST_QUEUE, LogEntry
from pipeproof.exec.torch.comm import TorchChannels, Transfer
from pipeproof.schedule.optable import Channel

_LOOKS = 20
"""How often the host looks for the time of an event."""
_NS_OF_MS = 1e6


class DeviceClock:
    """Events on the current GPU; a ``Clock`` whose numbers are places among a step's events, from 1."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._num_used = 0
        self._anchor, self._anchor_ns = torch.cuda.Event(enable_timing=True), 0
        self.accuracy_ns = 0
        """By how much a time may be off: half of the time between the two looks, the largest of all steps."""

    def begin(self) -> None:
        """Wait for the GPU and note what time it is there; the allocator's peaks are those of the step from here on."""
        self._num_used = 0
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        closest = None
        for _ in range(_LOOKS):
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
        """Record an event on the current stream; events are made once, and used again in every step."""
        if self._num_used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[self._num_used].record()
        self._num_used += 1
        return self._num_used

    def dated(self, entries: Sequence[LogEntry]) -> list[LogEntry]:
        """Wait for the GPU and read the events; a transfer starts when it is posted and its channel free."""
        torch.cuda.synchronize(self._device)
        times = [0, *(self._time_ns(event) for event in self._events[: self._num_used])]
        free_ns: dict[str, int] = {}
        dated: dict[int, LogEntry] = {}
        for place, entry in sorted(enumerate(entries), key=lambda pair: pair[1].posted_ns):
            posted = times[entry.posted_ns]
            start, end, split = times[entry.start_ns], times[entry.end_ns], times[entry.split_ns]
            if entry.queue != HOST_QUEUE:
                start = max(posted, free_ns.get(entry.queue, 0))
                end = max(start, end)  # events of two streams may be a tick apart
                free_ns[entry.queue] = end
            dated[place] = replace(entry, start_ns=start, end_ns=end, posted_ns=posted, split_ns=split)
        return [dated[place] for place in range(len(entries))]

    def _time_ns(self, event: torch.cuda.Event) -> int:
        after_ms: float = self._anchor.elapsed_time(event)
        return self._anchor_ns + round(after_ms * _NS_OF_MS)


class DeviceTransfer(Transfer):
    """A posted transfer; its times are numbers of the device's clock."""

    def wait(self) -> None:
        """Make the current stream wait for it."""
        self.work.wait()


class DeviceChannels:
    """A rank's channels, whose transfers are timed on the GPU."""

    def __init__(self, channels: TorchChannels, clock: DeviceClock, device: torch.device) -> None:
        self._channels, self._clock, self._device = channels, clock, device
        self._streams: dict[Channel, torch.cuda.Stream] = {}

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[DeviceTransfer] = ()) -> DeviceTransfer:
        """As ``TorchChannels.post``, with an event before it and one where it ends."""
        stream = self._streams.get(channel)
        if stream is None:
            stream = self._streams[channel] = torch.cuda.Stream(self._device)
        posted = self._clock.now()
        transfer = self._channels.post(channel, buffer)
        with torch.cuda.stream(stream):
            transfer.work.wait()  # the stream does; the buffer lives at least until the rank's own wait
            return DeviceTransfer(buffer, transfer.work, posted, posted, self._clock.now())

    def close(self) -> None:
        """As ``TorchChannels.close``."""
        self._channels.close()
