"""Weights of a plan by stage, and the shard of a weight that a rank holds, as ranges of the whole weight."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.comm.op_graph import LoweredPlan
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


def stage_weights(plan: LoweredPlan) -> Iterator[tuple[int, Parameter]]:
    """Yield each weight of a plan with its stage, in the order of stages and layers."""
    for stage in range(len(plan.stages)):
        for layer in plan.layers_of(stage):
            for parameter in layer.parameters:
                yield stage, parameter
