"""Weights whose gradients are computed when they are asked for: the W of a split backward.

A layer meets a weight in one of five ways: it multiplies by it as a matrix, or
groups of rows by one matrix each, or element by element, or scales and shifts
groups of columns, or takes its rows. The value is computed once, on a
small graph of autograd that leads from it to the weight alone; the layer's own
graph leads past the weight to the input. So a backward through the layers
computes the gradients of inputs (I) and finds at each weight the gradient of
its value, which it writes down with the small graph. Working these off
computes the gradients of weights (W), by autograd's own rules and therefore
with autograd's own bits, and frees what was kept for it.

The whole backward (B) is the two, one right after the other.

The split is that of Zero Bubble Pipeline Parallelism (arXiv:2401.10241).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.stages.paddle.gathered import source_of
from pipeproof.stages.paddle.shared_use import copies, used_on_each

Tensor: TypeAlias = paddle.Tensor


class WeightGradients:
    """Weight gradients of one micro-batch that are still to be computed, with all that they need.

    For each use of a weight that is the value made of it, on its graph to the
    weight, and the value's gradient.
    """

    def __init__(self) -> None:
        self._uses: deque[tuple[Sequence[Tensor], Sequence[Tensor]]] = deque()

    def put_off(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Keep a use of a weight for later, or several uses whose graphs are one."""
        self._uses.append((values, gradients))

    def accumulate(self) -> None:
        """Add the gradients to the weights' buffers, in the order in which backward came by, and free what they needed.

        A second call adds nothing.
        """
        while self._uses:
            values, gradients = self._uses.popleft()
            paddle.autograd.backward(list(values), list(gradients))


class SplitWeights:
    """The weights of one stage as its layers use them.

    ``backward`` runs one micro-batch's backward and collects what the uses of
    weights on its way put off.

    Layers compute with weights rounded to ``dtype``, None for weights as they
    are. Rounding is a part of the small graphs: the gradient of each use is
    computed in ``dtype`` and added up in the weight's own type.
    """

    def __init__(self, dtype: str | None = None) -> None:
        self._collected, self._dtype = WeightGradients(), dtype

    def backward(self, output: Tensor, gradient: Tensor | None) -> WeightGradients:
        """Compute the gradients of all inputs of ``output``; those of weights are returned, to be accumulated.

        ``gradient`` is that of ``output``, None for a scalar loss.
        """
        self._collected = WeightGradients()
        paddle.autograd.backward([output], [gradient])
        collected, self._collected = self._collected, WeightGradients()
        return collected

    def product(self, activation: Tensor, weight: Tensor, *, transposed: bool = False) -> Tensor:
        """``activation @ weight``: [.., K] and [K, N] to [.., N]; transposed, the weight is [N, K].

        An activation that is to be gathered again is not kept.
        """

        def value(x: Tensor) -> Tensor:
            return paddle.matmul(x, self._rounded(weight), transpose_y=transposed)

        source = source_of(activation)
        return _Use.apply(
            activation,
            value if source is None else source.forgotten(value),
            lambda gradient: paddle.matmul(gradient, self._rounded(weight), transpose_y=not transposed),
            self._put_off,
        )

    def scaled(self, activation: Tensor, weight: Tensor) -> Tensor:
        """``activation * weight``, element by element along the last dim: [.., K] and [K] to [.., K]."""
        return _Use.apply(
            activation,
            lambda x: x * self._rounded(weight),
            lambda gradient: gradient * self._rounded(weight),
            self._put_off,
        )

    def scaled_and_shifted(self, activation: Tensor, scale: Tensor, shift: Tensor, sizes: Sequence[int]) -> Tensor:
        """``activation * scale + shift``, a number of ``scale`` for each group of columns: [.., K], [groups] and [K].

        ``sizes`` are those of the groups.
        """

        def scaled(x: Tensor) -> list[Tensor]:
            factors = paddle.split(self._rounded(scale), len(sizes))
            return [part * factor for part, factor in zip(paddle.split(x, sizes, axis=-1), factors, strict=True)]

        def shifted(x: Tensor) -> Tensor:
            shifts = paddle.split(self._rounded(shift), sizes)
            return paddle.concat([part + own for part, own in zip(scaled(x), shifts, strict=True)], axis=-1)

        return _Use.apply(activation, shifted, lambda gradient: paddle.concat(scaled(gradient), axis=-1), self._put_off)

    def grouped(self, activation: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
        """Groups of rows, each times its own matrix: [V, K] and [E, K, N] to [V, N]; group e has ``sizes[e]`` rows."""
        groups = [(expert, size) for expert, size in enumerate(sizes) if size]
        if not groups:  # the way back leads on, and no weight was used
            return paddle.matmul(activation, self._rounded(weight[0]).detach())
        rows = [size for _, size in groups]

        def products(x: Tensor, *, transpose: bool = False) -> Tensor:
            matrices = paddle.unbind(self._rounded(weight))
            parts = zip(paddle.split(x, rows), groups, strict=True)
            return paddle.concat([paddle.matmul(part, matrices[e], transpose_y=transpose) for part, (e, _) in parts])

        return _Use.apply(activation, products, lambda gradient: products(gradient, transpose=True), self._put_off)

    def product_each(self, activations: Sequence[Tensor], weight: Tensor, *, transposed: bool = False) -> list[Tensor]:
        """``product`` of each activation; the weight's gradient adds theirs in their order."""
        if len(activations) == 1:
            return [self.product(activations[0], weight, transposed=transposed)]
        sources = [source_of(activation) for activation in activations]

        def values(xs: Sequence[Tensor]) -> list[Tensor]:
            found = []
            for x, own, source in zip(xs, copies(self._rounded(weight), len(xs)), sources, strict=True):
                value = partial(paddle.matmul, y=own, transpose_y=transposed)
                found.append(value(x) if source is None else source.forgotten(value)(x))
            return found

        return used_on_each(
            activations,
            values,
            lambda gradient: paddle.matmul(gradient, self._rounded(weight), transpose_y=not transposed),
            self._put_off_each,
        )

    def scaled_each(self, activations: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
        """``scaled`` of each activation; the weight's gradient adds theirs in their order."""
        if len(activations) == 1:
            return [self.scaled(activations[0], weight)]

        def values(xs: Sequence[Tensor]) -> list[Tensor]:
            return [x * own for x, own in zip(xs, copies(self._rounded(weight), len(xs)), strict=True)]

        return used_on_each(activations, values, lambda gradient: gradient * self._rounded(weight), self._put_off_each)

    def rows(self, places: Sequence[Tensor], weight: Tensor, axis: int = 0) -> Tensor:
        """Rows of ``weight`` for tensors of places, joined along ``axis``: [..] each and [V, K] to [.., K].

        Nothing flows further back. The weight's gradient adds those of the places tensor by tensor, in their order.
        """
        each = copies(self._rounded(weight), len(places))
        rows = [F.embedding(place, own) for place, own in zip(places, each, strict=True)]
        value = rows[0] if len(rows) == 1 else paddle.concat(rows, axis=axis)
        taken = value.detach()
        taken.stop_gradient = False
        taken.register_hook(lambda gradient: self._put_off(value, gradient))
        return taken

    def _rounded(self, weight: Tensor) -> Tensor:
        return weight if self._dtype is None else weight.astype(self._dtype)

    def _put_off(self, value: Tensor, gradient: Tensor) -> None:
        self._collected.put_off([value], [gradient])

    def _put_off_each(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        self._collected.put_off(values, gradients)


class BorrowedWeight:
    """A weight as a layer uses it that it is lent to: the same memory, with a gradient of its own.

    So the borrower's sum over micro-batches is one addend, wherever it runs.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.used = weight.detach()
        self.used.stop_gradient = False
        self.used.grad = paddle.zeros_like(weight)

    def give_back(self) -> None:
        """Add the gradient to the weight's own, and begin the next one as +0.0."""
        self._weight.grad.set_value(self._weight.grad + self.used.grad)
        self.used.grad = paddle.zeros_like(self._weight)


class _Use(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """One use of a weight, as the layers' graph sees it: a function of the input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        activation: Tensor,
        value_of: Callable[[Tensor], Tensor],
        input_gradient: Callable[[Tensor], Tensor],
        put_off: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        with paddle.enable_grad():
            value = value_of(activation.detach())
        ctx.value, ctx.input_gradient, ctx.put_off = value, input_gradient, put_off
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.put_off(ctx.value, gradient)
        return ctx.input_gradient(gradient)
