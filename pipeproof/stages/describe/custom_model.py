"""Custom layers as the plan declares them. For a GPT, pipeproof derives this description itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod

from pipeproof.specs.axis_layout import INVARIANT, dtype_bytes
from pipeproof.specs.custom_layers import CustomLayerSpec, LayerOutputSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import Boundary, Edge, work_item_sizes
from pipeproof.stages.describe.derive_types import TypedLayer
from pipeproof.stages.describe.layer import Layer, Parameter
from pipeproof.stages.describe.stage_memory import Lifetime, StoredActivation
from pipeproof.stages.describe.typed_ops import TypedProgram

_DIMS = "acdefghijklmnopqrstuvwxyz"
"""Names of dims other than the rows of a micro-batch, in order."""


def describe_custom_layers(plan: PlanSpec) -> tuple[Layer, ...]:
    """The declared layers in execution order. They issue no collectives: each rank holds a whole layer."""
    weights: dict[str, Parameter] = {}
    layers = []
    for declared in _declared(plan):
        parameters = tuple(
            Parameter(f"{declared.name}.{weight.name}", weight.shape, INVARIANT) for weight in declared.parameters
        )
        weights |= {weight.name: weight for weight in parameters}
        borrowed = tuple(weights[name] for name in declared.borrows)
        layers.append(Layer(declared.name, parameters, borrowed=borrowed))
    return tuple(layers)


def custom_edges(plan: PlanSpec, stages: Sequence[Sequence[str]]) -> tuple[Edge, ...]:
    """The boundary after each stage except the last: the outputs of the stage's last layer."""
    outputs = {layer.name: layer.out for layer in _declared(plan)}
    sizes, by_work_item = work_item_sizes(plan)
    edges = []
    for names in stages[:-1]:
        out = outputs[names[-1]] if names else ()
        variants = (
            tuple(_boundary(plan, spec, size.seq_length, str(i) if len(out) > 1 else "") for i, spec in enumerate(out))
            for size in sizes
        )
        edges.append(Edge(tuple(variants), by_work_item))
    return tuple(edges)


def custom_boundary(plan: PlanSpec) -> Boundary:
    """The smallest output of any layer: a lower bound of the boundary for any partition."""
    shortest = min(plan.schedule.seq_lengths or (1,))
    tensors = [_boundary(plan, out, shortest, "") for layer in _declared(plan) for out in layer.out]
    nothing = Boundary("", (), INVARIANT, plan.run.dtype, 1)
    return min(tensors, key=lambda tensor: prod(tensor.shape) * dtype_bytes(tensor.dtype), default=nothing)


def typed_custom_layers(plan: PlanSpec) -> Mapping[str, TypedLayer]:
    """Types by layer of a program without mesh axes: no collectives, and every gradient is complete."""
    nothing = TypedProgram("own", {}, {}, (), (), (), ())
    return {layer.name: TypedLayer(nothing, {}, (), (), (), {}) for layer in _declared(plan)}


def custom_activations(plan: PlanSpec, names: Sequence[str]) -> tuple[StoredActivation, ...]:
    """The known activations of a micro-batch on a stage, to the end of W: the measured ones, or the layer's input.

    Without measured ones this is a lower bound. Of micro-batches that differ in length, it is the longest.
    """
    rows, layers, longest = plan.schedule.micro_batch_size, _declared(plan), max(plan.schedule.seq_lengths or (1,))
    inputs = {after.name: before.out for before, after in pairwise(layers)}
    total = 0
    for layer in layers:
        if layer.name not in names:
            continue
        if layer.activation_bytes is not None:
            total += layer.activation_bytes
            continue
        for out in inputs.get(layer.name, ()):
            total += prod(out.sizes(rows, longest)) * dtype_bytes(out.dtype or plan.run.dtype)
    return (StoredActivation("activations of layers", Lifetime.TO_WEIGHT, Fraction(total)),) if total else ()


def _boundary(plan: PlanSpec, out: LayerOutputSpec, seq_length: int, member: str) -> Boundary:
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
        has_gradient=out.has_gradient,
    )


def _declared(plan: PlanSpec) -> tuple[CustomLayerSpec, ...]:
    return plan.custom.layers
