"""Times of the parts of computations that take turns: shares of the time of their stage, or of the host's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.schedule.columns import HOST_QUEUE, NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import KIND_CODE, KINDS, PART_KINDS, OpKind
from pipeproof.specs.exact_times import GRID_US
from pipeproof.stages.describe.op_work import Phase

_ZERO = Fraction(0)


def takes_turns(graph: OpGraph) -> BoolColumn:
    """Mask of the computations that have parts."""
    mask = np.zeros(graph.num_ops, dtype=bool)
    parents = graph.parent[graph.is_kind(PART_KINDS)]
    mask[parents[parents != NONE]] = True
    return mask


def exchanges_of_pairs(graph: OpGraph) -> IntColumn:
    """The collectives of computations that take turns that are on a queue of their own."""
    return np.flatnonzero((graph.part_before != NONE) & (graph.queue > HOST_QUEUE))


def part_ticks(
    lowered: LoweredPlan, own_us: Callable[[int], Fraction], ticks_per_us: int
) -> tuple[IntColumn, Sequence[int]]:
    """(parts, their ticks); ``own_us`` is the time of a computation without its collectives.

    WEIGHTS take the time of the weight gradients of the PARTs since the last WEIGHTS.
    """
    graph = lowered.graph
    rows = np.flatnonzero(graph.is_kind(PART_KINDS) & (graph.parent != NONE))
    rows = rows[np.argsort(graph.parent[rows], kind="stable")]
    parent, is_part = graph.parent[rows], graph.kind[rows] == KIND_CODE[OpKind.PART]
    begins = np.flatnonzero(np.diff(parent, prepend=NONE))
    first = np.repeat(begins, np.diff(np.append(begins, len(rows))))
    counted = np.concatenate([[0], np.cumsum(is_part)])
    end = counted[1:] - counted[first]
    last_weights = np.maximum.accumulate(np.where(is_part, NONE, np.arange(len(rows))))
    last_weights = np.concatenate([[NONE], last_weights[:-1]])
    begin = np.where(is_part, end - 1, np.where(last_weights >= first, end[last_weights], 0))
    ticks = np.zeros(len(rows), dtype=object)
    _, examples, number = np.unique(
        packed(graph.kind[parent], graph.stage[parent]), return_index=True, return_inverse=True
    )
    for place, example in enumerate(parent[examples].tolist()):
        selected = number == place
        for ends, chosen in zip(_ends(lowered, example, own_us(example)), (is_part, ~is_part), strict=True):
            of_kind = np.flatnonzero(selected & chosen)
            at = np.array([int(time * ticks_per_us) for time in (_ZERO, *ends)], dtype=object)
            stop, start = (np.minimum(column[of_kind], len(ends)) for column in (end, begin))
            ticks[of_kind] = at[stop] - at[start]
    return rows, [int(tick) for tick in ticks]


def _ends(lowered: LoweredPlan, op_id: int, own_us: Fraction) -> tuple[list[Fraction], list[Fraction]]:
    """By part, its end from the begin of all of its computation, of PARTs and of WEIGHTS."""
    graph, cost = lowered.graph, lowered.spec.cost
    kind, stage = KINDS[graph.kind[op_id]], int(graph.stage[op_id])
    assert lowered.part_shares is not None, "a plan with parts has their shares"
    parts, weights_us = lowered.part_shares.stages[stage], _ZERO
    if kind is OpKind.BACKWARD:
        weights_us = min(own_us, cost.backward_weight_of(stage) / max(1, graph.num_splits))
    phase = Phase.FORWARD if kind is OpKind.FORWARD else Phase.INPUT
    return (parts[phase].ends(own_us - weights_us, GRID_US), parts[Phase.WEIGHT].ends(weights_us, GRID_US))
