"""Built custom layers: each with its weights by name, and the weights that it borrows. Every process has the same."""

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

from pipeproof.specs.custom_layers import CustomModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.custom.build_function import (
    Built,
    LayerEntry,
    call_build,
    described_only,
    layer_entries,
    pipeline_loss,
    trained,
    untrained,
    user_code_errors,
)
from pipeproof.stages.custom.custom_codes import cannot_build

Tensor: TypeAlias = paddle.Tensor
Value: TypeAlias = tuple[Tensor, ...]
"""The tensors between two layers."""


@dataclass(slots=True)
class BuiltLayer:
    """One layer. ``parameters`` are its own weights by their whole names, in order.

    ``borrowed`` has the weights of earlier layers that it uses, by their whole names, with their locations in the layer
    as (sublayer, attribute). ``unshared`` are weights of a layer that Fleet shares between stages, which are not shared
    and which this use of the layer must not need.
    """

    name: str
    entry: LayerEntry
    parameters: dict[str, Tensor]
    borrowed: dict[str, list[tuple[paddle.nn.Layer, str]]] = field(default_factory=dict)
    unshared: dict[str, Tensor] = field(default_factory=dict)

    def untrained(self) -> dict[str, Tensor]:
        """The current tensors of the layer that are not trained weights, by whole names. Layers may replace them."""
        return {f"{self.name}.{local}": tensor for local, tensor in untrained(self.entry.module).items()}

    def use(self, weight: str, tensor: Tensor) -> None:
        """Replace a borrowed weight by a tensor."""
        for module, attribute in self.borrowed[weight]:
            module._parameters[attribute] = tensor  # noqa: SLF001 - assignment would require a new Parameter

    def separate_copy(self, weight: str) -> Tensor:
        """The tensor in the place of a borrowed weight: the same value in separate memory."""
        module, attribute = self.borrowed[weight][0]
        tensor: Tensor = module._parameters[attribute]  # noqa: SLF001
        return tensor


class BuiltModel:
    """The built model of a plan: layers in order, their input data, and the loss.

    The global generators of Paddle, numpy and Python are seeded with ``run.seed`` before the build. Paddle's generator
    is also seeded before each layer runs, with (seed, step, micro-batch, layer), so dropout does not depend on the
    layer's stage.
    """

    def __init__(self, plan: PlanSpec, names: Sequence[str] | None = None) -> None:
        self._plan = plan
        with _default_dtype(plan.run.dtype):
            self._built, entries = _build(plan.custom, plan.run.seed)
        self._loss = self._built.loss or pipeline_loss(self._built.layers)
        if self._loss is None:
            raise cannot_build(
                "there is no loss function", "return one with the layers, or pass one to the PipelineLayer"
            )
        if names is None or len(names) != len(entries):
            names = [entry.name for entry in entries]
        self.layers = _with_shared_weights(names, entries)

    @property
    def file(self) -> Path:
        """The user's file."""
        return self._built.file

    def run(self, layer: BuiltLayer, value: Value, *, step: int, index: int) -> Value:
        """Run one layer on a micro-batch.

        Raises:
            BadPlanError: PP911, the layer raises, or returns something other than tensors.
        """
        plan = self._plan
        paddle.seed(_key("layer", plan.run.seed, step, index, layer.name) % 2**31)
        with user_code_errors(self.file, f"layer `{layer.name}`"), _default_dtype(plan.run.dtype):
            returned = layer.entry.call(layer.entry.module, value[0] if len(value) == 1 else value)
        outputs = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        if not outputs or not all(isinstance(x, paddle.Tensor) for x in outputs):
            types = ", ".join(type(x).__name__ for x in outputs) or "nothing"
            raise cannot_build(f"layer `{layer.name}` returned {types}", "return a tensor, or a tuple of tensors")
        return outputs

    def inputs(self, step: int, index: int) -> Value:
        """The inputs of the first layer for a micro-batch, counted over all data-parallel ranks."""
        inputs, _ = self._data(step, index)
        return _tensors(inputs)

    def loss(self, output: Value, step: int, index: int) -> Tensor:
        """The loss of a micro-batch from the output of the last layer, a scalar.

        Raises:
            BadPlanError: PP911, the loss function raises, or its result is not a scalar with a gradient.
        """
        _, labels = self._data(step, index)
        labels_of = _tensors(labels)
        with user_code_errors(self.file, "the loss function"), _default_dtype(self._plan.run.dtype):
            loss = self._loss(*(value[0] if len(value) == 1 else value for value in (output, labels_of)))
        if not isinstance(loss, paddle.Tensor) or loss.numel().item() != 1 or loss.stop_gradient:
            is_tensor = isinstance(loss, paddle.Tensor)
            returned = f"a tensor of shape {list(loss.shape)}" if is_tensor else type(loss).__name__
            suffix = " without a gradient" if is_tensor and loss.stop_gradient else ""
            fix = "return one number that depends on the output"
            raise cannot_build(f"the loss function returned {returned}{suffix}", fix)
        return loss.reshape([])

    def scale(self) -> float:
        """The factor of each micro-batch's loss, so that the losses of a step add up to their mean."""
        return 1.0 / (self._plan.topology.dp * self._plan.schedule.num_micro_batches)

    def weights(self) -> dict[str, Tensor]:
        """All weights by name, in the order of the layers."""
        return {name: weight for layer in self.layers for name, weight in layer.parameters.items()}

    def untrained(self) -> dict[str, Tensor]:
        """Counterpart of ``BuiltLayer.untrained``, of all layers."""
        return {name: tensor for layer in self.layers for name, tensor in layer.untrained().items()}

    def _data(self, step: int, index: int) -> tuple[Any, Any]:
        rng = np.random.default_rng(_key("data", self._plan.run.seed, step, index))
        with user_code_errors(self.file, "the data function"):
            pair = self._built.data(step, index, rng)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            message = f"the data function returned {type(pair).__name__} instead of a pair"
            raise cannot_build(message, "return `inputs, labels` as numpy arrays, or tuples of them")
        return pair[0], pair[1]


def digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """The MD5 of each weight's bytes."""
    return {
        name: hashlib.md5(weight.numpy().tobytes(), usedforsecurity=False).hexdigest()
        for name, weight in weights.items()
    }


def _build(model: CustomModelSpec, seed: int) -> tuple[Built, list[LayerEntry]]:
    paddle.seed(seed % 2**31)
    np.random.seed(seed % 2**32)  # user code may draw from it
    random.seed(seed)
    with described_only():
        built = call_build(model)
    with user_code_errors(built.file, "building the layers"):
        return built, layer_entries(built.layers)


def _with_shared_weights(names: Sequence[str], entries: Sequence[LayerEntry]) -> tuple[BuiltLayer, ...]:
    """Layers by name. A layer with a tensor of an earlier layer is copied, so that the two can be distinguished."""
    owner: dict[int, str] = {}
    seen: set[int] = set()
    layers = []
    for name, entry in zip(names, entries, strict=True):
        weights = trained(entry.module)
        shared = {local: owner[id(weight)] for local, weight in weights.items() if id(weight) in owner}
        owner |= {id(weight): f"{name}.{local}" for local, weight in weights.items() if local not in shared}
        other_ids = {id(tensor) for tensor in untrained(entry.module).values()}
        is_seen, seen = not seen.isdisjoint(other_ids), seen | other_ids
        if shared or is_seen:
            entry = replace(entry, module=copy.deepcopy(entry.module))
            weights = trained(entry.module)
        layer = BuiltLayer(name, entry, {f"{name}.{local}": w for local, w in weights.items() if local not in shared})
        for local, whole in shared.items():
            if entry.shared is not None and local not in entry.shared:
                layer.unshared[local] = weights[local]
                continue
            path, _, attribute = local.rpartition(".")
            assert entry.module is not None
            module = dict(entry.module.named_sublayers(include_self=True))[path]
            layer.borrowed.setdefault(whole, []).append((module, attribute))
        layers.append(layer)
    return tuple(layers)


def _tensors(data: Any) -> Value:
    arrays = data if isinstance(data, tuple | list) else (data,)
    return tuple(paddle.to_tensor(np.ascontiguousarray(array)) for array in arrays)


def _key(purpose: str, *key: int | str) -> int:
    text = "/".join(["pipeproof", "own", purpose, *map(str, key)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


@contextmanager
def _default_dtype(dtype: str) -> Iterator[None]:
    """Set Paddle's default dtype while user code runs."""
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(dtype)
    try:
        yield
    finally:
        paddle.set_default_dtype(before)
