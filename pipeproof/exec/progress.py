"""How far a rank's device has come: its host runs ahead of a GPU, and is no witness of where that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

POLL_S = 0.1
"""How often it is looked how far a device has come."""


class DeviceProgress(Protocol):
    """A word that the device writes as it comes by an operation, and the host reads at any time."""

    def begin(self, step: int) -> None:
        """A step begins."""
        ...

    def write(self, op_id: int) -> None:
        """Launch the writing of an operation's number, behind all that was launched before."""
        ...

    def read(self) -> tuple[int, int]:
        """The step and the operation that the device came to last; -1 before the first. Waits for nothing."""
        ...


@contextmanager
def followed(read: Callable[[], tuple[int, int]] | None, tell: Callable[[int, int], None]) -> Iterator[None]:
    """Meanwhile ``tell`` what ``read`` says, the step and operation of a device, whenever it has come on.

    Numbers below 0 say that it has come to nothing yet. Without ``read`` nothing is told.
    """
    if read is None:
        yield
        return
    ended = threading.Event()

    def look() -> None:
        last = (-1, -1)
        while not ended.wait(POLL_S):
            now = read()
            if -1 not in now and now != last:
                tell(*now)
                last = now

    thread = threading.Thread(target=look, name="device progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
