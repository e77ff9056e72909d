"""Split backward of a script's Paddle layers: W computes the weight gradients of ``nn.Linear``, autograd the rest.

Autograd must differentiate any layer, and a request for the gradients of inputs alone does not split a backward: Paddle
3.3.1 then leaves out the scale of a LayerNorm (on the CPU). So I runs the whole backward and keeps the gradients of
weights aside, and W adds them. Only products are deferred: each ``nn.Linear`` inside of a layer bypasses its weight and
bias, and W computes their gradients by autograd's own rules (as ``stages.paddle.weights`` does for the GPT).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.stages.paddle.weights import WeightGradients

Tensor: TypeAlias = paddle.Tensor


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
