"""The weights of the unpartitioned PyTorch reference, and three operations that add a gradient inside the operation.

On the stages a product adds its weight's gradient to the buffer inside the product, and a lookup row by row. Sums of
two rounded addends have other bits. So products and lookups are Functions here, with buffers that begin as +0.0. The
rest is plain autograd, whose gradients go to the same buffers.

Shape letters: N rows of any number of leading dims, K and M columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import torch
import torch.nn.functional as F

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = npt.NDArray[Any]

EMBEDDING = "embed.weight"


class WholeWeights:
    """Weights by name, leaves of type ``main_dtype``. The model computes in ``dtype``.

    Each layer that borrows the embedding's weight has its own gradient buffer over all micro-batches. At the end of the
    step these buffers are added to the embedding's gradient in the order of layers.
    """

    def __init__(
        self, arrays: Mapping[str, Array], dtype: torch.dtype, main_dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype = dtype
        self.main = {
            name: torch.tensor(array, device=device).to(main_dtype).requires_grad_() for name, array in arrays.items()
        }
        self._borrowed: dict[str, Tensor] = {}

    def begin_step(self) -> None:
        """Set all buffers to +0.0."""
        self._borrowed.clear()
        for weight in self.main.values():
            weight.grad = torch.zeros_like(weight)

    def end_backward(self) -> None:
        """Add the borrowers' gradients of the embedding's weight to its own gradient."""
        with torch.no_grad():
            for gradient in self._borrowed.values():
                self.main[EMBEDDING].grad += gradient

    def value(self, name: str) -> Tensor:
        """A weight in the type of the model, with a gradient."""
        return self.main[name].to(self._dtype)

    def product(self, x: Tensor, name: str, dtype: str | None = None) -> Tensor:
        """``x @ weight``: [.., K] to [.., M]; with a wider ``dtype`` in that, and so its gradients, before rounding."""
        weight = self.main[name]
        wide = x.dtype if dtype is None else torch.promote_types(x.dtype, getattr(torch, dtype))
        return _Product.apply(x, weight.detach(), weight.grad, wide)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """``product`` with the weight of that name, plus the bias if the model has it."""
        y = self.product(x, f"{name}.weight")
        if f"{name}.bias" not in self.main:
            return y
        # Rows, because the order in which more dims are added depends on the gradient's memory layout.
        return (y.reshape(-1, y.shape[-1]) + self.value(f"{name}.bias")).reshape(y.shape)

    def expert_products(self, x: Tensor, name: str, sizes: Sequence[int]) -> Tensor:
        """``x @ weight[e]`` for the next ``sizes[e]`` rows of [N, K]: [N, M].

        For bfloat16 PyTorch has a grouped product with float32 sums. On a GPU its bits differ from single products.
        """
        weight = self.main[name]
        assert weight.grad is not None
        if x.dtype == torch.bfloat16 and not any(size % 8 for size in weight.shape[1:]) and hasattr(F, "grouped_mm"):
            return _ExpertProducts.apply(x, weight.detach().to(x.dtype), weight.grad, sizes)
        parts = zip(x.split(list(sizes)), weight.detach(), weight.grad, strict=True)
        return torch.cat([_Product.apply(*part, x.dtype) for part in parts])

    def tied_product(self, x: Tensor, layer: str) -> Tensor:
        """``x @ embedding^T`` for a layer that borrows the embedding's weight."""
        return _Product.apply(x, self.main[EMBEDDING].detach().t(), self._buffer(layer).t(), x.dtype)

    def rows(self, indices: Tensor, layer: str) -> Tensor:
        """Rows of the embedding, [..] to [.., K]; a layer may have one of its own."""
        own = self.main.get(f"{layer}.{EMBEDDING}")
        if own is not None:
            assert own.grad is not None
            return _Rows.apply(own, indices, own.grad.detach(), self._dtype)
        return _Rows.apply(self.main[EMBEDDING], indices, self._buffer(layer), self._dtype)

    def _buffer(self, layer: str) -> Tensor:
        weight = self.main[EMBEDDING]
        buffer = weight.grad if layer == "embed" else self._borrowed.setdefault(layer, torch.zeros_like(weight))
        assert buffer is not None
        return buffer.detach()


class _Product(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, x: Tensor, main: Tensor, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        weight, rows = main.to(x.dtype).to(dtype), x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.buffer = buffer
        return (rows.to(dtype) @ weight).reshape(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        buffer, row_gradients = ctx.buffer, gradient.reshape(-1, gradient.shape[-1])
        input_gradient = (row_gradients @ weight.t()).to(rows.dtype).reshape(*gradient.shape[:-1], weight.shape[0])
        if rows.dtype != row_gradients.dtype:
            buffer.add_((rows.to(row_gradients.dtype).t() @ row_gradients).to(rows.dtype))
            return input_gradient, None, None, None
        if not buffer.is_contiguous():  # a transpose: compute the transposed product into the buffer itself
            buffer, rows, row_gradients = buffer.t(), row_gradients, rows
        _add_product(buffer, rows, row_gradients)
        return input_gradient, None, None, None


def _add_product(buffer: Tensor, rows: Tensor, row_gradients: Tensor) -> None:
    """``buffer += rows^T @ row_gradients``, rounded once."""
    if len(rows) == 0:
        pass
    elif rows.dtype == buffer.dtype:
        buffer.addmm_(rows.t(), row_gradients)
    elif buffer.is_cuda and buffer.dtype == torch.float32:
        torch.addmm(buffer, rows.t(), row_gradients, out_dtype=buffer.dtype, out=buffer)
    else:
        buffer.addmm_(rows.to(buffer.dtype).t(), row_gradients.to(buffer.dtype))


class _ExpertProducts(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, buffer: Tensor, sizes: Sequence[int]) -> Tensor:
        ends = torch.tensor(sizes, device=x.device).cumsum(0, dtype=torch.int32)
        ctx.save_for_backward(x, weight, ends)
        ctx.buffer, ctx.sizes = buffer, list(sizes)
        return F.grouped_mm(x, weight, offs=ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        if ctx.buffer.dtype == x.dtype:
            ctx.buffer.add_(F.grouped_mm(x.mT, gradient, offs=ends))
        else:
            for part in zip(ctx.buffer, x.split(ctx.sizes), gradient.split(ctx.sizes), strict=True):
                _add_product(*part)
        return F.grouped_mm(gradient, weight.mT, offs=ends), None, None, None


class _Rows(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.buffer = buffer
        return F.embedding(indices, weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1]).to(ctx.buffer.dtype)
        ctx.buffer.index_put_((indices.reshape(-1),), rows, accumulate=True)
        return None, None, None, None


def copies(x: Tensor, number: int) -> tuple[Tensor, ...]:
    """Return one copy for each reader. Their gradients are added in order."""
    outputs: tuple[Tensor, ...] = _Copies.apply(x, number)
    return outputs


class _Copies(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> tuple[Tensor, ...]:
        return tuple(x.clone() for _ in range(number))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        total = gradients[0]
        for gradient in gradients[1:]:
            total = total + gradient
        return total, None
