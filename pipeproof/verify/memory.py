"""How many activations each rank holds at most, from program order alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.optable import IntColumn, OpGraph
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.verify.subject import Subject

_TAKES = frozenset({OpKind.FORWARD})
_GIVES_BACK = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})


@dataclass(frozen=True, slots=True)
class InFlight:
    """The most micro-batches that a rank holds activations of, and what their boundary inputs weigh.

    ``boundary_bytes`` counts what each held micro-batch brought over the
    boundary before its stage, for the first stage the model's activation: a
    lower bound of the memory that needs no times. The simulator counts the
    activations inside stages, and all else.
    """

    rank: int
    peak_activations: int
    boundary_bytes: int


def in_flight(subject: Subject) -> tuple[InFlight, ...]:
    """Per rank: held from the start of F to the end of B (of W, where backward is split)."""
    graph = subject.graph
    inputs = np.array(_input_bytes(subject.plan), dtype=np.int64)
    change = graph.is_kind(_TAKES).astype(np.int64) - graph.is_kind(_GIVES_BACK)
    weight = np.where(change != 0, inputs[np.clip(graph.stage, 0, len(inputs) - 1)], 0)
    counts, weights = (_peaks(graph, column) for column in (change, change * weight))
    return tuple(InFlight(rank, *both) for rank, both in enumerate(zip(counts, weights, strict=True)))


def _peaks(graph: OpGraph, change: IntColumn) -> list[int]:
    """By rank, the most that its changes add up to."""
    held = np.cumsum(change)
    peaks = []
    for start, stop in pairwise(graph.offsets.tolist()):
        before = int(held[start - 1]) if start else 0
        peaks.append(max(int(held[start:stop].max(initial=before)) - before, 0))
    return peaks


def _input_bytes(plan: LoweredPlan) -> list[int]:
    """By stage, the bytes of what the largest micro-batch, or split of one, brings to a rank."""

    def num_bytes(tensors: Sequence[Boundary]) -> int:
        return sum(prod(one.local_shape_at(at_sender=False)) * dtype_bytes(one.dtype) for one in tensors)

    return [num_bytes((plan.boundary,)), *(max(map(num_bytes, edge.variants)) for edge in plan.edges)]
