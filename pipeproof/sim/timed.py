"""As-soon-as-possible times of a schedule as a timeline and figures, so that they are drawn as simulations are."""

from __future__ import annotations

from fractions import Fraction
from itertools import count

from pipeproof.schedule.asap import Timed
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.figures import RankFigures, ratio
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


def figures_of_timed(timed: Timed) -> tuple[RankFigures, ...]:
    """The figures of each pipeline rank; times in the unit of the costs, an overlapped pair counted once."""
    return tuple(_figures(timed, rank) for rank in range(len(timed.programs)))


def _figures(timed: Timed, rank: int) -> RankFigures:
    makespan, span, busy = (Fraction(time) for time in (timed.makespan, timed.span(rank), timed.busy(rank)))
    return RankFigures(
        rank=rank,
        coords={"pp": rank},
        span_us=span,
        busy_us=busy,
        bubble_makespan_us=makespan - busy,
        bubble_span_us=span - busy,
        bubble_makespan_ratio=ratio(makespan - busy, makespan),
        bubble_span_ratio=ratio(span - busy, span),
        peak_activations=timed.peak(rank),
        peak_activations_at_i=timed.peak(rank, OpKind.BACKWARD_INPUT),
    )
