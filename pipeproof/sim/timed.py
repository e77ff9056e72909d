"""As-soon-as-possible times of a schedule as a timeline, so that they are drawn and counted as simulations are."""

from __future__ import annotations

from itertools import count

from pipeproof.schedule.asap import Timed
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Timeline


def timeline_of(timed: Timed) -> Timeline:
    """The computations of each pipeline rank; their unit is that of the costs."""
    ids = count()
    spans = tuple(
        Span(rank, COMPUTE_QUEUE, next(ids), str(op), start, end)
        for rank, program in enumerate(timed.programs)
        for op, start, end in zip(program, timed.starts[rank], timed.ends[rank], strict=True)
    )
    return Timeline(spans, tuple({"pp": rank} for rank in range(len(timed.programs))))
