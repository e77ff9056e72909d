"""How long each operation takes, in integer ticks.

All times of a plan are fractions of microseconds. They are scaled by their
common denominator, so that the simulation adds and compares integers and
nothing is ever rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm

import numpy as np

from pipeproof.schedule.derive import packed
from pipeproof.schedule.ops import COMPUTE_KINDS, Op, OpKind
from pipeproof.schedule.optable import NONE, OpGraph
from pipeproof.specs.plan import CostSpec


@dataclass(frozen=True, slots=True)
class Durations:
    """``ticks[op_id]``, at least 0, for every operation of a graph, and the latency of a message between ranks.

    ``beside`` has for the first of two overlapped computations the second: both take ``ticks`` of the first.
    """

    ticks: tuple[int, ...]
    latency_ticks: int
    ticks_per_us: int
    beside: Mapping[int, int] = field(default_factory=dict)


def durations_of(graph: OpGraph, cost: CostSpec) -> Durations:
    """F, B, I and W take what ``cost`` says of their stage, a split its share of that; all else takes no time."""
    share = max(1, graph.num_splits)
    computes = np.flatnonzero(graph.is_kind(COMPUTE_KINDS))
    _, examples, sort = np.unique(
        packed(graph.kind[computes], graph.stage[computes]), return_index=True, return_inverse=True
    )
    by_sort = [compute_us(graph.ops[op_id], cost) / share for op_id in computes[examples].tolist()]
    beside = _overlapped(graph)
    of_pairs = {first: _pair_us(graph.ops[first], graph.ops[second], cost) / share for first, second in beside.items()}
    times = (cost.p2p_latency_us, *by_sort, *of_pairs.values())
    ticks_per_us = lcm(*(time.denominator for time in times))
    table = [0, *(int(time * ticks_per_us) for time in by_sort)]
    place = np.zeros(graph.num_ops, dtype=np.int64)
    place[computes] = sort + 1
    ticks = [table[i] for i in place.tolist()]
    for first, time in of_pairs.items():
        ticks[first] = int(time * ticks_per_us)
    return Durations(tuple(ticks), int(cost.p2p_latency_us * ticks_per_us), ticks_per_us, beside)


def _overlapped(graph: OpGraph) -> dict[int, int]:
    """The second of two computations in one batch, by the first."""
    computes = np.flatnonzero(graph.is_kind(COMPUTE_KINDS) & (graph.batch != NONE))
    first, second = computes[:-1], computes[1:]
    same = (graph.batch[first] == graph.batch[second]) & (graph.rank[first] == graph.rank[second])
    return dict(zip(first[same].tolist(), second[same].tolist(), strict=True))


def _pair_us(first: Op, second: Op, cost: CostSpec) -> Fraction:
    """Time of two computations side by side; that of a forward with less than a whole backward is not given."""
    forward, backward = (first, second) if first.kind is OpKind.FORWARD else (second, first)
    if backward.kind is OpKind.BACKWARD:
        return cost.overlapped_of(forward.stage, backward.stage)
    return compute_us(first, cost) + compute_us(second, cost)


def compute_us(op: Op, cost: CostSpec) -> Fraction:
    """Time of one F, B, I or W; I and W take half of B each where only the whole of B is given."""
    if op.kind is OpKind.FORWARD:
        return cost.forward_of(op.stage)
    if op.kind is OpKind.BACKWARD:
        return cost.backward_of(op.stage)
    if op.kind is OpKind.BACKWARD_INPUT:
        return cost.backward_input_of(op.stage)
    return cost.backward_weight_of(op.stage)
