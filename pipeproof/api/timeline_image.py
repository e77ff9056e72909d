"""A simulated timeline as a still picture for a notebook, which needs no script and no network."""

from __future__ import annotations

from base64 import b64encode
from html import escape

from pipeproof.schedule.ops import COMPUTE_KINDS, parse_op
from pipeproof.schedule.programs import Timed
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Timeline
from pipeproof.views.schedule_svg import schedule_svg

MOST_RANKS, MOST_OPS = 32, 4000
"""Ranks and computations that a picture shows."""


def timeline_image(timeline: Timeline, title: str) -> str:
    """Return an ``<img>`` with the computations of the pipeline ranks of one replica; a sentence if they are many."""
    ranks = [
        rank for rank, coords in enumerate(timeline.ranks)
        if not any(place for axis, place in coords.items() if axis != "pp")
    ]  # fmt: skip
    rows = [_computations(timeline, rank) for rank in ranks]
    if len(ranks) > MOST_RANKS or sum(map(len, rows)) > MOST_OPS:
        return "<p>The timeline is too large for a picture here: <code>save('timeline.html')</code> writes it.</p>"
    timed = Timed(
        tuple(tuple(parse_op(span.op) for span in row) for row in rows),
        tuple(tuple(timeline.us(span.start) for span in row) for row in rows),
        tuple(tuple(timeline.us(span.end) for span in row) for row in rows),
    )
    picture = b64encode(schedule_svg(timed, title).encode()).decode()
    return f'<img alt="{escape(title)}: timeline" src="data:image/svg+xml;base64,{picture}"/>'


def _computations(timeline: Timeline, rank: int) -> list[Span]:
    own = (span for span in timeline.spans if span.rank == rank and span.queue == COMPUTE_QUEUE)
    return sorted((span for span in own if parse_op(span.op).kind in COMPUTE_KINDS), key=lambda span: span.start)
