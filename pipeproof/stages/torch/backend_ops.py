"""PyTorch's functions for the shared part of a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy.typing as npt
import torch

from pipeproof.stages.common.backend_ops import BackendOps
from pipeproof.stages.common.weights import GatheredInput, mark
from pipeproof.stages.torch.functional import causal_attention, fork, rms_norm, rotate, rotated_heads, wide_type

Tensor: TypeAlias = torch.Tensor


class _Recompute(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], after: Callable[[], None] | None, *inputs: Tensor) -> Tensor:
        ctx.compute, ctx.after = compute, after
        ctx.save_for_backward(*inputs)
        return compute(*inputs)  # autograd is off inside a Function's forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.compute(*inputs)
        torch.autograd.backward([output], [gradient])
        if ctx.after is not None:
            ctx.after()
        return None, None, *[x.grad for x in inputs]


class _AutogradNode(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Sequence[Tensor]],
        backward: Callable[..., Sequence[Tensor]],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.back = backward
        return tuple(forward(*inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.back(*gradients)


class TorchOps:
    """PyTorch's ``BackendOps``."""

    autograd_node = staticmethod(_AutogradNode.apply)
    concat = staticmethod(torch.cat)
    stack = staticmethod(torch.stack)
    chunk = staticmethod(torch.chunk)
    split = staticmethod(torch.split)
    permute = staticmethod(torch.permute)
    zeros_like = staticmethod(torch.zeros_like)
    fork = staticmethod(fork)
    rms_norm = staticmethod(rms_norm)
    softmax = staticmethod(torch.softmax)
    relu = staticmethod(torch.relu)
    rotate = staticmethod(rotate)
    rotated_heads = staticmethod(rotated_heads)
    causal_attention = staticmethod(causal_attention)

    @staticmethod
    def recompute_in_backward(
        compute: Callable[..., Tensor], *inputs: Tensor, after: Callable[[], None] | None = None
    ) -> Tensor:
        """Implement ``BackendOps.recompute_in_backward``."""
        return _Recompute.apply(compute, after, *inputs)

    @staticmethod
    def alias(tensor: Tensor) -> Tensor:
        """Implement ``BackendOps.alias``: a view, so no kernel runs."""
        return tensor.view_as(tensor)

    @staticmethod
    def take_rows(tensor: Tensor, indices: Tensor) -> Tensor:
        """Implement ``BackendOps.take_rows``."""
        return tensor.index_select(0, indices)

    @staticmethod
    def leaf(tensor: Tensor) -> Tensor:
        """Implement ``BackendOps.leaf``."""
        return tensor.detach().requires_grad_()

    @staticmethod
    def repeat(tensor: Tensor, number: int, dim: int) -> Tensor:
        """Implement ``BackendOps.repeat``, without a copy."""
        shape = [*tensor.shape[:dim], number, *tensor.shape[dim:]]
        return tensor.unsqueeze(dim).expand(shape)

    @staticmethod
    def widened(tensor: Tensor) -> Tensor:
        """Implement ``BackendOps.widened``."""
        return tensor.to(wide_type(tensor.dtype))

    @staticmethod
    def as_type_of(tensor: Tensor, like: Tensor) -> Tensor:
        """Implement ``BackendOps.as_type_of``."""
        return tensor.to(like.dtype)

    @staticmethod
    def masked_gain(mask: npt.NDArray[Any], gain: float, like: Tensor) -> Tensor:
        """Implement ``BackendOps.masked_gain``; a mask that was drawn on the device stays there."""
        return torch.as_tensor(mask, device=like.device).to(like.dtype) * gain

    @staticmethod
    def constant(values: npt.NDArray[Any], like: Tensor) -> Tensor:
        """Implement ``BackendOps.constant``."""
        dtype = None if values.dtype.kind == "i" else like.dtype
        return torch.tensor(values, dtype=dtype, device=like.device)

    @staticmethod
    def unchosen(scores: Tensor, number: int) -> Tensor:
        """Implement ``BackendOps.unchosen``."""
        order = scores.detach().argsort(dim=-1, descending=True, stable=True)
        return torch.zeros_like(scores).masked_fill(order.argsort(dim=-1) >= number, -torch.inf)

    @staticmethod
    def regather_input(tensor: Tensor, gather: Callable[[], Tensor]) -> None:
        """Implement ``BackendOps.regather_input``."""
        mark(GatheredInput(gather), tensor)


OPS: Final[BackendOps] = TorchOps()
