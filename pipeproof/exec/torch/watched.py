"""gloo's transfers with the time of their end: a thread for each channel waits for what is posted there.

PyTorch's gloo tells that a transfer is done only to who waits for it, and the
rank itself may come to its wait much later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from pipeproof.exec.torch.comm import TorchChannels, Transfer
from pipeproof.schedule.optable import Channel


@dataclass(slots=True)
class WatchedTransfer(Transfer):
    """A posted transfer that a thread waits for."""

    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            RuntimeError: the peer is gone, or what gloo has to say.
        """
        self.done.wait()
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error


class WatchedChannels:
    """A rank's channels over gloo, whose transfers have the time of their end."""

    def __init__(self, channels: TorchChannels) -> None:
        self._channels = channels
        self._posted: dict[Channel, SimpleQueue[WatchedTransfer | None]] = {}

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[WatchedTransfer] = ()) -> WatchedTransfer:
        """As ``TorchChannels.post``."""
        posted = self._posted.get(channel)
        if posted is None:
            posted = self._posted[channel] = SimpleQueue()
            threading.Thread(target=_watch, args=[posted], name=f"times {channel}", daemon=True).start()
        plain = self._channels.post(channel, buffer)
        transfer = WatchedTransfer(buffer, plain.work, plain.posted_ns, plain.posted_ns)
        posted.put(transfer)
        return transfer

    def close(self) -> None:
        """End the threads; every transfer was waited for."""
        for posted in self._posted.values():
            posted.put(None)
        self._channels.close()


def _watch(posted: SimpleQueue[WatchedTransfer | None]) -> None:
    while (transfer := posted.get()) is not None:
        try:
            transfer.work.wait()
        except Exception as error:  # noqa: BLE001 - whatever gloo raises: the rank's own wait tells it
            transfer.error = error
        transfer.end_ns = time.monotonic_ns()
        transfer.done.set()
