"""Exit statuses of the commands; a command ended by the signal ``n`` has the status 128 + n."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """The exit status of every ``pipeproof`` command."""

    OK = 0
    """No error found, or the run matches its reference."""
    FAILED = 1
    """Errors found, or a run that does not match its reference."""
    BAD_INPUT = 2
    """Bad input, or a backend that is not installed."""
    WORKER_FAILED = 3
    """A worker died or hung."""
    OUTPUT_CLOSED = 141
    """The reader of our output has closed it, as ``head`` does; as SIGPIPE ends other programs."""
    INTERRUPTED = 130
    """Ctrl-C."""
