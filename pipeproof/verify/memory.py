"""How many activations each rank holds at most, from program order alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from pipeproof.schedule.ops import OpKind
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.verify.subject import Subject

_TAKES = frozenset({OpKind.FORWARD})
_GIVES_BACK = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})


@dataclass(frozen=True, slots=True)
class InFlight:
    """The most micro-batches that a rank holds activations of, and what their boundary inputs weigh.

    ``boundary_bytes`` counts the boundary tensor of each held micro-batch once:
    a lower bound of the memory that needs no times. The simulator counts the
    activations inside stages, and all else.
    """

    rank: int
    peak_activations: int
    boundary_bytes: int


def in_flight(subject: Subject) -> tuple[InFlight, ...]:
    """Per rank: held from the start of F to the end of B (of W, where backward is split)."""
    graph = subject.graph
    boundary_bytes = prod(subject.plan.boundary.local_shape) * dtype_bytes(subject.plan.boundary.dtype)
    change = graph.is_kind(_TAKES).astype(np.int64) - graph.is_kind(_GIVES_BACK)
    held = np.cumsum(change)
    peaks = []
    for start, stop in pairwise(graph.offsets.tolist()):
        before = int(held[start - 1]) if start else 0
        peaks.append(max(int(held[start:stop].max(initial=before)) - before, 0))
    return tuple(InFlight(rank, peak, peak * boundary_bytes) for rank, peak in enumerate(peaks))
