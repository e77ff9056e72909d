"""Own layers whose backward is split: the gradients of ``nn.Linear`` weights are computed when W asks for them.

Of layers of any kind nothing is known but that autograd differentiates them,
and asking autograd for the gradients of inputs alone is no way to split a
backward: Paddle 3.3.1 then leaves the scale of a LayerNorm out of them (on the
CPU). So I runs the whole backward, as it is, and sets the gradients of weights
aside, and W adds them. Only products are put off for real: an ``nn.Linear``,
wherever it stands in a layer, leads past its weight and bias, and W computes
their gradients, by autograd's own rules (as ``weights`` does for the GPT).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.stages.own.model import OwnLayer
from pipeproof.stages.paddle.weights import WeightGradients

Tensor: TypeAlias = paddle.Tensor
Sums: TypeAlias = dict[int, Tensor]
"""What one micro-batch has for weights, by their places."""
Products: TypeAlias = list[tuple[Tensor, Tensor, frozenset[int]]]
"""Values on their graphs to a weight and a bias, the values' gradients, and the ids of both weights."""


class SplitBackward:
    """The split backward of a stage's layers; ``weights`` are all that gradients go to."""

    def __init__(self, layers: Sequence[OwnLayer], weights: Sequence[Tensor]) -> None:
        self._weights = [*weights]
        self._sums: Sums | None = None
        self._products: Products = []
        for place, weight in enumerate(self._weights):
            weight.register_hook(partial(self._set_aside, place))
        modules = [layer.item.module for layer in layers if layer.item.module is not None]
        for module in modules:
            for part in module.sublayers(include_self=True):
                if type(part) is paddle.nn.Linear:
                    part.forward = partial(self._linear, part)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one micro-batch back; the gradients of weights are returned, to be added later."""
        sums: Sums = {}
        self._products = []
        self.into(sums, outputs, gradients)
        return _PutOff(self, sums, self._products)

    def into(self, sums: Sums, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Let autograd go back, and set aside what comes to the weights."""
        self._sums = sums
        try:
            paddle.autograd.backward([*outputs], [*gradients])
        finally:
            self._sums = None

    def ids(self, sums: Sums) -> list[int]:
        """The ids of the weights for which something was set aside."""
        return [id(self._weights[place]) for place in sums]

    def add(self, sums: Sums) -> None:
        """Add to the weights' buffers what was set aside of one micro-batch."""
        for place, gradient in sums.items():
            grad = self._weights[place].grad
            grad.set_value(grad + gradient)

    def _set_aside(self, place: int, gradient: Tensor | None) -> Tensor | None:
        """Keep what comes to a weight, and let nothing of it into the buffer; None leaves it as it is."""
        if gradient is None:  # a PyLayer inside of a layer may give that
            return None
        if self._sums is None:
            return None  # right into the buffer
        known = self._sums.get(place)
        self._sums[place] = gradient.clone() if known is None else known + gradient
        return paddle.zeros_like(gradient)

    def _linear(self, module: paddle.nn.Linear, x: Tensor) -> Tensor:
        """What the layer's own ``forward`` gives, on a graph that leads past the weight."""
        weight, bias = module.weight, module.bias
        if not paddle.is_grad_enabled() or weight.stop_gradient or not weight.is_leaf:
            return F.linear(x, weight, bias)
        if not x.stop_gradient:
            return _Product.apply(x, module, partial(self._put_off, module))
        value = F.linear(x, weight, bias)
        taken = value.detach()
        taken.stop_gradient = False
        taken.register_hook(partial(self._put_off, module, value))
        return taken

    def _put_off(self, module: paddle.nn.Linear, value: Tensor, gradient: Tensor) -> None:
        weights = frozenset(id(weight) for weight in (module.weight, module.bias) if weight is not None)
        self._products.append((value, gradient, weights))


class _PutOff(WeightGradients):
    """What one micro-batch has for the weights: gradients that are there, and products that are yet to be computed."""

    def __init__(self, split: SplitBackward, sums: Sums, products: Products) -> None:
        super().__init__()
        self._split, self._sums, self._products = split, sums, products

    def accumulate(self) -> None:
        """Add the whole gradient of the micro-batch to each weight's buffer; a second call adds nothing."""
        uses = Counter(weight for *_, weights in self._products for weight in weights)
        uses.update(self._split.ids(self._sums))
        for value, gradient, weights in self._products:
            if all(uses[weight] == 1 for weight in weights):  # of several, the sum comes first
                paddle.autograd.backward([value], [gradient])
            else:
                self._split.into(self._sums, [value], [gradient])
        self._split.add(self._sums)
        self._sums, self._products = {}, []


class _Product(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """One use of an ``nn.Linear``, as the layer's graph sees it: a function of the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: paddle.nn.Linear, put_off: Callable[[Tensor, Tensor], None]) -> Tensor:
        with paddle.enable_grad():
            value = F.linear(x.detach(), module.weight, module.bias)
        ctx.value, ctx.weight, ctx.put_off = value, module.weight.detach(), put_off
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.put_off(ctx.value, gradient)
        return paddle.matmul(gradient, ctx.weight, transpose_y=True)
