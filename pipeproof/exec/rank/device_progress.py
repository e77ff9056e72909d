"""Progress of a device that its host runs ahead of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

POLL_S = 0.1
"""Interval between two reads of a device's progress."""


class DeviceProgress(Protocol):
    """Progress of a device: it writes each operation that it reaches, and the host reads the last one at any time."""

    def begin(self, step: int) -> None:
        """Begin a step."""

    def write(self, op_id: int) -> None:
        """Launch the writing of an operation's number after all work launched before."""

    def read(self) -> tuple[int, int]:
        """Return the last step and operation that the device reached, -1 before the first, without waiting."""


@contextmanager
def follow_device(read: Callable[[], tuple[int, int]] | None, report: Callable[[int, int], None]) -> Iterator[None]:
    """Within the context, call ``report`` with each new step and operation of a device that ``read`` returns.

    Numbers below 0 mean that the device has reached no operation yet. Without ``read`` nothing is reported.
    """
    if read is None:
        yield
        return
    ended = threading.Event()

    def poll() -> None:
        last = (-1, -1)
        while not ended.wait(POLL_S):
            now = read()
            if -1 not in now and now != last:
                report(*now)
                last = now

    thread = threading.Thread(target=poll, name="device progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
