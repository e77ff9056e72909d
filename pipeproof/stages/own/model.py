"""Own layers, built: each with its weights by name, and what it borrows; the same in every process of a run."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import paddle

from pipeproof.specs.own_layers import LayersSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.own.codes import cannot_build
from pipeproof.stages.own.description import Item, described_only, items_of, loss_of, trained, untrained
from pipeproof.stages.own.factory import Built, blaming, call_build

Tensor: TypeAlias = paddle.Tensor
Value: TypeAlias = tuple[Tensor, ...]
"""What goes from layer to layer."""


@dataclass(slots=True)
class OwnLayer:
    """One layer. ``parameters`` are its own weights by their whole names, in order.

    ``borrowed`` has the weights of earlier layers that it computes with, by their whole names: the places in the layer
    where they stand, each as (the sublayer, the attribute). ``unshared`` are weights that a layer which Fleet shares
    between stages has there once more, and that this use of it must not need.
    """

    name: str
    item: Item
    parameters: dict[str, Tensor]
    borrowed: dict[str, list[tuple[paddle.nn.Layer, str]]] = field(default_factory=dict)
    unshared: dict[str, Tensor] = field(default_factory=dict)

    def untrained(self) -> dict[str, Tensor]:
        """What it has now beside weights that are trained, by whole names; layers may put other tensors there."""
        return {f"{self.name}.{local}": tensor for local, tensor in untrained(self.item.module).items()}

    def use(self, weight: str, tensor: Tensor) -> None:
        """Compute with a tensor where a borrowed weight stands."""
        for module, attribute in self.borrowed[weight]:
            module._parameters[attribute] = tensor  # noqa: SLF001 - assigning would want a new Parameter

    def own_copy(self, weight: str) -> Tensor:
        """What stands where a borrowed weight does: with the same value, and memory of its own."""
        module, attribute = self.borrowed[weight][0]
        tensor: Tensor = module._parameters[attribute]  # noqa: SLF001
        return tensor


class OwnModel:
    """The built model of a plan: layers in order, what they are fed with, and the loss.

    The global generators of Paddle, numpy and Python are seeded with ``run.seed`` before it is built, and Paddle's
    before each layer runs, from (seed, step, micro-batch, layer): dropout draws the same wherever the layer stands.
    """

    def __init__(self, plan: PlanSpec, names: Sequence[str] | None = None) -> None:
        model = plan.own_layers
        assert model is not None, "asked only of plans with own layers"
        self._plan = plan
        with _default_dtype(plan.run.dtype):
            self._built, items = _build(model, plan.run.seed)
        self._loss = self._built.loss or loss_of(self._built.layers)
        if self._loss is None:
            raise cannot_build(
                "there is no loss function", "return it beside the layers, or give the PipelineLayer one"
            )
        if names is None or len(names) != len(items):
            names = [item.name for item in items]
        self.layers = _with_shared_weights(names, items)

    @property
    def file(self) -> Path:
        """The person's file."""
        return self._built.file

    def run(self, layer: OwnLayer, value: Value, *, step: int, index: int) -> Value:
        """Run one layer on a micro-batch.

        Raises:
            BadPlanError: PP911, the layer raises, or gives something that is no tensor.
        """
        plan = self._plan
        paddle.seed(_key("layer", plan.run.seed, step, index, layer.name) % 2**31)
        with blaming(self.file, f"layer `{layer.name}`"), _default_dtype(plan.run.dtype):
            given = layer.item.call(layer.item.module, value[0] if len(value) == 1 else value)
        outputs = tuple(given) if isinstance(given, tuple | list) else (given,)
        if not outputs or not all(isinstance(one, paddle.Tensor) for one in outputs):
            found = ", ".join(type(one).__name__ for one in outputs) or "nothing"
            raise cannot_build(f"layer `{layer.name}` gave {found}", "give a tensor, or a tuple of tensors")
        return outputs

    def inputs(self, step: int, index: int) -> Value:
        """What the first layer is given of a micro-batch, which is counted over all data-parallel ranks."""
        given, _ = self._data(step, index)
        return _tensors(given)

    def loss(self, output: Value, step: int, index: int) -> Tensor:
        """The loss of a micro-batch from what the last layer gave, a scalar.

        Raises:
            BadPlanError: PP911, the loss function raises, or its result is no scalar with a gradient.
        """
        _, labels = self._data(step, index)
        labels_of = _tensors(labels)
        with blaming(self.file, "the loss function"), _default_dtype(self._plan.run.dtype):
            loss = self._loss(*(value[0] if len(value) == 1 else value for value in (output, labels_of)))
        if not isinstance(loss, paddle.Tensor) or loss.numel().item() != 1 or loss.stop_gradient:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, paddle.Tensor) else type(loss).__name__
            is_constant = isinstance(loss, paddle.Tensor) and loss.stop_gradient
            more = " without a gradient" if is_constant else ""
            raise cannot_build(f"the loss function gave {found}{more}", "give one number that depends on the output")
        return loss.reshape([])

    def scale(self) -> float:
        """What the loss of each micro-batch is multiplied by, so that the step's losses add up to their mean."""
        return 1.0 / (self._plan.topology.dp * self._plan.schedule.num_micro_batches)

    def weights(self) -> dict[str, Tensor]:
        """All weights by name, in the order of the layers."""
        return {name: weight for layer in self.layers for name, weight in layer.parameters.items()}

    def untrained(self) -> dict[str, Tensor]:
        """As ``OwnLayer.untrained``, of all layers."""
        return {name: tensor for layer in self.layers for name, tensor in layer.untrained().items()}

    def _data(self, step: int, index: int) -> tuple[Any, Any]:
        rng = np.random.default_rng(_key("data", self._plan.run.seed, step, index))
        with blaming(self.file, "the data function"):
            pair = self._built.data(step, index, rng)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            message = f"the data function gave {type(pair).__name__} in place of a pair"
            raise cannot_build(message, "return `inputs, labels` as numpy arrays, or tuples of them")
        return pair[0], pair[1]


def digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """The MD5 of each weight's bytes."""
    return {
        name: hashlib.md5(weight.numpy().tobytes(), usedforsecurity=False).hexdigest()
        for name, weight in weights.items()
    }


def _build(model: LayersSpec, seed: int) -> tuple[Built, list[Item]]:
    paddle.seed(seed % 2**31)
    np.random.seed(seed % 2**32)  # which a person's code may draw from
    random.seed(seed)
    with described_only():
        built = call_build(model)
    with blaming(built.file, "building the layers"):
        return built, items_of(built.layers)


def _with_shared_weights(names: Sequence[str], items: Sequence[Item]) -> tuple[OwnLayer, ...]:
    """Layers by name. One that has a tensor of an earlier one gets a copy of itself, so that it can be told apart."""
    owner: dict[int, str] = {}
    seen: set[int] = set()
    layers = []
    for name, item in zip(names, items, strict=True):
        weights = trained(item.module)
        there = {local: owner[id(weight)] for local, weight in weights.items() if id(weight) in owner}
        owner |= {id(weight): f"{name}.{local}" for local, weight in weights.items() if local not in there}
        others = {id(tensor) for tensor in untrained(item.module).values()}
        is_seen, seen = not seen.isdisjoint(others), seen | others
        if there or is_seen:
            item = replace(item, module=copy.deepcopy(item.module))
            weights = trained(item.module)
        layer = OwnLayer(name, item, {f"{name}.{local}": w for local, w in weights.items() if local not in there})
        for local, whole in there.items():
            if item.shared is not None and local not in item.shared:
                layer.unshared[local] = weights[local]
                continue
            path, _, attribute = local.rpartition(".")
            assert item.module is not None
            module = dict(item.module.named_sublayers(include_self=True))[path]
            layer.borrowed.setdefault(whole, []).append((module, attribute))
        layers.append(layer)
    return tuple(layers)


def _tensors(given: Any) -> Value:
    arrays = given if isinstance(given, tuple | list) else (given,)
    return tuple(paddle.to_tensor(np.ascontiguousarray(array)) for array in arrays)


def _key(purpose: str, *key: int | str) -> int:
    text = "/".join(["pipeproof", "own", purpose, *map(str, key)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


@contextmanager
def _default_dtype(dtype: str) -> Iterator[None]:
    """The type in which Paddle makes new tensors, for as long as a person's code runs."""
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(before)
