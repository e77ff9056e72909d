"""The trace of one rank, in one form for all profilers: named ranges on the host, and work with its launch time.

All times are integers of nanoseconds. Work is a kernel or a copy of a GPU; in a trace without a GPU it is an operator
that the host executes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_COMMUNICATION = re.compile(r"nccl|^c10d::|^gloo:|nvshmem|::internode::|::intranode::|deep_?ep", re.IGNORECASE)
_MESSAGE = re.compile(r"nccl.*_?SendRecv|^(c10d::|gloo:)(send|recv)", re.IGNORECASE)


class NamedRange(NamedTuple):
    """A named range of the host: ``record_function``, NVTX, or a gloo transfer from its post to its end."""

    name: str
    start_ns: int
    end_ns: int


class Work(NamedTuple):
    """A kernel, copy or operator. ``launched_ns`` is when the host launched it."""

    launched_ns: int
    start_ns: int
    end_ns: int
    name: str

    @property
    def is_communication(self) -> bool:
        """True for messages and collectives, by the name."""
        return _COMMUNICATION.search(self.name) is not None

    @property
    def is_message(self) -> bool:
        """True for messages between two ranks, by the name."""
        return _MESSAGE.search(self.name) is not None


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Trace of one rank.

    ``rank`` is None if neither the trace nor its name shows it. Times of traces with the same ``clock`` can be
    compared; it is empty if it is not known. ``device`` is the name of the GPU, empty for a run on processors.
    ``ranges`` are ordered by their starts, ``work`` by the launches. ``num_unlaunched`` counts kernels whose launch is
    not in the trace; they are in ``work`` at their starts.
    """

    file: str
    rank: int | None
    ranges: Sequence[NamedRange]
    work: Sequence[Work]
    clock: str = ""
    device: str = ""
    num_unlaunched: int = 0


_RANK_OF_NAME = re.compile(r"rank[-_. ]?(\d+)|workerlog\.(\d+)", re.IGNORECASE)


def rank_of_name(name: str) -> int | None:
    """Return the rank in the name of a file: ``rank3``, ``rank_3`` or ``workerlog.3``; None without one."""
    match = _RANK_OF_NAME.search(name)
    return None if match is None else int(match[1] or match[2])


def by_start(named: NamedRange) -> tuple[int, int]:
    """Sort key of ranges: by start, an enclosing range first."""
    return named.start_ns, -named.end_ns
