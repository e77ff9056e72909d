"""How many activations each rank holds at most, from program order alone."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pipeproof.schedule.ops import OpKind
from pipeproof.verify.subject import Subject

ITEM_BYTES = {"float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class InFlight:
    """The most micro-batches that a rank holds activations of, and what their boundary inputs weigh.

    ``boundary_bytes`` counts the boundary tensor of each held micro-batch once:
    a lower bound of the memory, which a memory model (not here) would add the
    activations inside the stage to.
    """

    rank: int
    peak_activations: int
    boundary_bytes: int


def in_flight(subject: Subject) -> tuple[InFlight, ...]:
    """Per rank: held from the start of F to the end of B (of W, where backward is split)."""
    numel = prod(subject.plan.boundary.local_shape)
    item_bytes = ITEM_BYTES[subject.plan.boundary.dtype]
    result = []
    for rank in range(subject.graph.num_ranks):
        live = peak = 0
        for op_id in subject.graph.rank_ops(rank):
            kind = subject.graph.ops[op_id].kind
            if kind is OpKind.FORWARD:
                live += 1
                peak = max(peak, live)
            elif kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT):
                live -= 1
        result.append(InFlight(rank, peak, peak * numel * item_bytes))
    return tuple(result)
