"""How long each operation takes, in integer ticks.

All times of a plan are fractions of microseconds. They are scaled by their
common denominator, so that the simulation adds and compares integers and
nothing is ever rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from pipeproof.schedule.ops import COMPUTE_KINDS, Op, OpKind
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.plan import CostSpec


@dataclass(frozen=True, slots=True)
class Durations:
    """``ticks[op_id]`` for every operation of a graph, and the latency of a message between ranks."""

    ticks: tuple[int, ...]
    latency_ticks: int
    ticks_per_us: int


def durations_of(graph: OpGraph, cost: CostSpec) -> Durations:
    """F, B, I and W take what ``cost`` says of their stage; everything else takes no time of its own."""
    by_kind_and_stage = {(op.kind, op.stage): compute_us(op, cost) for op in graph.ops if op.kind in COMPUTE_KINDS}
    times = (cost.p2p_latency_us, *by_kind_and_stage.values())
    ticks_per_us = lcm(*(time.denominator for time in times))
    scaled = {key: int(time * ticks_per_us) for key, time in by_kind_and_stage.items()}
    return Durations(
        ticks=tuple(scaled.get((op.kind, op.stage), 0) for op in graph.ops),
        latency_ticks=int(cost.p2p_latency_us * ticks_per_us),
        ticks_per_us=ticks_per_us,
    )


def compute_us(op: Op, cost: CostSpec) -> Fraction:
    """Time of one F, B, I or W; I and W take half of B each where only the whole of B is given."""
    if op.kind is OpKind.FORWARD:
        return cost.forward_of(op.stage)
    if op.kind is OpKind.BACKWARD:
        return cost.backward_of(op.stage)
    part = cost.backward_input_us if op.kind is OpKind.BACKWARD_INPUT else cost.backward_weight_us
    if part is None:
        return cost.backward_of(op.stage) / 2
    return part[op.stage] if isinstance(part, tuple) else part
