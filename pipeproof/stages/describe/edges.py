"""What crosses each edge between stages: the activation as its layers make it there, or what a plan declares."""

from __future__ import annotations

from itertools import chain

from pipeproof.specs.boundary_checks import CUT, is_float
from pipeproof.specs.layout import INVARIANT, REPLICATED, Placement, sharded
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.transport import BoundarySpec
from pipeproof.stages.describe.boundary import Boundary, Edge, MicroBatchSize, activation, shape_of, unit_sizes
from pipeproof.stages.describe.lanes import lanes_after
from pipeproof.stages.describe.own_layers import own_edges
from pipeproof.stages.describe.partition import stage_layers
from pipeproof.stages.describe.streams import width_after


def describe_boundaries(plan: PlanSpec) -> tuple[Edge, ...]:
    """What crosses each edge of the plan: edge e lies between stages e and e + 1."""
    if plan.own_layers is not None:
        return own_edges(plan, stage_layers(plan))
    sizes, by_unit = unit_sizes(plan)
    edges = []
    for edge, (width, num_lanes) in enumerate(zip(_widths(plan), _lanes(plan), strict=True)):
        of_lanes = [size.of_lanes(num_lanes) for size in sizes]
        own = tuple((activation(plan, size, width),) for size in of_lanes)
        entries = [entry for entry in plan.boundaries if entry.edge in (None, edge)]
        declared = (tuple(_declared(plan, entry, size, width) for entry in entries) for size in of_lanes)
        edges.append(Edge(tuple(declared) if entries else own, by_unit))
    return tuple(edges)


def _widths(plan: PlanSpec) -> list[int]:
    """By edge, the elements of a token: with hyper-connections there are several streams between blocks."""
    if plan.model.hyper_connections is None:
        return [plan.model.hidden_size] * (plan.num_stages - 1)
    stages = stage_layers(plan)
    return [width_after(plan.model, list(chain.from_iterable(stages[: edge + 1]))) for edge in range(len(stages) - 1)]


def _lanes(plan: PlanSpec) -> list[int]:
    """By edge, how many activations stand one behind the other along the rows: with multi-token prediction several."""
    if plan.model.mtp is None:
        return [1] * (plan.num_stages - 1)
    stages = stage_layers(plan)
    return [lanes_after(plan.model, chain.from_iterable(stages[: edge + 1])) for edge in range(len(stages) - 1)]


def _declared(plan: PlanSpec, entry: BoundarySpec, size: MicroBatchSize, width: int) -> Boundary:
    dtype = entry.dtype or plan.run.dtype
    return Boundary(
        entry.dims,
        entry.shape if entry.shape is not None else shape_of(plan, entry.dims, size, width),
        _placement(plan, entry.tp, entry.dims),
        dtype,
        plan.topology.tp,
        entry.name,
        None if entry.receiver_tp is None else _placement(plan, entry.receiver_tp, entry.dims),
        is_float(dtype) if entry.gradient is None else entry.gradient,
    )


def _placement(plan: PlanSpec, text: str, dims: str) -> Placement:
    if plan.topology.tp == 1:
        return INVARIANT  # of one rank all layouts are the same
    match = CUT.fullmatch(text)
    if match is not None:
        return sharded(dims.index(match[1]))
    return INVARIANT if text == "invariant" else REPLICATED
