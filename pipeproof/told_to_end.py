"""Signals that tell a command to end, as exceptions: workers are stopped, and what was begun is left in order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class TerminatedError(Exception):
    """This process was told to end by a signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextlib.contextmanager
def terminate_raises() -> Iterator[None]:
    """Turn signals that end a process into exceptions, so that all is left in order on the way out.

    SIGINT too: a shell starts background jobs with it ignored, and then Python would never see it. SIGHUP
    stays ignored where it is (``nohup``).
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise TerminatedError(signum)

    signums = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signums.append(signal.SIGHUP)
    previous = {signum: signal.signal(signum, stop) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
