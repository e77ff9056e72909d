"""Boundary tensors of each edge between stages: the activation of the layers, or the tensors that a plan declares."""

from __future__ import annotations

from itertools import chain

from pipeproof.specs.axis_layout import INVARIANT, REPLICATED, Placement, sharded
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.transport import SHARDED_DIM, BoundarySpec, is_float
from pipeproof.stages.describe.boundary import Boundary, Edge, MicroBatchSize, activation, shape_of, work_item_sizes
from pipeproof.stages.describe.mtp_streams import mtp_streams_after
from pipeproof.stages.describe.partition import gpt_stages
from pipeproof.stages.describe.residual_streams import width_after


def gpt_edges(plan: PlanSpec) -> tuple[Edge, ...]:
    """The boundary tensors of each edge of the plan. Edge e is between stages e and e + 1."""
    sizes, by_work_item = work_item_sizes(plan)
    edges = []
    for edge, (width, num_streams) in enumerate(zip(_widths(plan), _num_mtp_streams(plan), strict=True)):
        edge_sizes = [size.with_mtp_streams(num_streams) for size in sizes]
        derived = tuple((activation(plan, size, width),) for size in edge_sizes)
        entries = [entry for entry in plan.boundaries if entry.edge in (None, edge)]
        declared = (tuple(_declared(plan, entry, size, width) for entry in entries) for size in edge_sizes)
        edges.append(Edge(tuple(declared) if entries else derived, by_work_item))
    return tuple(edges)


def _widths(plan: PlanSpec) -> list[int]:
    """Elements per token, by edge: with hyper-connections there are several residual streams between blocks."""
    if plan.gpt.hyper_connections is None:
        return [plan.gpt.hidden_size] * (plan.num_stages - 1)
    stages = gpt_stages(plan)
    return [width_after(plan.gpt, list(chain.from_iterable(stages[: edge + 1]))) for edge in range(len(stages) - 1)]


def _num_mtp_streams(plan: PlanSpec) -> list[int]:
    """The number of MTP streams, joined along the rows, by edge."""
    if plan.gpt.mtp is None:
        return [1] * (plan.num_stages - 1)
    stages = gpt_stages(plan)
    return [mtp_streams_after(plan.gpt, chain.from_iterable(stages[: edge + 1])) for edge in range(len(stages) - 1)]


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
        return INVARIANT  # with one rank all layouts are equal
    match = SHARDED_DIM.fullmatch(text)
    if match is not None:
        return sharded(dims.index(match[1]))
    return INVARIANT if text == "invariant" else REPLICATED
