"""Shard of a weight that a rank holds, as ranges of the whole weight."""

from __future__ import annotations

from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.stages.describe.layer import Parameter


def index_of(plan: LoweredPlan, parameter: Parameter, rank: int) -> tuple[tuple[int, int], ...]:
    """The half-open range of the whole parameter that one rank holds, per dim."""
    index = [(0, size) for size in parameter.shape]
    coords = plan.mesh.coords(rank)
    for axis, placed in (("tp", parameter.tp), ("ep", parameter.ep)):
        if placed.dim is not None:
            share, place = parameter.shape[placed.dim] // plan.mesh.size(axis), coords[axis]
            index[placed.dim] = place * share, (place + 1) * share
    return tuple(index)
