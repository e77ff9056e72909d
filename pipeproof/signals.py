"""Termination signals as exceptions, so that a command stops its workers and cleans up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class TerminatedError(Exception):
    """A signal terminated this process."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextlib.contextmanager
def terminate_raises() -> Iterator[None]:
    """Turn signals that end a process into exceptions, so that cleanup code runs.

    This includes SIGINT: a shell starts background jobs with SIGINT ignored, and Python then never sees it. An ignored
    SIGHUP stays ignored (``nohup``).
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
