"""The layers of a plan as a Fleet ``PipelineLayer``, cut where the plan cuts, and their data as Fleet takes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_parallel import PipelineLayer, SharedLayerDesc

from pipeproof.stages.own.model import OwnLayer, OwnModel

Tensor: TypeAlias = paddle.Tensor


class Clock:
    """The step that is running, and how often each layer ran in it."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.step = 0
        self._runs: dict[str, int] = {}

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step = step
        self._runs.clear()

    def next_index(self, layer: str) -> int:
        """The micro-batch that a layer is given now, counted over all data-parallel ranks."""
        index = self._runs.get(layer, 0)
        self._runs[layer] = index + 1
        return self._first + index


class Ran:
    """A layer as Fleet calls it, on a tensor or a tuple as the layer before gave it."""

    def __init__(self, model: OwnModel, layer: OwnLayer, clock: Clock) -> None:
        self._run, self._layer, self._clock = model.run, layer, clock

    def __call__(self, value: Any) -> Any:
        """Run it on its next micro-batch."""
        given = value if isinstance(value, tuple) else (value,)
        clock = self._clock
        outputs = self._run(self._layer, given, step=clock.step, index=clock.next_index(self._layer.name))
        return outputs[0] if len(outputs) == 1 else outputs

    def with_weights(self, shared: Shared, value: Any) -> Any:
        """Run it on the weights that it shares with other layers."""
        for name in self._layer.borrowed:
            self._layer.use(name, shared.weight(name))
        return self(value)


class Inner(nn.Layer):  # type: ignore[misc]
    """A layer with its weights, which is not the last of its stage."""

    def __init__(self, ran: Ran, module: nn.Layer | None) -> None:
        super().__init__()
        self._ran = ran
        if module is not None:
            self.module = module

    def forward(self, value: Any) -> Any:
        """Run it."""
        return self._ran(value)


class InnerEnd(Inner):
    """The last layer of a stage: Fleet's ``seg_method`` cuts behind layers of a class."""


class Shared(nn.Layer):  # type: ignore[misc]
    """The weights of a layer from which others borrow: of Fleet's shared layers each rank has one object.

    Attribute ``weight_I`` is the I-th of them.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = tuple(weights)
        for number, weight in enumerate(weights.values()):
            self.add_parameter(f"weight_{number}", weight)

    def weight(self, name: str) -> Tensor:
        """The rank's own weight of that whole name."""
        found: Tensor = getattr(self, f"weight_{self._names.index(name)}")
        return found

    def forward(self, value: Any) -> Any:
        """Never called: each use has a function of its own."""
        raise AssertionError


class SharedEnd(Shared):
    """The same at the end of a stage."""


def fleet_model(
    model: OwnModel, stages: Sequence[Sequence[str]], mine: Sequence[int], num_chunks: int, topology: Any, clock: Clock
) -> Any:
    """A ``PipelineLayer`` of all layers; Fleet builds those of this rank's stages.

    ``stages`` has the names of each stage's layers, by global stage; ``mine`` are the stages of this rank.
    """
    ends = {names[-1] for names in stages}
    lent = {name for layer in model.layers for name in layer.borrowed}
    owners = {name: layer for layer in model.layers for name in layer.parameters}

    def described(layer: OwnLayer) -> Any:
        ran, is_end = Ran(model, layer, clock), layer.name in ends
        wanted = set(layer.borrowed) or lent & set(layer.parameters)
        if not wanted:
            return (InnerEnd if is_end else Inner)(ran, layer.item.module)
        owner = owners[min(wanted)]
        attributes = [f"weight_{number}" for number, name in enumerate(owner.parameters) if name in lent]
        kind = SharedEnd if is_end else Shared
        return SharedLayerDesc(owner.name, kind, ran.with_weights, attributes, owner.parameters)

    def loss(output: Any, index: Tensor) -> Tensor:
        return model.loss(output if isinstance(output, tuple) else (output,), clock.step, int(index))

    pipeline = PipelineLayer(
        layers=[described(layer) for layer in model.layers],
        topology=topology,
        loss_fn=loss,
        seg_method="layer:End$",
        num_virtual_pipeline_stages=num_chunks if num_chunks > 1 else None,
    )
    here = {name for stage in mine for name in stages[stage]}
    for layer in model.layers:
        if layer.name in here and layer.borrowed:  # Fleet knows only what it shares of it
            for weight in layer.parameters.values():
                pipeline.add_parameter(f"beside_shared_{len(pipeline.parameters())}", weight)
    return pipeline


def micro_batches(model: OwnModel, step: int, first: int, count: int) -> Iterator[tuple[Any, Tensor]]:
    """The micro-batches of a step for the first and the last stage: inputs, and which one it is in place of labels.

    The loss draws its labels by that number, so that they are those that Fleet's order brings to it.
    """
    for index in range(first, first + count):
        inputs = model.inputs(step, index)
        yield inputs[0] if len(inputs) == 1 else inputs, paddle.to_tensor(index)
