"""The messages that are timed on every edge once the steps of a rehearsal are done, and where they are left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from pipeproof.comm.buffering import message_bytes
from pipeproof.exec.framework import Arrays, World
from pipeproof.exec.jobs import Job
from pipeproof.exec.pings import TOKEN_BYTES, PingClock, Wire, one_way_us, way_back
from pipeproof.schedule.ops import SEND_KINDS
from pipeproof.schedule.optable import OpGraph

USUAL_BYTES = (TOKEN_BYTES, 2**16, 2**20)
"""Sizes beside the smallest and the largest of the plan's own messages."""
LARGE_BYTES = 2**24
"""One more on GPUs, whose links a smaller message does not fill."""

EdgeTimes = Mapping[str, Mapping[int, tuple[float, ...]]]
"""By a channel's text and a message's bytes, microseconds of each message."""


def ping_sizes(graph: OpGraph, device: str) -> tuple[int, ...]:
    """Bytes of the messages to time, in order; every rank comes to the same."""
    own = message_bytes(graph)[np.flatnonzero(graph.is_kind(SEND_KINDS))]
    ends = (int(own.min()), int(own.max())) if len(own) else ()
    return tuple(sorted({*ends, *USUAL_BYTES, *((LARGE_BYTES,) if device == "gpu" else ())}))


def ping_edges(
    world: World,
    arrays: Arrays,
    clock: PingClock,
    graph: OpGraph,
    device: str,
    progress: Callable[[str], None],
) -> EdgeTimes:
    """Time every channel that has a way back, one after the other; every rank must call this.

    The result has the channels that this rank sends on. All ranks wait at a barrier before each, so that nothing else
    is under way.
    """
    wire, sizes = Wire(world.rank, world.channels, arrays, clock), ping_sizes(graph, device)
    found = {}
    for channel in graph.channels:
        progress(f"timing {channel}")
        world.barrier()
        back = way_back(graph.channels, channel)
        if back is not None and world.rank in (channel.src, channel.dst):
            times = one_way_us(wire, channel, back, sizes)
            if world.rank == channel.src:
                found[str(channel)] = times
    return found


def save_edges(job: Job, rank: int, times: EdgeTimes) -> None:
    """Leave what a rank timed."""
    _file(job, rank).write_text(json.dumps(times))


def read_edges(job: Job, num_ranks: int) -> EdgeTimes:
    """What all ranks have left."""
    return {
        channel: {int(num_bytes): tuple(times) for num_bytes, times in by_size.items()}
        for rank in range(num_ranks)
        for channel, by_size in json.loads(_file(job, rank).read_text()).items()
    }


def _file(job: Job, rank: int) -> Path:
    return job.directory / f"rank{rank}.edges.json"
