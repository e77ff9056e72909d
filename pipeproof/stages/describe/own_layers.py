"""Own layers as the plan declares them: what pipeproof describes of a GPT itself, a person says of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.layout import INVARIANT
from pipeproof.specs.own_layers import OutSpec, OwnLayerSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import Boundary, Edge
from pipeproof.stages.describe.derive_types import TypedLayer
from pipeproof.stages.describe.layers import Buffer, Layer, Parameter
from pipeproof.stages.describe.memory import Held, Life
from pipeproof.stages.describe.typed_ops import TypedProgram

_DIMS = "acdefghijklmnopqrstuvwxyz"
"""Names of dims that are not the rows of a micro-batch, in order."""


def describe_own(plan: PlanSpec) -> tuple[Layer, ...]:
    """The declared layers in execution order. They issue no collectives: each rank holds a layer whole."""
    weights: dict[str, Parameter] = {}
    layers = []
    for declared in _declared(plan):
        own = tuple(
            Parameter(f"{declared.name}.{weight.name}", weight.shape, INVARIANT) for weight in declared.parameters
        )
        weights |= {weight.name: weight for weight in own}
        buffers = tuple(
            Buffer(f"{declared.name}.{one.name}", one.shape, one.dtype or plan.run.dtype) for one in declared.buffers
        )
        borrowed = tuple(weights[name] for name in declared.borrows)
        layers.append(Layer(declared.name, own, borrowed=borrowed, buffers=buffers))
    return tuple(layers)


def own_edges(plan: PlanSpec, stages: Sequence[Sequence[str]]) -> tuple[Edge, ...]:
    """What crosses after each stage but the last: what its last layer gives."""
    given = {layer.name: layer.out for layer in _declared(plan)}
    rows = plan.schedule.micro_batch_size
    edges = []
    for names in stages[:-1]:
        out = given[names[-1]] if names else ()
        members = (_boundary(plan, one, rows, str(place) if len(out) > 1 else "") for place, one in enumerate(out))
        edges.append(Edge((tuple(members),)))
    return tuple(edges)


def own_boundary(plan: PlanSpec) -> Boundary:
    """The smallest tensor that any layer gives: at least that much crosses, wherever the model is cut."""
    rows = plan.schedule.micro_batch_size
    tensors = [_boundary(plan, out, rows, "") for layer in _declared(plan) for out in layer.out]
    nothing = Boundary("", (), INVARIANT, plan.run.dtype, 1)
    return min(tensors, key=lambda tensor: prod(tensor.shape) * dtype_bytes(tensor.dtype), default=nothing)


def typed_own(plan: PlanSpec) -> Mapping[str, TypedLayer]:
    """By layer the types of a program over no axis: no collectives, and every gradient complete."""
    nothing = TypedProgram("own", {}, {}, (), (), (), ())
    return {layer.name: TypedLayer(nothing, {}, (), (), (), {}) for layer in _declared(plan)}


def own_activations(plan: PlanSpec, names: Sequence[str]) -> tuple[Held, ...]:
    """What a stage is known to keep of a micro-batch: the input of each layer, to the end of W.

    What layers keep inside is not declared, so this is less than they hold.
    """
    rows, layers = plan.schedule.micro_batch_size, _declared(plan)
    given = {after.name: before.out for before, after in pairwise(layers)}
    total = 0
    for name in names:
        for out in given.get(name, ()):
            total += prod(out.sizes(rows)) * dtype_bytes(out.dtype or plan.run.dtype)
    return (Held("inputs of layers", Life.TO_WEIGHT, Fraction(total)),) if total else ()


def _boundary(plan: PlanSpec, out: OutSpec, rows: int, member: str) -> Boundary:
    others = iter(_DIMS)
    dims = "".join("b" if size == "b" and place == 0 else next(others) for place, size in enumerate(out.shape))
    dtype = out.dtype or plan.run.dtype
    return Boundary(dims, out.sizes(rows), INVARIANT, dtype, 1, member, has_gradient=out.has_gradient)


def _declared(plan: PlanSpec) -> tuple[OwnLayerSpec, ...]:
    assert plan.own_layers is not None, "asked only of plans with own layers"
    return plan.own_layers.layers
