"""The figures of a simulation, per rank, and their published JSON form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from pipeproof.schedule.columns import IntColumn
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind
from pipeproof.sim.fast_engine import Times
from pipeproof.sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Time, bubbles and activations of one rank; times in exact microseconds.

    Bubbles are idle time: ``bubble_makespan_us`` within the makespan of all
    ranks, ``bubble_span_us`` within the rank's own span. Activations count
    chunk activations of one micro-batch, freed at the end of B or W
    (``peak_activations``) or already at the end of I (``peak_activations_at_i``).
    """

    rank: int
    coords: Mapping[str, int]
    span_us: Fraction
    busy_us: Fraction
    bubble_makespan_us: Fraction
    bubble_span_us: Fraction
    bubble_makespan_ratio: Fraction
    bubble_span_ratio: Fraction
    peak_activations: int
    peak_activations_at_i: int


def figures_of(timeline: Timeline) -> tuple[RankFigures, ...]:
    """The figures of every rank of a timeline; a ratio of no time at all is 0."""
    return tuple(
        rank_figures(
            rank,
            coords,
            makespan_us=timeline.makespan_us,
            span_us=timeline.span_us(rank),
            busy_us=timeline.busy_us(rank),
            peak_activations=timeline.peak_activations(rank),
            peak_activations_at_i=timeline.peak_activations_at_i(rank),
        )
        for rank, coords in enumerate(timeline.ranks)
    )


def rank_figures(
    rank: int,
    coords: Mapping[str, int],
    *,
    makespan_us: Fraction,
    span_us: Fraction,
    busy_us: Fraction,
    peak_activations: int,
    peak_activations_at_i: int,
) -> RankFigures:
    """The figures of one rank, with the bubbles that follow; a ratio of no time at all is 0."""
    return RankFigures(
        rank=rank,
        coords=coords,
        span_us=span_us,
        busy_us=busy_us,
        bubble_makespan_us=makespan_us - busy_us,
        bubble_span_us=span_us - busy_us,
        bubble_makespan_ratio=_ratio(makespan_us - busy_us, makespan_us),
        bubble_span_ratio=_ratio(span_us - busy_us, span_us),
        peak_activations=peak_activations,
        peak_activations_at_i=peak_activations_at_i,
    )


def _ratio(part: Fraction, whole: Fraction) -> Fraction:
    return part / whole if whole else Fraction(0)


def figures_to_json(figures: RankFigures) -> dict[str, Any]:
    """The times and peaks of a rank, without its name."""
    return {
        **number_to_json("span", figures.span_us),
        **number_to_json("busy", figures.busy_us),
        **number_to_json("bubble_makespan", figures.bubble_makespan_us),
        **number_to_json("bubble_span", figures.bubble_span_us),
        **number_to_json("bubble_makespan_ratio", figures.bubble_makespan_ratio),
        **number_to_json("bubble_span_ratio", figures.bubble_span_ratio),
        "peak_activations": figures.peak_activations,
        "peak_activations_at_i": figures.peak_activations_at_i,
    }


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
            rank_figures(
                rank,
                coords_of_rank,
                makespan_us=makespan,
                span_us=Fraction(span, ticks_per_us),
                busy_us=Fraction(busy, ticks_per_us),
                peak_activations=_peak(held_from, ends[frees_at_w[ops_of_rank]]),
                peak_activations_at_i=_peak(held_from, ends[frees_at_i[ops_of_rank]]),
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
