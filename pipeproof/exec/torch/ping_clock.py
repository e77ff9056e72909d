"""Round trips as a GPU sees them: events between what is queued, with the GPU held back until all of it is."""

from __future__ import annotations

import torch

_HELD_CYCLES = 20_000_000
"""A hundredth of a second at 2 GHz: the host queues some forty messages in a tenth of it."""


class CudaPingClock:
    """Events on the current stream; a ``PingClock``."""

    def hold(self) -> None:
        """Let the GPU sleep, so that the host's launches are no part of what is timed."""
        torch.cuda._sleep(_HELD_CYCLES)  # noqa: SLF001 - nothing public holds a GPU back

    def mark(self) -> torch.cuda.Event:
        """An event that the GPU records when it comes to it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between_us(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """What the GPU took from one to the other."""
        second.synchronize()
        return float(first.elapsed_time(second)) * 1000
