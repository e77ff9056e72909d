"""The families of models, a GPT and custom layers, and everything of a description that differs between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

from pipeproof.specs.axis_layout import INVARIANT, REPLICATED, Placement, sharded
from pipeproof.specs.custom_layers import CustomModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.transport import SHARDED_DIM, BoundarySpec, is_float
from pipeproof.stages.describe.boundary import (
    Boundary,
    Edge,
    MicroBatchSize,
    activation,
    gpt_boundary,
    shape_of,
    work_item_sizes,
)
from pipeproof.stages.describe.derive_types import TypedLayer
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.describe.layers.layer_operations import width_after
from pipeproof.stages.describe.mtp_streams import mtp_streams_after
from pipeproof.stages.describe.partition import custom_stages, gpt_stages
from pipeproof.stages.describe.stage_memory import Lifetime, StoredActivation, gpt_activations, gpt_input_lifetime
from pipeproof.stages.describe.typed_gpt import typed_gpt

# Boundary tensors of each edge between stages: the activation of the layers, or the tensors that a plan declares.


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


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """The description of one family. Each function has the meaning of the function of this module with its name."""

    layers: Callable[[PlanSpec], tuple[Layer, ...]]
    stage_layers: Callable[[PlanSpec], tuple[tuple[str, ...], ...]]
    boundary: Callable[[PlanSpec], Boundary]
    edges: Callable[[PlanSpec], tuple[Edge, ...]]
    typed_layers: Callable[[PlanSpec, MicroBatchSize | None], Mapping[str, TypedLayer]]
    stored_activations: Callable[[PlanSpec, Sequence[Layer], MicroBatchSize], tuple[StoredActivation, ...]]
    input_lifetime: Callable[[PlanSpec, Sequence[Layer]], Lifetime | None]


GPT = ModelFamily(
    layers=describe_gpt,
    stage_layers=gpt_stages,
    boundary=gpt_boundary,
    edges=gpt_edges,
    typed_layers=typed_gpt,
    stored_activations=gpt_activations,
    input_lifetime=gpt_input_lifetime,
)


def family_of(plan: PlanSpec) -> ModelFamily:
    """The family of a plan's model."""
    return _custom_family() if isinstance(plan.model, CustomModelSpec) else GPT


@cache
def _custom_family() -> ModelFamily:
    from pipeproof.stages.describe import custom_model as custom  # most plans are of a GPT

    return ModelFamily(
        layers=custom.describe_custom_layers,
        stage_layers=custom_stages,
        boundary=custom.custom_boundary,
        edges=lambda plan: custom.custom_edges(plan, custom_stages(plan)),
        typed_layers=lambda plan, _: custom.typed_custom_layers(plan),
        stored_activations=lambda plan, layers, _: custom.custom_activations(plan, [layer.name for layer in layers]),
        input_lifetime=lambda _, __: Lifetime.TO_WEIGHT,
    )


def describe_layers(plan: PlanSpec) -> tuple[Layer, ...]:
    """The layers of a plan's model in execution order."""
    return family_of(plan).layers(plan)


def stage_layers(plan: PlanSpec) -> tuple[tuple[str, ...], ...]:
    """Layer names by global stage: as listed in ``stages``, else an even partition.

    Raises:
        BadPlanAtError: PP110, fewer layers than stages; PP111, ``stages`` names an unknown layer; PP143, the layers
            that ``layer:REGEX`` matches do not divide into the stages.
    """
    return family_of(plan).stage_layers(plan)


def describe_boundary(plan: PlanSpec) -> Boundary:
    """The activation between the layers of a plan's model; of custom layers the smallest output of any."""
    return family_of(plan).boundary(plan)


def describe_boundaries(plan: PlanSpec) -> tuple[Edge, ...]:
    """The boundary tensors of each edge of the plan. Edge e is between stages e and e + 1."""
    return family_of(plan).edges(plan)


def typed_layers(plan: PlanSpec, size: MicroBatchSize | None = None) -> Mapping[str, TypedLayer]:
    """The derived types of every kind of layer by ``layer_kind``, or of every custom layer by name."""
    return family_of(plan).typed_layers(plan, size)


def stored_activations(plan: PlanSpec, layers: Sequence[Layer], size: MicroBatchSize) -> tuple[StoredActivation, ...]:
    """Activations that a stage of these layers stores for a work item of ``size``, added up per operation name."""
    return family_of(plan).stored_activations(plan, layers, size)


def input_lifetime(plan: PlanSpec, layers: Sequence[Layer]) -> Lifetime | None:
    """Lifetime of a stage's input, if the first layer of the stage stores the input itself; else None."""
    return family_of(plan).input_lifetime(plan, layers)
