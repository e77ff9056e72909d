"""The figures of each rank straight from columns of times; no span is made for them.

They equal those of the timeline (``figures.figures_of``), which says what each of them is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from pipeproof.schedule.columns import IntColumn
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind
from pipeproof.schedule.optable import OpGraph
from pipeproof.sim.fast import Times
from pipeproof.sim.figures import RankFigures, rank_figures


def makespan_of_times(times: Times, ticks_per_us: int) -> Fraction:
    """From the first start to the last end over all operations, in microseconds; 0 without any."""
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
    for rank, place in enumerate(coords):
        mine = slice(*graph.offsets[rank : rank + 2].tolist())
        starts, ends = times.starts[mine], times.ends[mine]
        span, busy = _span_and_busy(starts[computes[mine]], ends[computes[mine]])
        held_from = starts[forward[mine]]
        result.append(
            rank_figures(
                rank,
                place,
                makespan_us=makespan,
                span_us=Fraction(span, ticks_per_us),
                busy_us=Fraction(busy, ticks_per_us),
                peak_activations=_peak(held_from, ends[frees_at_w[mine]]),
                peak_activations_at_i=_peak(held_from, ends[frees_at_i[mine]]),
            )
        )
    return tuple(result)


def _span_and_busy(starts: IntColumn, ends: IntColumn) -> tuple[int, int]:
    """(first start to last end, time in computations: what runs side by side counts once), in ticks."""
    if not len(starts):
        return 0, 0
    order = np.argsort(starts, kind="stable")
    ordered_starts, ordered_ends = starts[order], ends[order]
    covered_to = np.concatenate([ordered_starts[:1], np.maximum.accumulate(ordered_ends)[:-1]])
    busy = np.maximum(ordered_ends - np.maximum(ordered_starts, covered_to), 0)
    return int(ends.max() - starts.min()), int(busy.sum())


def _peak(held_from: IntColumn, freed: IntColumn) -> int:
    """Most held at once; at equal times what is freed goes before what comes."""
    change = np.concatenate([np.ones_like(held_from), -np.ones_like(freed)])
    order = np.lexsort((change, np.concatenate([held_from, freed])))
    return int(np.cumsum(change[order]).max(initial=0))
