"""The weights of the uncut PyTorch reference, and the three ways in which a gradient is added inside an operation.

Where stages run, a product adds its weight's gradient to the buffer inside the
product, and a lookup row by row: sums of two rounded addends have other bits.
So products and lookups are Functions here, with buffers that begin as +0.0;
everything else is plain autograd, whose gradients end up in the same buffers.

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
    """Weights by name, as leaves of type ``main_dtype``, with which the model computes in ``dtype``.

    ``borrowers`` are the layers that compute with the embedding's weight, too. Each has a buffer of its own, over all
    micro-batches, and at the end of the step these are added to the embedding's in the order of layers.
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
        """All buffers are +0.0."""
        self._borrowed.clear()
        for weight in self.main.values():
            weight.grad = torch.zeros_like(weight)

    def end_backward(self) -> None:
        """Add what borrowers made of the embedding's weight to its own gradient."""
        with torch.no_grad():
            for gradient in self._borrowed.values():
                self.main[EMBEDDING].grad += gradient

    def value(self, name: str) -> Tensor:
        """A weight in the type of the model, on the way to its gradient."""
        return self.main[name].to(self._dtype)

    def product(self, x: Tensor, name: str) -> Tensor:
        """``x @ weight``: [.., K] to [.., M]."""
        weight = self.main[name]
        return _Product.apply(x, weight.detach(), weight.grad)

    def expert_products(self, x: Tensor, name: str, sizes: Sequence[int]) -> Tensor:
        """``x @ weight[e]`` for the next ``sizes[e]`` rows of [N, K]: [N, M].

        16 bits with sums in 32 have a product of their own in PyTorch, with other bits on a GPU than one by one.
        """
        weight = self.main[name]
        assert weight.grad is not None
        if x.dtype == torch.bfloat16 and not any(size % 8 for size in weight.shape[1:]) and hasattr(F, "grouped_mm"):
            return _ExpertProducts.apply(x, weight.detach().to(x.dtype), weight.grad, sizes)
        parts = zip(x.split(list(sizes)), weight.detach(), weight.grad, strict=True)
        return torch.cat([_Product.apply(*part) for part in parts])

    def tied_product(self, x: Tensor, layer: str) -> Tensor:
        """``x @ embedding^T``, for a layer that borrows it."""
        return _Product.apply(x, self.main[EMBEDDING].detach().t(), self._buffer(layer).t())

    def rows(self, places: Tensor, layer: str) -> Tensor:
        """Rows of the embedding, [..] to [.., K]."""
        weight = self.main[EMBEDDING]
        return _Rows.apply(weight, places, self._buffer(layer), self._dtype)

    def _buffer(self, layer: str) -> Tensor:
        weight = self.main[EMBEDDING]
        buffer = weight.grad if layer == "embed" else self._borrowed.setdefault(layer, torch.zeros_like(weight))
        assert buffer is not None
        return buffer.detach()


class _Product(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, x: Tensor, main: Tensor, buffer: Tensor) -> Tensor:
        weight, rows = main.to(x.dtype), x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.buffer = buffer
        return (rows @ weight).reshape(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        buffer, of_rows = ctx.buffer, gradient.reshape(-1, gradient.shape[-1])
        of_input = (of_rows @ weight.t()).reshape(*gradient.shape[:-1], weight.shape[0])
        if not buffer.is_contiguous():  # the transpose of one: of it the product is computed
            buffer, rows, of_rows = buffer.t(), of_rows, rows
        _add_product(buffer, rows, of_rows)
        return of_input, None, None


def _add_product(buffer: Tensor, rows: Tensor, of_rows: Tensor) -> None:
    """``buffer += rows^T @ of_rows``, rounded once."""
    if len(rows) == 0:
        pass
    elif rows.dtype == buffer.dtype:
        buffer.addmm_(rows.t(), of_rows)
    elif buffer.is_cuda and buffer.dtype == torch.float32:
        torch.addmm(buffer, rows.t(), of_rows, out_dtype=buffer.dtype, out=buffer)
    else:
        buffer.addmm_(rows.to(buffer.dtype).t(), of_rows.to(buffer.dtype))


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
    def forward(ctx: Any, weight: Tensor, places: Tensor, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(places)
        ctx.buffer = buffer
        return F.embedding(places, weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (places,) = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1]).to(ctx.buffer.dtype)
        ctx.buffer.index_put_((places.reshape(-1),), rows, accumulate=True)
        return None, None, None, None


def copies(x: Tensor, number: int) -> tuple[Tensor, ...]:
    """The tensor for several readers, whose gradients are added in their order."""
    made: tuple[Tensor, ...] = _Copies.apply(x, number)
    return made


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
