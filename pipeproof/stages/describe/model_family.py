"""The description of a plan's model, which is a GPT or custom layers as the plan declares them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain, pairwise
from math import prod

from pipeproof.specs.axis_layout import INVARIANT, REPLICATED, Placement, dtype_bytes, sharded
from pipeproof.specs.custom_layers import LayerOutputSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.transport import SHARDED_DIM, BoundarySpec, is_float
from pipeproof.stages.describe.boundary import (
    Boundary,
    DirectEdge,
    Edge,
    MicroBatchSize,
    activation,
    gpt_boundary,
    shape_of,
    work_item_sizes,
)
from pipeproof.stages.describe.derive_types import TypedLayer
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import Layer, Parameter
from pipeproof.stages.describe.layers.layer_operations import width_after
from pipeproof.stages.describe.mtp_streams import mtp_streams_after
from pipeproof.stages.describe.partition import custom_stages, gpt_stages
from pipeproof.stages.describe.stage_memory import (
    Lifetime,
    StoredActivation,
    gpt_activations,
    gpt_input_lifetime,
    memory_dtype,
)
from pipeproof.stages.describe.typed_gpt import typed_gpt
from pipeproof.stages.describe.typed_ops import TypedProgram

_DIMS = "acdefghijklmnopqrstuvwxyz"
"""Names of dims other than the rows of a micro-batch, in order."""


def describe_layers(plan: PlanSpec) -> tuple[Layer, ...]:
    """The layers of a plan's model in execution order."""
    return tuple(_custom_layers(plan)) if plan.is_custom else describe_gpt(plan)


def stage_layers(plan: PlanSpec) -> tuple[tuple[str, ...], ...]:
    """Layer names by global stage: as listed in ``stages``, else an even partition.

    Raises:
        BadPlanAtError: PP110, fewer layers than stages; PP111, ``stages`` names an unknown layer; PP143, the layers
            that ``layer:REGEX`` matches do not divide into the stages.
    """
    return custom_stages(plan) if plan.is_custom else gpt_stages(plan)


def describe_boundary(plan: PlanSpec) -> Boundary:
    """The activation between the layers of a plan's model.

    For custom layers it is the smallest output of any layer: a lower bound of the boundary for any partition.
    """
    if not plan.is_custom:
        return gpt_boundary(plan)
    shortest = min(plan.schedule.seq_lengths or (1,))
    tensors = [_custom_boundary(plan, out, "", shortest) for layer in plan.custom.layers for out in layer.out]
    nothing = Boundary("", (), INVARIANT, plan.run.dtype, 1)
    return min(tensors, key=lambda tensor: prod(tensor.shape) * dtype_bytes(tensor.dtype), default=nothing)


def describe_boundaries(plan: PlanSpec) -> tuple[Edge, ...]:
    """The boundary tensors of each edge of the plan. Edge e is between stages e and e + 1."""
    return tuple(_custom_edges(plan) if plan.is_custom else _gpt_edges(plan))


def typed_layers(plan: PlanSpec, size: MicroBatchSize | None = None) -> Mapping[str, TypedLayer]:
    """The derived types of every kind of layer by ``layer_kind``, or of every custom layer by name.

    Custom layers have no collectives, and all their gradients are complete.
    """
    if not plan.is_custom:
        return typed_gpt(plan, size)
    nothing = TypedProgram("own", {}, {}, (), (), (), ())
    return {layer.name: TypedLayer(nothing, {}, (), (), (), {}) for layer in plan.custom.layers}


def stored_activations(plan: PlanSpec, layers: Sequence[Layer], size: MicroBatchSize) -> tuple[StoredActivation, ...]:
    """Activations that a stage of these layers stores for a work item of ``size``, added up per operation name.

    Custom layers store the measured activations of the longest micro-batch until the end of W. For a layer without
    measured activations its input is counted: a lower bound.
    """
    if not plan.is_custom:
        return gpt_activations(plan, layers, size)
    rows, declared, longest = plan.schedule.micro_batch_size, plan.custom.layers, max(plan.schedule.seq_lengths or (1,))
    inputs = {after.name: before.out for before, after in pairwise(declared)}
    names = {layer.name for layer in layers}
    total = 0
    for layer in declared:
        if layer.name not in names:
            continue
        if layer.activation_bytes is not None:
            total += layer.activation_bytes
            continue
        for out in inputs.get(layer.name, ()):
            total += prod(out.sizes(rows, longest)) * dtype_bytes(out.dtype or plan.run.dtype)
    return (StoredActivation("activations of layers", Lifetime.TO_WEIGHT, Fraction(total)),) if total else ()


def frozen_bytes(plan: PlanSpec, names: Sequence[str]) -> int:
    """Bytes of the declared weights of frozen custom layers."""
    layers = (layer for layer in plan.custom.layers if layer.name in names)
    return sum(prod(weight.shape) for layer in layers for weight in layer.parameters) * dtype_bytes(memory_dtype(plan))


def input_lifetime(plan: PlanSpec, layers: Sequence[Layer]) -> Lifetime | None:
    """Lifetime of a stage's input, if the first layer of the stage stores the input itself; else None."""
    return Lifetime.TO_WEIGHT if plan.is_custom else gpt_input_lifetime(plan, layers)


def _gpt_edges(plan: PlanSpec) -> Iterator[Edge]:
    sizes, by_work_item = work_item_sizes(plan)
    for edge, (width, num_streams) in enumerate(zip(_widths(plan), _num_mtp_streams(plan), strict=True)):
        edge_sizes = [size.with_mtp_streams(num_streams) for size in sizes]
        derived = tuple((activation(plan, size, width),) for size in edge_sizes)
        entries = [entry for entry in plan.boundaries if entry.edge in (None, edge)]
        declared = (tuple(_declared(plan, entry, size, width) for entry in entries) for size in edge_sizes)
        yield Edge(tuple(declared) if entries else derived, by_work_item)


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


def _custom_layers(plan: PlanSpec) -> Iterator[Layer]:
    """Declared layers issue no collectives: each rank holds a whole layer. Frozen weights have no gradients."""
    weights: dict[str, Parameter] = {}
    stages = custom_stages(plan) if plan.frozen_stages else ()
    frozen = {name for stage in plan.frozen_stages for name in stages[stage]}
    for declared in plan.custom.layers:
        parameters = tuple(
            Parameter(f"{declared.name}.{weight.name}", weight.shape, INVARIANT)
            for weight in (() if declared.name in frozen else declared.parameters)
        )
        weights |= {weight.name: weight for weight in parameters}
        borrowed = tuple(weights[name] for name in declared.borrows)
        yield Layer(declared.name, parameters, borrowed=borrowed)


def _custom_edges(plan: PlanSpec) -> Iterator[Edge]:
    """The outputs of the last layer of each stage but the last, then the tensors of ``edges`` that it passes on."""
    outputs = {layer.name: layer.out for layer in plan.custom.layers}
    sizes, by_work_item = work_item_sizes(plan)
    stages = custom_stages(plan)
    stage_of = {name: stage for stage, names in enumerate(stages) for name in names}
    for stage, names in enumerate(stages[:-1]):
        out = outputs[names[-1]] if names else ()
        members: list[tuple[LayerOutputSpec, str]] = [
            (spec, str(number) if len(out) > 1 else "") for number, spec in enumerate(out)
        ]
        members += [
            (edge, edge.name)
            for edge in plan.edges
            if edge.route == "relay"
            and stage_of[edge.producer] <= stage < max(stage_of[name] for name in edge.consumers)
        ]
        made_in = {edge.name: stage_of[edge.producer] for edge in plan.edges}
        variants = (
            tuple(_custom_boundary(plan, out, name, size.seq_length, made_in.get(name, stage)) for out, name in members)
            for size in sizes
        )
        yield Edge(tuple(variants), by_work_item)


def direct_edges(plan: PlanSpec) -> tuple[DirectEdge, ...]:
    """The edges of custom layers that are sent past the stages between, without edges within a stage."""
    stage_of = {name: stage for stage, names in enumerate(stage_layers(plan)) for name in names} if plan.edges else {}
    edges = []
    for edge in plan.edges:
        users = sorted({stage_of[name] for name in edge.consumers} - {stage_of[edge.producer]})
        if edge.route == "direct" and users:
            made = stage_of[edge.producer]
            variants = (
                _custom_boundary(plan, edge, edge.name, size.seq_length, made) for size in work_item_sizes(plan)[0]
            )
            edges.append(DirectEdge(edge.name, made, tuple(users), tuple(variants)))
    return tuple(edges)


def _custom_boundary(
    plan: PlanSpec, out: LayerOutputSpec, member: str, seq_length: int, stage: int | None = None
) -> Boundary:
    """The tensor of an output that ``stage`` makes; frozen stages without trained ones before them get no gradient."""
    names = iter(_DIMS)
    dims = "".join("b" if size == "b" and index == 0 else next(names) for index, size in enumerate(out.shape))
    dtype = out.dtype or plan.run.dtype
    return Boundary(
        dims,
        out.sizes(plan.schedule.micro_batch_size, seq_length),
        INVARIANT,
        dtype,
        1,
        member,
        has_gradient=out.has_gradient and (stage is None or stage >= plan.first_trained),
    )
