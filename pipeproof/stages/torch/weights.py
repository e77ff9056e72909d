"""Weights with deferred gradients: the W of a split backward.

A backward through the layers computes the gradients of inputs (I). For each weight it stores only the tensors that the
weight's gradient needs: for a product its input and the gradient of its output. W then adds to the weights' gradient
buffers, inside the product if there is one. The whole backward (B) is I, then W. The split comes from Zero Bubble
Pipeline Parallelism (arXiv:2401.10241).

Shape letters: N rows of any number of leading dims, K and M columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from pipeproof.stages.common.backend_ops import NORM_EPSILON
from pipeproof.stages.common.weights import DeferringWeights, GatheredInput, WeightGradients, source_of
from pipeproof.stages.torch.functional import Groups, even_groups, grouped_gradients, grouped_product, is_one_kernel

Tensor: TypeAlias = torch.Tensor


class Weight:
    """A weight and its gradient buffer.

    The optimizer updates ``main``; ``gradient`` has the same type. Layers compute with ``value``: ``main`` itself, or a
    copy rounded to a narrower type, which ``renew`` updates.
    """

    def __init__(self, main: Tensor, dtype: torch.dtype | None = None) -> None:
        self.main = main
        self.value = main if dtype is None else main.to(dtype)
        self.allocate_gradient()

    def renew(self) -> None:
        """Round ``main`` to ``value`` again, in place."""
        if self.value is not self.main:
            self.value.copy_(self.main)

    def lent(self) -> Weight:
        """The same weight for a layer that borrows it: its own gradient is one addend of the total."""
        borrowed = Weight(self.main)
        borrowed.value = self.value
        return borrowed

    def allocate_gradient(self) -> None:
        """Make a new gradient buffer of +0.0."""
        self.gradient = torch.zeros_like(self.main)

    def drop_gradient(self) -> None:
        """Free the gradient buffer until the next ``allocate_gradient``."""
        self.gradient = self.main.new_empty(0)

    def zero_gradient(self) -> None:
        """Set the buffer to +0.0, in place.

        A buffer that begins as the gradient of the first micro-batch may hold -0.0 where this one holds +0.0.
        """
        self.gradient.zero_()

    def add(self, gradient: Tensor) -> None:
        """Add to the buffer, rounding once."""
        self.gradient.add_(gradient)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right`` to the buffer, inside the product where its type allows."""
        add_product(self.gradient, left, right)


def add_product(buffer: Tensor, left: Tensor, right: Tensor) -> None:
    """``buffer += left @ right``: [K, M], [K, N] and [N, M].

    Factors of a narrower type are multiplied with sums in the buffer's type: on a GPU by one product, on the CPU after
    conversion.
    """
    if left.dtype == buffer.dtype:
        buffer.addmm_(left, right)
    elif buffer.is_cuda and buffer.dtype == torch.float32:
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)
    else:
        buffer.addmm_(left.to(buffer.dtype), right.to(buffer.dtype))


View: TypeAlias = Callable[[Tensor], Tensor]
"""A view of a weight, or of its gradient."""


class _TorchGradients(WeightGradients):
    def accumulate(self) -> None:
        with torch.no_grad():
            super().accumulate()


class SplitWeights(DeferringWeights):
    """The weights of one stage as its layers use them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.autograd.backward, _TorchGradients)
        self._anchor = torch.empty(0, device=device, requires_grad=True)  # a leaf for lookups and norms

    def product(
        self, activation: Tensor, weight: Weight, *, transposed: bool = False, dtype: str | None = None
    ) -> Tensor:
        """Implement ``common.weights.SplitWeights.product``. An activation that W gathers again is not saved."""
        wide = wider_type(activation, dtype)
        return _Product.apply(activation, weight, transposed, self._defer, source_of(activation), wide)

    def norm(self, activation: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
        """RMSNorm over the last dim (arXiv:1910.07467) times the weight, or LayerNorm (arXiv:1607.06450) with a bias.

        Shapes: [.., K] and [K] to [.., K].
        """
        # A separate node: a norm of several operations reads it several times. Without it, these gradients and the
        # residual's would be added in an order that autograd does not guarantee. It has rows, because the order in
        # which heads, which are slices, add the weight's gradient would depend on their memory layout.
        x = activation.reshape(-1, activation.shape[-1])
        scale = _DeferredWeight.apply(self._anchor, weight, self._defer)
        shift = None if bias is None else _DeferredWeight.apply(self._anchor, bias, self._defer)
        return normalized(x, scale, shift).view(activation.shape)

    def added(self, activation: Tensor, weight: Weight, view: View = lambda whole: whole) -> Tensor:
        """``activation + view(weight)``, by default of the whole weight. The view is broadcast."""
        return _Added.apply(activation, weight, view, self._defer)

    def scaled_and_shifted(self, activation: Tensor, scale: Weight, shift: Weight, sizes: Sequence[int]) -> Tensor:
        """``activation * scale + shift`` with one ``scale`` for each group of columns: [.., K], [groups] and [K].

        ``sizes`` are the sizes of the groups.
        """
        return _ScaledAndShifted.apply(activation, scale, shift, tuple(sizes), self._defer)

    def grouped(self, activation: Tensor, weight: Weight, groups: Groups) -> Tensor:
        """Multiply each group of rows by its matrix: [N, K] and [E, K, M] to [N, M]."""
        return _Grouped.apply(activation, weight, groups, self._defer)

    def grouped_evenly(self, activation: Tensor, weight: Weight) -> Tensor:
        """``grouped`` with as many rows in each group."""
        return self.grouped(activation, weight, even_groups(len(weight.value), activation))

    def deferred(self, weight: Weight) -> Tensor:
        """The weight as a tensor whose gradient is computed with the inputs' gradients and added on request."""
        return _DeferredWeight.apply(self._anchor, weight, self._defer)

    def fixed(self, weight: Weight) -> Tensor:
        """The weight as a constant."""
        return weight.value.detach()

    def rows(self, indices: Tensor, weight: Weight) -> Tensor:
        """Rows of ``weight`` by index: [..] and [V, K] to [.., K]. No gradient flows further back."""
        return _Rows.apply(self._anchor, indices, weight, self._defer)


Defer: TypeAlias = Callable[[Callable[[], None]], None]


class _Product(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """Matrix products. With more than two dims PyTorch's kernel, and so the bits, depend on the memory layout."""

    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, weight: Weight, transposed: bool, defer: Defer, source: GatheredInput | None,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        inputs = activation.reshape(-1, activation.shape[-1])
        if source is None:
            ctx.save_for_backward(inputs)
        else:
            source.use()
        ctx.weight, ctx.transposed, ctx.defer, ctx.source = weight, transposed, defer, source
        output = torch.mm(inputs.to(dtype), (weight.value.t() if transposed else weight.value).to(dtype))
        return output.view(*activation.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        weight, transposed, source, saved = ctx.weight, ctx.transposed, ctx.source, ctx.saved_tensors
        outputs, dtype = gradient.reshape(-1, gradient.shape[-1]), weight.value.dtype
        is_wider = outputs.dtype != dtype

        def add() -> None:
            inputs = saved[0] if source is None else source.take().flatten(0, -2)
            left, right = (outputs, inputs) if transposed else (inputs, outputs)
            if is_wider:
                weight.add(torch.mm(left.t().to(outputs.dtype), right.to(outputs.dtype)).to(dtype))
            else:
                weight.add_product(left.t(), right)

        ctx.defer(add)
        back = torch.mm(outputs, (weight.value if transposed else weight.value.t()).to(outputs.dtype)).to(dtype)
        return back.view(*gradient.shape[:-1], back.shape[-1]), None, None, None, None, None


class _DeferredWeight(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """A weight for plain autograd. Its gradient is computed with the input's and added on request."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Weight, defer: Defer) -> Tensor:
        ctx.weight, ctx.defer = weight, defer
        return weight.value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        weight = ctx.weight
        ctx.defer(lambda: weight.add(gradient))
        return None, None, None


class _Added(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """A sum with a view of a weight. The order in which rows are added would depend on the gradient's memory layout."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, weight: Weight, view: View, defer: Defer) -> Tensor:
        ctx.weight, ctx.view, ctx.defer = weight, view, defer
        return activation + view(weight.value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        weight, view = ctx.weight, ctx.view

        def add() -> None:  # the gradient may be another buffer by now
            buffer = view(weight.gradient)
            buffer.add_(gradient.contiguous().sum_to_size(buffer.shape))

        ctx.defer(add)
        return gradient, None, None, None


class _ScaledAndShifted(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, scale: Weight, shift: Weight, sizes: tuple[int, ...], defer: Defer
    ) -> Tensor:
        ctx.save_for_backward(activation)
        ctx.scale, ctx.shift, ctx.sizes, ctx.defer = scale, shift, sizes, defer
        return activation * each_column(scale.value, sizes) + shift.value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (activation,), scale, shift, sizes = ctx.saved_tensors, ctx.scale, ctx.shift, ctx.sizes
        leading = tuple(range(gradient.dim() - 1))

        def add() -> None:
            of_columns = (gradient * activation).sum(leading)
            scale.add(torch.stack([part.sum() for part in of_columns.split(sizes)]))
            shift.add(gradient.sum(leading))

        ctx.defer(add)
        return gradient * each_column(scale.value, sizes), None, None, None, None


def wider_type(activation: Tensor, dtype: str | None) -> torch.dtype:
    """The wider type of an activation's and ``dtype``."""
    return activation.dtype if dtype is None else torch.promote_types(activation.dtype, getattr(torch, dtype))


def normalized(activation: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """RMSNorm over the last dim, or LayerNorm with a shift."""
    size = activation.shape[-1:]
    if shift is None:
        return F.rms_norm(activation, size, scale, NORM_EPSILON)
    return F.layer_norm(activation, size, scale, shift, NORM_EPSILON)


def each_column(scale: Tensor, sizes: Sequence[int]) -> Tensor:
    """The number of each column's group: [groups] to [K]."""
    return torch.cat([number.expand(size) for number, size in zip(scale, sizes, strict=True)])


class _Grouped(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, activation: Tensor, weight: Weight, groups: Groups, defer: Defer) -> Tensor:
        ctx.save_for_backward(activation)
        ctx.weight, ctx.groups, ctx.defer = weight, groups, defer
        return grouped_product(activation, weight.value, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (activation,), weight, groups = ctx.saved_tensors, ctx.weight, ctx.groups
        gradient = gradient.contiguous()

        def add() -> None:
            if weight.gradient.dtype == activation.dtype and is_one_kernel(activation, weight.value):
                weight.add(grouped_gradients(activation, gradient, groups))
                return
            # A wider buffer needs sums in its own type, which the grouped kernel does not have.
            parts = zip(weight.gradient, activation.split(groups.sizes), gradient.split(groups.sizes), strict=True)
            for buffer, inputs, outputs in parts:
                if len(inputs):
                    add_product(buffer, inputs.t(), outputs)

        ctx.defer(add)
        return grouped_product(gradient, weight.value.transpose(1, 2), groups), None, None, None


class _Rows(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, indices: Tensor, weight: Weight, defer: Defer) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.weight, ctx.defer = weight, defer
        return F.embedding(indices, weight.value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (indices,), weight = ctx.saved_tensors, ctx.weight
        rows = gradient.reshape(-1, gradient.shape[-1])

        def add() -> None:
            # Not index_add_, which adds in any order on a GPU.
            wide = rows.to(weight.gradient.dtype)
            weight.gradient.index_put_((indices.reshape(-1),), wide, accumulate=True)

        ctx.defer(add)
        return None, None, None, None
