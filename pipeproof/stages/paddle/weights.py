"""Weights with deferred gradients: the W of a split backward.

A layer uses a weight in one of six ways: a matrix product, a product of groups of rows with one matrix each, a product
element by element, a sum, a scale and shift of groups of columns, or a lookup of rows. The value is computed once, on a
small graph of autograd that leads to the weight alone. The layer's own graph bypasses the weight and leads to the
input. So a backward through the layers computes the gradients of inputs (I) and stores, for each use, the small graph
and the gradient of its value. W then runs the small graphs. It follows autograd's own rules, so the bits are
autograd's, and it frees the memory. The whole backward (B) is I, then W. Where other functions of autograd read a small
weight (``deferred``), I computes its gradient, and W adds it.

If one weight has several uses (MTP streams share embedding, norm and head), its gradient adds the gradients of the uses
in order. Autograd guarantees no order for several uses of a leaf.

The split comes from Zero Bubble Pipeline Parallelism (arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.stages.common.weights import DeferringWeights, source_of
from pipeproof.stages.paddle.functional import fork, rms_norm

Tensor: TypeAlias = paddle.Tensor


View: TypeAlias = Callable[[Tensor], Tensor]
"""A part of a weight, with dims for broadcasting."""


def layer_norm(activation: Tensor) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps)`` over the last dim, before the weight and the bias."""
    x = paddle.assign(activation)
    return rms_norm(x - paddle.mean(x, axis=-1, keepdim=True))


class SplitWeights(DeferringWeights):
    """The weights of one stage as its layers use them.

    Layers compute with weights rounded to ``dtype``; None means no rounding. Rounding is a part of the small graphs:
    the gradient of each use is computed in ``dtype`` and added in the weight's own type.
    """

    def __init__(self, dtype: str | None = None) -> None:
        super().__init__(paddle.autograd.backward)
        self._dtype = dtype

    def product(
        self, activation: Tensor, weight: Tensor, *, transposed: bool = False, dtype: str | None = None
    ) -> Tensor:
        """Implement ``common.weights.SplitWeights.product``. An activation that W gathers again is not kept."""
        return self.product_each([activation], weight, transposed=transposed, dtype=dtype)[0]

    def added(self, activation: Tensor, weight: Tensor, view: View = lambda whole: whole) -> Tensor:
        """``activation + view(weight)``, by default of the whole weight. The view is broadcast."""
        return self.added_each([activation], weight, view)[0]

    def added_each(
        self, activations: Sequence[Tensor], weight: Tensor, view: View = lambda whole: whole
    ) -> list[Tensor]:
        """``added`` to each activation. The weight's gradient adds the gradients of the sums in order."""

        def values(xs: Sequence[Tensor]) -> list[Tensor]:
            return [x + view(copy) for x, copy in zip(xs, copies(self._rounded(weight), len(xs)), strict=True)]

        # The deferred gradient needs its own memory: autograd may add to the gradient of the input in place.
        return used_on_each(activations, values, paddle.clone, self._defer_use)

    def scaled_and_shifted(self, activation: Tensor, scale: Tensor, shift: Tensor, sizes: Sequence[int]) -> Tensor:
        """``activation * scale + shift`` with one ``scale`` for each group of columns: [.., K], [groups] and [K].

        ``sizes`` are the sizes of the groups.
        """

        def scaled(x: Tensor) -> list[Tensor]:
            factors = paddle.split(self._rounded(scale), len(sizes))
            return [part * factor for part, factor in zip(paddle.split(x, sizes, axis=-1), factors, strict=True)]

        def shifted(x: Tensor) -> Tensor:
            shifts = paddle.split(self._rounded(shift), sizes)
            return paddle.concat([part + addend for part, addend in zip(scaled(x), shifts, strict=True)], axis=-1)

        return self._used(activation, shifted, lambda gradient: paddle.concat(scaled(gradient), axis=-1))

    def grouped(self, activation: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
        """Multiply each group of rows by its matrix: [V, K] and [E, K, N] to [V, N]; group e has ``sizes[e]`` rows."""
        groups = [(expert, size) for expert, size in enumerate(sizes) if size]
        if not groups:  # backward continues, but no weight is used
            return paddle.matmul(activation, self._rounded(weight[0]).detach())
        rows = [size for _, size in groups]

        def products(x: Tensor, *, transpose: bool = False) -> Tensor:
            matrices = paddle.unbind(self._rounded(weight))
            parts = zip(paddle.split(x, rows), groups, strict=True)
            return paddle.concat([paddle.matmul(part, matrices[e], transpose_y=transpose) for part, (e, _) in parts])

        return self._used(activation, products, lambda gradient: products(gradient, transpose=True))

    def grouped_evenly(self, activation: Tensor, weight: Tensor) -> Tensor:
        """``grouped`` with as many rows in each group."""
        number = weight.shape[0]
        return self.grouped(activation, weight, [activation.shape[0] // number] * number)

    def deferred(self, weight: Tensor) -> Tensor:
        """The weight as a leaf of autograd, for one use, whose gradient is added on request."""
        value = self._rounded(weight).clone()
        leaf = value.detach()
        leaf.stop_gradient = False
        leaf.register_hook(lambda gradient: self._defer_use([value], [gradient]))
        return leaf

    def fixed(self, weight: Tensor) -> Tensor:
        """The weight as a constant."""
        return self._rounded(weight).detach()

    def product_each(
        self, activations: Sequence[Tensor], weight: Tensor, *, transposed: bool = False, dtype: str | None = None
    ) -> list[Tensor]:
        """``product`` of each activation. The weight's gradient adds the gradients of the products in order."""
        sources = [source_of(activation) for activation in activations]
        own_dtype = activations[0].dtype  # the backward keeps no activation

        def values(xs: Sequence[Tensor]) -> list[Tensor]:
            products = []
            for x, copy, source in zip(xs, copies(self._rounded(weight), len(xs)), sources, strict=True):
                value = partial(_product, weight=copy, transposed=transposed, dtype=dtype)
                products.append(value(x) if source is None else source.without_keeping(value)(x))
            return products

        return used_on_each(
            activations,
            values,
            lambda gradient: _product(gradient, self._rounded(weight), not transposed, dtype).astype(own_dtype),
            self._defer_use,
        )

    def norm_each(self, activations: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        """RMSNorm over the last dim (arXiv:1910.07467) times the weight, or LayerNorm (arXiv:1607.06450) with a bias.

        For gradients see ``scaled_each`` and ``added_each``.
        """
        if bias is None:
            return self.scaled_each(list(map(rms_norm, activations)), weight)
        return self.added_each(self.scaled_each(list(map(layer_norm, activations)), weight), bias)

    def scaled_each(self, activations: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
        """Each activation times the weight along the last dim; the weight's gradient adds the products' in order."""

        def values(xs: Sequence[Tensor]) -> list[Tensor]:
            return [x * copy for x, copy in zip(xs, copies(self._rounded(weight), len(xs)), strict=True)]

        return used_on_each(activations, values, lambda gradient: gradient * self._rounded(weight), self._defer_use)

    def rows(self, indices: Sequence[Tensor], weight: Tensor, axis: int = 0) -> Tensor:
        """Rows of ``weight`` for tensors of indices, joined along ``axis``: [..] each and [V, K] to [.., K].

        The weight's gradient adds the gradients of the tensors in order. No gradient flows further back.
        """
        weights = copies(self._rounded(weight), len(indices))
        rows = [F.embedding(index, copy) for index, copy in zip(indices, weights, strict=True)]
        value = rows[0] if len(rows) == 1 else paddle.concat(rows, axis=axis)
        output = value.detach()
        output.stop_gradient = False
        output.register_hook(lambda gradient: self._defer_use([value], [gradient]))
        return output

    def _rounded(self, weight: Tensor) -> Tensor:
        return weight if self._dtype is None else weight.astype(self._dtype)

    def _used(
        self, activation: Tensor, value_of: Callable[[Tensor], Tensor], input_gradient: Callable[[Tensor], Tensor]
    ) -> Tensor:
        (value,) = used_on_each([activation], lambda xs: [value_of(xs[0])], input_gradient, self._defer_use)
        return value

    def _defer_use(self, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Leave to W a use of a weight: its values, on the graph to the weight, and their gradients."""
        self._defer(partial(_run_graph, list(values), list(gradients)))


def _run_graph(values: list[Tensor], gradients: list[Tensor]) -> None:
    paddle.autograd.backward(values, gradients)


def _product(x: Tensor, weight: Tensor, transposed: bool, dtype: str | None) -> Tensor:
    return paddle.matmul(widened(x, dtype), widened(weight, dtype), transpose_y=transposed)


def widened(tensor: Tensor, dtype: str | None) -> Tensor:
    """A tensor of float32 or float64 in float64 if that is ``dtype``."""
    return tensor.astype(dtype) if dtype == "float64" else tensor


class BorrowedWeight:
    """Another layer's weight as the borrowing layer uses it: the same memory, with its own gradient.

    So the borrower's sum over micro-batches is one addend, on whichever rank it runs.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.used = weight.detach()
        self.used.stop_gradient = False
        self.used.grad = paddle.zeros_like(weight)

    def return_gradients(self) -> None:
        """Add the borrower's gradient to the weight's gradient, then reset it to +0.0."""
        self._weight.grad.set_value(self._weight.grad + self.used.grad)
        self.used.grad = paddle.zeros_like(self._weight)


def used_on_each(
    activations: Sequence[Tensor],
    values_of: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    input_gradient: Callable[[Tensor], Tensor],
    defer: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
) -> list[Tensor]:
    """Return ``values_of(activations)``, one value for each activation, computed with ``copies`` of the weight.

    Backward computes each input's gradient with ``input_gradient`` and passes the values, on their graph to the weight
    alone, with their gradients to ``defer``.
    """
    return list(_UsedOnEach.apply(values_of, input_gradient, defer, *activations))


def copies(weight: Tensor, number: int) -> Sequence[Tensor]:
    """Return one weight for each use; their gradients are added in order. A single use gets the weight itself."""
    return [weight] if number == 1 else fork(weight, number)


class _UsedOnEach(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """Uses of a weight in the layers' graph: functions of the inputs alone."""

    @staticmethod
    def forward(
        ctx: Any,
        values_of: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        input_gradient: Callable[[Tensor], Tensor],
        defer: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
        *activations: Tensor,
    ) -> tuple[Tensor, ...]:
        with paddle.enable_grad():
            values = values_of([x.detach() for x in activations])
        ctx.values, ctx.input_gradient, ctx.defer = values, input_gradient, defer
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        ctx.defer(ctx.values, gradients)
        return tuple(map(ctx.input_gradient, gradients))
