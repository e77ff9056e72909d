"""Weights whose gradients are computed when they are asked for: the W of a split backward.

A backward through the layers computes the gradients of inputs (I). At each
weight it leaves what the weight's own gradient needs, for a product its input
and the gradient of its output, and nothing else is kept. Working these off (W)
adds into the weights' gradient buffers, inside the product where there is one.

The whole backward (B) is the two, one right after the other. The split is that
of Zero Bubble Pipeline Parallelism (arXiv:2401.10241).

Shape letters: N rows of any number of leading dims, K and M columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from pipeproof.stages.torch.gathered import GatheredInput, source_of
from pipeproof.stages.torch.grouped import Groups, grouped_gradients, grouped_product, is_one_kernel

Tensor: TypeAlias = torch.Tensor


class Weight:
    """A weight, and the buffer in which its gradients add up.

    ``main`` is what the optimizer updates, and ``gradient`` is of its type. Layers compute with ``value``, which is
    ``main`` itself, or a copy rounded to a narrower type, made anew by ``renew``.
    """

    def __init__(self, main: Tensor, dtype: torch.dtype | None = None) -> None:
        self.main = main
        self.value = main if dtype is None else main.to(dtype)
        self.gradient = torch.zeros_like(main)

    def renew(self) -> None:
        """Round ``main`` to ``value`` once more, in place."""
        if self.value is not self.main:
            self.value.copy_(self.main)

    def lent(self) -> Weight:
        """The same weight as another layer computes with it: with a gradient of its own, that is one addend."""
        other = Weight(self.main)
        other.value = self.value
        return other

    def zero_gradient(self) -> None:
        """Begin the buffer as +0.0, in place.

        A buffer that began as the first micro-batch's gradient could hold -0.0 where one that began as +0.0 holds +0.0.
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

    Factors of a narrower type than the buffer's are multiplied with sums in
    the buffer's type, on a GPU by one product and on the CPU after widening.
    """
    if left.dtype == buffer.dtype:
        buffer.addmm_(left, right)
    elif buffer.is_cuda and buffer.dtype == torch.float32:
        torch.addmm(buffer, left, right, out_dtype=torch.float32, out=buffer)
    else:
        buffer.addmm_(left.to(buffer.dtype), right.to(buffer.dtype))


class WeightGradients:
    """Weight gradients of one micro-batch that are still to be computed, with all that they need."""

    def __init__(self) -> None:
        self._uses: deque[Callable[[], None]] = deque()

    def put_off(self, add: Callable[[], None]) -> None:
        """Keep a use of a weight for later."""
        self._uses.append(add)

    def accumulate(self) -> None:
        """Add the gradients, in the order in which backward came by, and free what they needed; once."""
        with torch.no_grad():
            while self._uses:
                self._uses.popleft()()


class SplitWeights:
    """The weights of one stage as its layers use them.

    ``backward`` runs one micro-batch's backward and collects what the uses of
    weights on its way put off.
    """

    def __init__(self, device: torch.device) -> None:
        self._collected = WeightGradients()
        self._anchor = torch.empty(0, device=device, requires_grad=True)  # what begins a graph where tokens do

    def backward(self, output: Tensor, gradient: Tensor | None) -> WeightGradients:
        """Compute the gradients of all inputs of ``output``; those of weights are returned, to be accumulated.

        ``gradient`` is that of ``output``, None for a scalar loss.
        """
        self._collected = WeightGradients()
        torch.autograd.backward([output], [gradient])
        collected, self._collected = self._collected, WeightGradients()
        return collected

    def product(self, activation: Tensor, weight: Weight, *, transposed: bool = False) -> Tensor:
        """``activation @ weight``: [.., K] and [K, M] to [.., M]; transposed, the weight is [M, K].

        An activation that is to be gathered again is not kept.
        """
        return _Product.apply(activation, weight, transposed, self._put_off, source_of(activation))

    def norm(self, activation: Tensor, weight: Weight, epsilon: float) -> Tensor:
        """RMSNorm over the last dim (arXiv:1910.07467) times the weight: [.., K] and [K] to [.., K]."""
        # A node of its own: where the norm is several operations it reads this several times, and beside a residual
        # the sum of their gradients would depend on the order in which autograd comes by.
        own = activation.view_as(activation)
        return F.rms_norm(own, (own.shape[-1],), _Late.apply(self._anchor, weight, self._put_off), epsilon)

    def scaled_and_shifted(self, activation: Tensor, scale: Weight, shift: Weight, sizes: Sequence[int]) -> Tensor:
        """``activation * scale + shift``, a number of ``scale`` for each group of columns: [.., K], [groups] and [K].

        ``sizes`` are those of the groups.
        """
        return _ScaledAndShifted.apply(activation, scale, shift, tuple(sizes), self._put_off)

    def grouped(self, activation: Tensor, weight: Weight, groups: Groups) -> Tensor:
        """Groups of rows, each times its own matrix: [N, K] and [E, K, M] to [N, M]."""
        return _Grouped.apply(activation, weight, groups, self._put_off)

    def rows(self, places: Tensor, weight: Weight) -> Tensor:
        """Row ``places[..]`` of ``weight`` for each place: [..] and [V, K] to [.., K]. Nothing flows further back."""
        return _Rows.apply(self._anchor, places, weight, self._put_off)

    def _put_off(self, add: Callable[[], None]) -> None:
        self._collected.put_off(add)


PutOff: TypeAlias = Callable[[Callable[[], None]], None]


class _Product(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """Products of matrices: what PyTorch makes of more dims depends on how they lie in memory, and so do its bits."""

    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, weight: Weight, transposed: bool, put_off: PutOff, source: GatheredInput | None
    ) -> Tensor:
        inputs = activation.reshape(-1, activation.shape[-1])
        if source is None:
            ctx.save_for_backward(inputs)
        else:
            source.use()
        ctx.weight, ctx.transposed, ctx.put_off, ctx.source = weight, transposed, put_off, source
        made = torch.mm(inputs, weight.value.t() if transposed else weight.value)
        return made.view(*activation.shape[:-1], made.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        weight, transposed, source, kept = ctx.weight, ctx.transposed, ctx.source, ctx.saved_tensors
        outputs = gradient.reshape(-1, gradient.shape[-1])

        def add() -> None:
            inputs = kept[0] if source is None else source.take().flatten(0, -2)
            left, right = (outputs, inputs) if transposed else (inputs, outputs)
            weight.add_product(left.t(), right)

        ctx.put_off(add)
        back = torch.mm(outputs, weight.value if transposed else weight.value.t())
        return back.view(*gradient.shape[:-1], back.shape[-1]), None, None, None, None


class _Late(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """A weight as plain autograd reads it: its gradient comes with that of the input, and is added when asked for."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Weight, put_off: PutOff) -> Tensor:
        ctx.weight, ctx.put_off = weight, put_off
        return weight.value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        weight = ctx.weight
        ctx.put_off(lambda: weight.add(gradient))
        return None, None, None


class _ScaledAndShifted(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, scale: Weight, shift: Weight, sizes: tuple[int, ...], put_off: PutOff
    ) -> Tensor:
        ctx.save_for_backward(activation)
        ctx.scale, ctx.shift, ctx.sizes, ctx.put_off = scale, shift, sizes, put_off
        return activation * _each_column(scale.value, sizes) + shift.value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (activation,), scale, shift, sizes = ctx.saved_tensors, ctx.scale, ctx.shift, ctx.sizes
        leading = tuple(range(gradient.dim() - 1))

        def add() -> None:
            of_columns = (gradient * activation).sum(leading)
            scale.add(torch.stack([part.sum() for part in of_columns.split(sizes)]))
            shift.add(gradient.sum(leading))

        ctx.put_off(add)
        return gradient * _each_column(scale.value, sizes), None, None, None, None


def _each_column(scale: Tensor, sizes: Sequence[int]) -> Tensor:
    """[groups] to [K]."""
    return torch.cat([number.expand(size) for number, size in zip(scale, sizes, strict=True)])


class _Grouped(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, activation: Tensor, weight: Weight, groups: Groups, put_off: PutOff) -> Tensor:
        ctx.save_for_backward(activation)
        ctx.weight, ctx.groups, ctx.put_off = weight, groups, put_off
        return grouped_product(activation, weight.value, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (activation,), weight, groups = ctx.saved_tensors, ctx.weight, ctx.groups
        gradient = gradient.contiguous()

        def add() -> None:
            if weight.gradient.dtype == activation.dtype and is_one_kernel(activation, weight.value):
                weight.add(grouped_gradients(activation, gradient, groups))
                return
            # A wider buffer takes sums of its own width, which the one kernel has not.
            parts = zip(weight.gradient, activation.split(groups.sizes), gradient.split(groups.sizes), strict=True)
            for buffer, inputs, outputs in parts:
                if len(inputs):
                    add_product(buffer, inputs.t(), outputs)

        ctx.put_off(add)
        return grouped_product(gradient, weight.value.transpose(1, 2), groups), None, None, None


class _Rows(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, places: Tensor, weight: Weight, put_off: PutOff) -> Tensor:
        ctx.save_for_backward(places)
        ctx.weight, ctx.put_off = weight, put_off
        return F.embedding(places, weight.value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (places,), weight = ctx.saved_tensors, ctx.weight
        rows = gradient.reshape(-1, gradient.shape[-1])

        def add() -> None:
            # Not index_add_, which adds in any order on a GPU.
            wide = rows.to(weight.gradient.dtype)
            weight.gradient.index_put_((places.reshape(-1),), wide, accumulate=True)

        ctx.put_off(add)
        return None, None, None, None
