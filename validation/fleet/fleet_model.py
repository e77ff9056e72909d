"""A plan's layers as a Fleet ``PipelineLayer`` with the plan's stages; their data, Fleet's settings and its hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import paddle
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import PipelineLayer, SharedLayerDesc
from paddle.distributed.fleet.meta_parallel.pipeline_parallel import PipelineParallelMicroStepLocations as At

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.custom.built_layers import BuiltLayer, BuiltModel
from validation.fleet.fleet_order import EventRecorder

Tensor: TypeAlias = paddle.Tensor


class StepClock:
    """Current step, and how often each layer ran in it."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.step = 0
        self._runs: dict[str, int] = {}

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.step = step
        self._runs.clear()

    def next_index(self, layer: str) -> int:
        """Index of the micro-batch that a layer is given now, counted over all data-parallel ranks."""
        index = self._runs.get(layer, 0)
        self._runs[layer] = index + 1
        return self._first + index


class LayerFunction:
    """A layer as Fleet calls it: on the tensor, or the tuple, that the previous layer returned."""

    def __init__(self, model: BuiltModel, layer: BuiltLayer, clock: StepClock) -> None:
        self._run, self._layer, self._clock = model.run, layer, clock

    def __call__(self, value: Any) -> Any:
        """Run the layer on its next micro-batch."""
        inputs = value if isinstance(value, tuple) else (value,)
        clock = self._clock
        outputs = self._run(self._layer, inputs, step=clock.step, index=clock.next_index(self._layer.name))
        return outputs[0] if len(outputs) == 1 else outputs

    def with_weights(self, shared: SharedWeights, value: Any) -> Any:
        """Run the layer on the weights that it shares with other layers."""
        for name in self._layer.borrowed:
            self._layer.use(name, shared.weight(name))
        return self(value)


class InnerLayer(nn.Layer):  # type: ignore[misc]
    """A layer with its weights that is not the last of its stage."""

    def __init__(self, function: LayerFunction, module: nn.Layer | None) -> None:
        super().__init__()
        self._function = function
        if module is not None:
            self.module = module

    def forward(self, value: Any) -> Any:
        """Run the layer."""
        return self._function(value)


class InnerLayerEnd(InnerLayer):
    """The last layer of a stage: Fleet's ``seg_method`` ends stages at layers of a class."""


class SharedWeights(nn.Layer):  # type: ignore[misc]
    """Weights of a layer that others borrow: each rank has one object for each of Fleet's shared layers.

    Attribute ``weight_I`` is the I-th weight.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = tuple(weights)
        for number, weight in enumerate(weights.values()):
            self.add_parameter(f"weight_{number}", weight)

    def weight(self, name: str) -> Tensor:
        """Return the rank's weight by its full name."""
        weight: Tensor = getattr(self, f"weight_{self._names.index(name)}")
        return weight

    def forward(self, value: Any) -> Any:
        """Raise: each use of the weights has its own function."""
        raise AssertionError


class SharedWeightsEnd(SharedWeights):
    """Shared weights at the end of a stage."""


def fleet_model(
    model: BuiltModel,
    stages: Sequence[Sequence[str]],
    rank_stages: Sequence[int],
    num_chunks: int,
    topology: Any,
    clock: StepClock,
) -> Any:
    """Return a ``PipelineLayer`` of all layers, of which Fleet builds those of this rank's stages.

    ``stages`` has the names of each stage's layers, by global stage; ``rank_stages`` are the stages of this rank.
    """
    ends = {names[-1] for names in stages}
    lent = {name for layer in model.layers for name in layer.borrowed}
    owners = {name: layer for layer in model.layers for name in layer.parameters}

    def described(layer: BuiltLayer) -> Any:
        function, is_end = LayerFunction(model, layer, clock), layer.name in ends
        shared = set(layer.borrowed) or lent & set(layer.parameters)
        if not shared:
            return (InnerLayerEnd if is_end else InnerLayer)(function, layer.entry.module)
        owner = owners[min(shared)]
        attributes = [f"weight_{number}" for number, name in enumerate(owner.parameters) if name in lent]
        kind = SharedWeightsEnd if is_end else SharedWeights
        return SharedLayerDesc(owner.name, kind, function.with_weights, attributes, owner.parameters)

    def loss(output: Any, index: Tensor) -> Tensor:
        return model.loss(output if isinstance(output, tuple) else (output,), clock.step, int(index))

    pipeline = PipelineLayer(
        layers=[described(layer) for layer in model.layers],
        topology=topology,
        loss_fn=loss,
        seg_method="layer:End$",
        num_virtual_pipeline_stages=num_chunks if num_chunks > 1 else None,
    )
    rank_layers = {name for stage in rank_stages for name in stages[stage]}
    for layer in model.layers:
        if layer.name in rank_layers and layer.borrowed:  # Fleet knows only the weights that the layer shares
            for weight in layer.parameters.values():
                pipeline.add_parameter(f"not_shared_{len(pipeline.parameters())}", weight)
    return pipeline


def micro_batches(model: BuiltModel, step: int, first: int, count: int) -> Iterator[tuple[Any, Tensor]]:
    """Yield a step's micro-batches for the first and last stage: inputs, and the index of the batch in place of labels.

    The loss draws its labels by that index, so that the labels follow Fleet's order.
    """
    for index in range(first, first + count):
        inputs = model.inputs(step, index)
        yield inputs[0] if len(inputs) == 1 else inputs, paddle.to_tensor(index)


def strategy_of(spec: PlanSpec) -> Any:
    """``DistributedStrategy`` of a plan; other settings keep Fleet's defaults."""
    strategy = fleet.DistributedStrategy()
    degrees = {"pp_degree": spec.topology.pp, "dp_degree": spec.topology.dp, "mp_degree": 1}
    order = list(strategy.hybrid_parallel_order)  # slowest first; a plan's is fastest first
    order.sort(key=lambda axis: -spec.topology.order.index(axis) if axis in ("pp", "dp") else 0)
    strategy.hybrid_configs = {
        **degrees,
        "order": order,
        "pp_configs": {"best_unbalanced_scheduler": _is_balanced(spec)},
    }
    strategy.pipeline_configs = {
        "micro_batch_size": spec.schedule.micro_batch_size,
        "accumulate_steps": spec.schedule.num_micro_batches,
    }
    return strategy


def _is_balanced(spec: PlanSpec) -> bool:
    return spec.schedule.variant == "fleet_balanced"


def hook_into(model: Any, recorder: EventRecorder) -> Callable[[], int]:
    """Register Fleet's callbacks with the recorder; return a function for the current virtual stage of the model."""
    model.register_hook(At.FORWARD_BEGIN, recorder.forward_begins)
    model.register_hook(At.FORWARD_END, recorder.forward_ends)
    model.register_hook(At.BACKWARD_BEGIN, recorder.backward_begins)
    model.register_hook(At.BACKWARD_END, recorder.backward_ends)
    return lambda: int(getattr(model, "_virtual_pp_rank", 0) or 0)
