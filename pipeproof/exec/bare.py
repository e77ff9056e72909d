"""Messages that are timed before the first step, one at a time and with nothing beside them: which, and their ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeproof.comm.buffering import message_bytes
from pipeproof.schedule.ops import SEND_KINDS
from pipeproof.schedule.optable import OpGraph

REPEATS = 5
"""How often each size goes over each channel."""

USUAL_BYTES = (2**10, 2**14, 2**18, 2**20)
"""Sizes beside those of the plan's own messages."""


@dataclass(frozen=True, slots=True)
class BareEnd:
    """One end of a bare message, on the machine's monotonic clock in nanoseconds; ``channel`` is the channel's text."""

    channel: str
    is_send: bool
    num_bytes: int
    posted_ns: int
    end_ns: int


def bare_sizes(graph: OpGraph) -> tuple[int, ...]:
    """Bytes of the messages to time, in order; every rank comes to the same."""
    own = message_bytes(graph)[np.flatnonzero(graph.is_kind(SEND_KINDS))]
    return tuple(sorted({*own.tolist(), *USUAL_BYTES}))


def read_bare(file: Path) -> list[BareEnd]:
    """The ends that a rank left in ``file``, in order."""
    return [BareEnd(**end) for end in json.loads(file.read_text())]
