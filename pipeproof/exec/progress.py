"""How far a rank's device has come: its host runs ahead of a GPU, and is no witness of where that hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from pipeproof.exec.replay import POLL_S


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
def followed(progress: DeviceProgress | None, tell: Callable[[int, int], None]) -> Iterator[None]:
    """Meanwhile ``tell`` the step and operation that the device is at, whenever it has come on; nothing without one."""
    if progress is None:
        yield
        return
    ended = threading.Event()

    def look() -> None:
        last = (-1, -1)
        while not ended.wait(POLL_S):
            now = progress.read()
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
