"""Recomputation in backward: arXiv:1604.06174 and, for the core of attention, arXiv:2205.05198, section 5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor


def recompute_in_backward(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``compute(*inputs)`` and keep only the inputs. Backward computes it again and differentiates it.

    ``compute`` must be deterministic. Each input is a tensor with a gradient. The gradients have the bits of a direct
    call of ``compute``.
    """
    return _Recompute.apply(compute, *inputs)


class _Recompute(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(*inputs)
        return compute(*inputs)  # autograd is off inside a Function's forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.compute(*inputs)
        torch.autograd.backward([output], [gradient])
        return None, *[x.grad for x in inputs]
