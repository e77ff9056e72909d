"""Parts of a layer that are computed once more on the way back, in place of keeping what they made.

As arXiv:1604.06174 and, for the core of attention, arXiv:2205.05198, section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor


def computed_again(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``compute(*inputs)``, of which only the inputs are kept; backward computes it again and goes back through it.

    ``compute`` makes the same of the same values whenever it is called. Each input is a tensor with a gradient; the
    bits of the gradients are those of ``compute`` called directly.
    """
    return _Again.apply(compute, *inputs)


class _Again(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
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
