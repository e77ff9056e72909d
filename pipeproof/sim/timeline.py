"""Timeline of a step: one span per operation, simulated or measured, in one form.

A simulated timeline holds exact times in microseconds; a measured one holds
the readings of its clock (such as integer nanoseconds) and the length of one
tick in ``tick_us``. Every figure is an exact fraction of microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import count
from typing import Any, Literal

import numpy as np

from pipeproof.schedule.columns import IntColumn
from pipeproof.schedule.formats.op_text import kinds_of
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind, parse_op
from pipeproof.schedule.programs import Timed, held_changes, most_held, time_covered
from pipeproof.sim.fast_engine import Times

Time = Fraction | int | float
"""A point in time or a duration, in ticks of its timeline."""

COMPUTE_QUEUE = "compute"
"""Queue of the rank's host. Every other queue is a channel, labelled like ``forward 0->1``, or a queue (such as a
CUDA stream) that operations of the program name."""


@dataclass(frozen=True, slots=True)
class Span:
    """One operation from its start to its end, in ticks.

    A transfer starts when its queue reaches it, not when its data arrives.
    ``op`` is the text form; ``step`` numbers the training steps of a measured
    run, in which op ids repeat.
    """

    rank: int
    queue: str
    op_id: int
    op: str
    start: Time
    end: Time
    step: int = 0


@dataclass(frozen=True)
class Timeline:
    """All spans of one or several steps, with their ranks.

    ``ranks`` holds the mesh coordinates of each global rank; ``matches`` the
    (send, recv) op ids of each message, for the arrows of a trace.
    """

    spans: tuple[Span, ...]
    ranks: tuple[Mapping[str, int], ...]
    clock: Literal["simulated", "measured"] = "simulated"
    tick_us: Fraction = Fraction(1)
    matches: tuple[tuple[int, int], ...] = ()

    def us(self, time: Time) -> Fraction:
        """A time of this timeline in exact microseconds."""
        return Fraction(time) * self.tick_us

    @cached_property
    def first_start(self) -> Time:
        """The first start over all ranks and queues, in ticks; 0 without spans."""
        # Operations that start together mostly share one object; comparing fractions is slower than comparing ids.
        return min({id(span.start): span.start for span in self.spans}.values(), default=0)

    @cached_property
    def makespan_us(self) -> Fraction:
        """From the first start to the last end over all ranks and queues; 0 without spans."""
        return self._extent(self.spans)

    def span_us(self, rank: int) -> Fraction:
        """From the first start to the last end of a compute operation (F, B, I, W) of ``rank``."""
        return self._extent(tuple(span for span, _ in self._compute[rank]))

    def busy_us(self, rank: int) -> Fraction:
        """Time in which ``rank`` computes (F, B, I, W); overlapped computations count once."""
        return Fraction(time_covered((self.us(span.start), self.us(span.end)) for span, _ in self._compute[rank]))

    def peak_activations(self, rank: int) -> int:
        """Most chunk activations held at once: from the start of F to the end of B, or of W where split."""
        return self._peak(rank, OpKind.BACKWARD_WEIGHT)

    def peak_activations_at_i(self, rank: int) -> int:
        """Most chunk activations held at once if they are freed at the end of I; equal if the backward is not split."""
        return self._peak(rank, OpKind.BACKWARD_INPUT)

    def compute_spans(self, rank: int) -> tuple[tuple[Span, OpKind], ...]:
        """The compute operations (F, B, I, W) of ``rank`` in order of time."""
        return self._compute[rank]

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` computes, in order of their numbers."""
        return tuple(sorted({parse_op(span.op).stage for span, _ in self._compute[rank]}))

    def _extent(self, spans: tuple[Span, ...]) -> Fraction:
        if not spans:
            return Fraction(0)
        return self.us(max(span.end for span in spans)) - self.us(min(span.start for span in spans))

    def _peak(self, rank: int, freed_at: OpKind) -> int:
        return most_held(held_changes(((kind, span.start, span.end) for span, kind in self._compute[rank]), freed_at))

    @cached_property
    def _compute(self) -> tuple[tuple[tuple[Span, OpKind], ...], ...]:
        by_rank: list[list[tuple[Span, OpKind]]] = [[] for _ in self.ranks]
        spans = [span for span in self.spans if "->" not in span.queue]  # others are channels
        for span, kind in zip(spans, kinds_of(span.op for span in spans), strict=True):
            if kind in COMPUTE_KINDS:
                by_rank[span.rank].append((span, kind))
        for spans_of_rank in by_rank:
            spans_of_rank.sort(key=lambda pair: (pair[0].start, pair[0].end, pair[0].step, pair[0].op_id))
        return tuple(map(tuple, by_rank))


def timeline_of(timed: Timed) -> Timeline:
    """Timeline of the as-soon-as-possible times of a schedule, in the unit of its costs."""
    ids = count()
    spans = tuple(
        Span(rank, COMPUTE_QUEUE, next(ids), str(op), start, end)
        for rank, program in enumerate(timed.programs)
        for op, start, end in zip(program, timed.starts[rank], timed.ends[rank], strict=True)
    )
    return Timeline(spans, tuple({"pp": rank} for rank in range(len(timed.programs))))


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Time, bubbles and activations of one rank; times in exact microseconds.

    Bubbles are idle time. ``makespan_us`` is the makespan of all ranks. Activations count chunk activations of one
    micro-batch, freed at the end of B or W (``peak_activations``) or already at the end of I
    (``peak_activations_at_i``).
    """

    rank: int
    coords: Mapping[str, int]
    makespan_us: Fraction
    span_us: Fraction
    busy_us: Fraction
    peak_activations: int
    peak_activations_at_i: int

    @property
    def bubble_makespan_us(self) -> Fraction:
        """Idle time within the makespan."""
        return self.makespan_us - self.busy_us

    @property
    def bubble_span_us(self) -> Fraction:
        """Idle time within the rank's own span."""
        return self.span_us - self.busy_us

    @property
    def bubble_makespan_ratio(self) -> Fraction:
        """Idle share of the makespan; 0 if that is 0."""
        return self.bubble_makespan_us / (self.makespan_us or 1)

    @property
    def bubble_span_ratio(self) -> Fraction:
        """Idle share of the rank's own span; 0 if that is 0."""
        return self.bubble_span_us / (self.span_us or 1)


def figures_of(timeline: Timeline) -> tuple[RankFigures, ...]:
    """The figures of every rank of a timeline."""
    return tuple(
        RankFigures(
            rank,
            coords,
            timeline.makespan_us,
            timeline.span_us(rank),
            timeline.busy_us(rank),
            timeline.peak_activations(rank),
            timeline.peak_activations_at_i(rank),
        )
        for rank, coords in enumerate(timeline.ranks)
    )


def figures_to_json(figures: RankFigures) -> dict[str, Any]:
    """The times and peaks of a rank, without its name."""
    times = ("span_us", "busy_us", "bubble_makespan_us", "bubble_span_us", "bubble_makespan_ratio", "bubble_span_ratio")
    result: dict[str, Any] = {}
    for name in times:
        result |= number_to_json(name.removesuffix("_us"), getattr(figures, name))
    for name in ("peak_activations", "peak_activations_at_i"):
        result[name] = getattr(figures, name)
    return result


def number_to_json(name: str, value: Fraction) -> dict[str, int | float | str]:
    """An exact number under ``name``, with the key ``{name}_exact`` where it has no exact binary form."""
    if value.denominator == 1:
        return {name: value.numerator}
    nearest = float(value)
    if Fraction(nearest) == value:
        return {name: nearest}
    return {name: nearest, f"{name}_exact": str(value)}


def makespan_of_times(times: Times, ticks_per_us: int) -> Fraction:
    """Makespan in microseconds: first start to last end of all operations; 0 without any."""
    if not len(times.starts):
        return Fraction(0)
    return Fraction(int(times.ends.max() - times.starts.min()), ticks_per_us)


def figures_of_times(
    graph: OpGraph, times: Times, ticks_per_us: int, coords: Sequence[Mapping[str, int]]
) -> tuple[RankFigures, ...]:
    """The figures of every rank of a graph; ``coords`` are the mesh coordinates of each."""
    makespan = makespan_of_times(times, ticks_per_us)
    computes, forward = graph.is_kind(COMPUTE_KINDS), graph.is_kind(frozenset({OpKind.FORWARD}))
    frees_at_w = graph.is_kind(frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT}))
    frees_at_i = graph.is_kind(frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT}))
    result = []
    for rank, coords_of_rank in enumerate(coords):
        ops_of_rank = slice(*graph.offsets[rank : rank + 2].tolist())
        starts, ends = times.starts[ops_of_rank], times.ends[ops_of_rank]
        span, busy = _span_and_busy(starts[computes[ops_of_rank]], ends[computes[ops_of_rank]])
        held_from = starts[forward[ops_of_rank]]
        result.append(
            RankFigures(
                rank,
                coords_of_rank,
                makespan,
                Fraction(span, ticks_per_us),
                Fraction(busy, ticks_per_us),
                _peak(held_from, ends[frees_at_w[ops_of_rank]]),
                _peak(held_from, ends[frees_at_i[ops_of_rank]]),
            )
        )
    return tuple(result)


def _span_and_busy(starts: IntColumn, ends: IntColumn) -> tuple[int, int]:
    """(span, busy time) in ticks; overlapped computations count once."""
    if not len(starts):
        return 0, 0
    order = np.argsort(starts, kind="stable")
    ordered_starts, ordered_ends = starts[order], ends[order]
    covered_to = np.concatenate([ordered_starts[:1], np.maximum.accumulate(ordered_ends)[:-1]])
    busy = np.maximum(ordered_ends - np.maximum(ordered_starts, covered_to), 0)
    return int(ends.max() - starts.min()), int(busy.sum())


def _peak(held_from: IntColumn, freed: IntColumn) -> int:
    """Most activations held at once; at equal times releases precede acquisitions."""
    change = np.concatenate([np.ones_like(held_from), -np.ones_like(freed)])
    order = np.lexsort((change, np.concatenate([held_from, freed])))
    return int(np.cumsum(change[order]).max(initial=0))
