"""Termination signals as exceptions: a command can stop its workers and clean up."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from pipeproof.system_calls import kill


class TerminatedError(Exception):
    """A signal terminated this process."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


_PR_SET_PDEATHSIG = 1
"""From Linux's include/uapi/linux/prctl.h."""


def die_with_parent(parent: int) -> None:
    """From now on, SIGKILL ends this process when its parent ends in any way, also while it is stopped (Linux).

    ``parent`` is the number of the parent; if it has ended before, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        kill(os.getpid())


@contextlib.contextmanager
def terminate_raises() -> Iterator[None]:
    """Turn signals that end a process into exceptions: cleanup code then runs.

    This includes SIGINT: a shell starts background jobs with SIGINT ignored, and Python then never sees it. An ignored
    SIGHUP stays ignored (``nohup``).
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise TerminatedError(signum)

    signums = [signal.SIGINT, signal.SIGTERM]
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signums.append(signal.SIGHUP)
    previous = {signum: signal.signal(signum, stop) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
