"""A stage of custom layers on one rank: consecutive user modules, with plain autograd inside.

Split backwards: autograd must differentiate any module, and a request for the gradients of inputs alone does not split
a backward: Paddle 3.3.1 then leaves out the scale of a LayerNorm (on the CPU). So I runs the whole backward and keeps
the gradients of weights aside, and W adds them. Only products are deferred: each ``nn.Linear`` inside of a layer
bypasses its weight and bias, and W computes their gradients by autograd's own rules (as ``weights`` does for the GPT).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.specs.custom_layers import LayerOutputSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.custom.built_layers import BuiltLayer, BuiltModel, digests
from pipeproof.stages.custom.declaration import require_buffers, require_declared_changes, require_outputs
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.paddle.weights import BorrowedWeight, WeightGradients

Tensor: TypeAlias = paddle.Tensor
Value: TypeAlias = tuple[Tensor, ...]


class CustomStage:
    """The custom layers ``names`` on one rank.

    ``parameters`` has the rank's weights by name. Borrowed weights are included, unless they are in ``lent``, the
    weights of the rank's other stages. ``splits`` is true if the schedule has W for the stage.
    """

    def __init__(
        self, plan: PlanSpec, model: BuiltModel, names: Sequence[str], lent: Mapping[str, Tensor], *, splits: bool
    ) -> None:
        self._plan, self._model = plan, model
        by_name = {layer.name: layer for layer in model.layers}
        self._layers = [by_name[name] for name in names]
        self._as_built = digests({name: x for layer in self._layers for name, x in layer.untrained().items()})
        self._is_first, self._is_last = names[0] == model.layers[0].name, names[-1] == model.layers[-1].name
        self._out: tuple[LayerOutputSpec, ...] = next(
            layer.out for layer in plan.custom.layers if layer.name == names[-1]
        )
        self.parameters: dict[str, Tensor] = {
            name: weight for layer in self._layers for name, weight in layer.parameters.items()
        }
        self._lent: list[BorrowedWeight] = []
        for layer in self._layers:
            self._borrow(layer, lent)
        used = [*self.parameters.values(), *(borrowed.used for borrowed in self._lent)]
        self._step, self._inputs = -1, dict[int, Value]()
        modules = [layer.entry.module for layer in self._layers if layer.entry.module is not None]
        self._split_backward = SplitBackward(modules, used) if splits else None

    def _borrow(self, layer: BuiltLayer, lent: Mapping[str, Tensor]) -> None:
        """Let a layer use the rank's own weight with a separate gradient, or keep the copy that the layer has."""
        for name in layer.borrowed:
            weight = lent.get(name, self.parameters.get(name))
            if weight is None:
                self.parameters[name] = layer.separate_copy(name)
                layer.use(name, self.parameters[name])  # the same tensor everywhere in the layer
            else:
                self._lent.append(BorrowedWeight(weight))
                layer.use(name, self._lent[-1].used)

    def forward(self, inputs: Value, *, step: int, index: int, split: int, watch: LayerWatch | None) -> Value:
        """Run one micro-batch. ``backward_input`` takes the result and finds the inputs by it.

        Raises:
            BadPlanError: PP911, a layer fails; PP912, the output of the last layer differs from its declaration.
        """
        value = self._model.inputs(step, index) if self._is_first else inputs
        for number, layer in enumerate(self._layers):
            if watch is not None and (number or not self._is_first):
                watch.see(layer.name, "input", index, split, value[:1])
            value = self._model.run(layer, value, step=step, index=index)
            is_output = self._is_last and layer is self._layers[-1]
            if watch is not None and not is_output:
                watch.see(layer.name, "output", index, split, value[:1])
        if not self._is_last:
            require_outputs(self._plan, self._layers[-1].name, self._out, value)
            return self._remember(value, inputs, step)
        loss = self._model.loss(value, step, index) * self._model.scale()
        if watch is not None:
            watch.see_loss(self._layers[-1].name, index, split, loss)
        return self._remember((loss,), inputs, step)

    def backward_input(self, outputs: Value, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one micro-batch back to its inputs and set their ``grad``; it is zero if nothing depends on an input."""
        inputs = [x for x in self._inputs.pop(id(outputs[0])) if not x.stop_gradient]
        pairs = [
            (y, gradient)
            for y, gradient in zip(outputs, gradients, strict=True)
            if not y.stop_gradient and (gradient is not None or self._is_last)
        ]
        deferred = WeightGradients()
        if pairs:
            roots = [y for y, _ in pairs], [gradient for _, gradient in pairs]
            if self._split_backward is not None:
                deferred = self._split_backward.backward(*roots)
            else:
                paddle.autograd.backward(*roots)
        for x in inputs:
            if x.grad is None:
                x.grad = paddle.zeros_like(x)
        return deferred

    def buffers(self) -> dict[str, Tensor]:
        """The current values of the buffers that the plan declares, by name.

        Raises:
            BadPlanError: PP912, a buffer is missing or differs from its declaration, or training changed another one.
        """
        require_declared_changes(self._as_built, self._layers, self._plan)
        by_name, buffers = {layer.name: layer for layer in self._layers}, dict[str, Tensor]()
        for index, declared in enumerate(self._plan.custom.layers):
            if declared.name in by_name:
                path = ("model", "layers", index)
                buffers |= require_buffers(by_name[declared.name], declared, path, self._plan.run.dtype)
        return buffers

    def restore_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Load saved values of some buffers, before the first step. A leading dim of replicas has size one."""
        current = self.buffers()
        for name, value in buffers.items():
            current[name].set_value(value.reshape(current[name].shape))

    def _remember(self, outputs: Value, inputs: Value, step: int) -> Value:
        if step != self._step:  # a step without backwards leaves entries
            self._inputs.clear()
            self._step = step
        self._inputs[id(outputs[0])] = inputs
        return outputs

    def return_gradients(self) -> None:
        """Add the gradients of borrowed weights to the gradients of the weights themselves."""
        for borrowed in self._lent:
            borrowed.return_gradients()


Gradients: TypeAlias = dict[int, Tensor]
"""Gradients of one micro-batch, by the index of the weight."""
Products: TypeAlias = list[tuple[Tensor, Tensor, frozenset[int]]]
"""Deferred products: the output on its graph to weight and bias, its gradient, and the ids of weight and bias."""


class SplitBackward:
    """The split backward of a stage's modules; ``weights`` are all weights that get gradients."""

    def __init__(self, modules: Sequence[paddle.nn.Layer], weights: Sequence[Tensor]) -> None:
        self._weights = [*weights]
        self._aside: Gradients | None = None
        self._products: Products = []
        for index, weight in enumerate(self._weights):
            weight.register_hook(partial(self._keep_aside, index))
        for module in modules:
            for sublayer in module.sublayers(include_self=True):
                if type(sublayer) is paddle.nn.Linear:
                    sublayer.forward = partial(self._linear, sublayer)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one micro-batch back and return the deferred gradients of weights."""
        gradients_aside: Gradients = {}
        self._products = []
        self.run_into(gradients_aside, outputs, gradients)
        return _DeferredGradients(self, gradients_aside, self._products)

    def run_into(
        self, gradients_aside: Gradients, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        """Run autograd's backward and put the gradients of weights aside."""
        self._aside = gradients_aside
        try:
            paddle.autograd.backward([*outputs], [*gradients])
        finally:
            self._aside = None

    def ids(self, gradients_aside: Gradients) -> list[int]:
        """The ids of the weights with a gradient put aside."""
        return [id(self._weights[index]) for index in gradients_aside]

    def add(self, gradients_aside: Gradients) -> None:
        """Add the gradients of one micro-batch that were put aside to the weights' buffers."""
        for index, gradient in gradients_aside.items():
            grad = self._weights[index].grad
            grad.set_value(grad + gradient)

    def _keep_aside(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """Put a gradient aside and return zeros for the buffer; None means that the gradient goes to the buffer."""
        if gradient is None:  # a PyLayer inside of a layer may return None
            return None
        if self._aside is None:
            return None
        known = self._aside.get(index)
        self._aside[index] = gradient.clone() if known is None else known + gradient
        return paddle.zeros_like(gradient)

    def _linear(self, module: paddle.nn.Linear, x: Tensor) -> Tensor:
        """The result of the layer's own ``forward``, on a graph that bypasses the weight."""
        weight, bias = module.weight, module.bias
        if not paddle.is_grad_enabled() or weight.stop_gradient or not weight.is_leaf:
            return F.linear(x, weight, bias)
        if not x.stop_gradient:
            return _Product.apply(x, module, partial(self._defer, module))
        value = F.linear(x, weight, bias)
        output = value.detach()
        output.stop_gradient = False
        output.register_hook(partial(self._defer, module, value))
        return output

    def _defer(self, module: paddle.nn.Linear, value: Tensor, gradient: Tensor) -> None:
        weights = frozenset(id(weight) for weight in (module.weight, module.bias) if weight is not None)
        self._products.append((value, gradient, weights))


class _DeferredGradients(WeightGradients):
    """Weight gradients of one micro-batch: gradients put aside, and products that are still to be computed."""

    def __init__(self, split: SplitBackward, gradients_aside: Gradients, products: Products) -> None:
        super().__init__()
        self._split_backward, self._aside, self._products = split, gradients_aside, products

    def accumulate(self) -> None:
        """Add the whole gradient of the micro-batch to each weight's buffer. A second call adds nothing."""
        uses = Counter(weight for *_, weights in self._products for weight in weights)
        uses.update(self._split_backward.ids(self._aside))
        for value, gradient, weights in self._products:
            if all(uses[weight] == 1 for weight in weights):  # several uses are added up before the buffer
                paddle.autograd.backward([value], [gradient])
            else:
                self._split_backward.run_into(self._aside, [value], [gradient])
        self._split_backward.add(self._aside)
        self._aside, self._products = {}, []


class _Product(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """One use of an ``nn.Linear`` in the layer's graph: a function of the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: paddle.nn.Linear, defer: Callable[[Tensor, Tensor], None]) -> Tensor:
        with paddle.enable_grad():
            value = F.linear(x.detach(), module.weight, module.bias)
        ctx.value, ctx.weight, ctx.defer, ctx.dtype = value, module.weight.detach(), defer, x.dtype
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.defer(ctx.value, gradient)
        weight = ctx.weight if ctx.weight.dtype == gradient.dtype else ctx.weight.astype(gradient.dtype)  # autocast
        product = paddle.matmul(gradient, weight, transpose_y=True)
        return product if product.dtype == ctx.dtype else product.astype(ctx.dtype)
