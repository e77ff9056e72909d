"""Parts of a layer that are computed once more on the way back, in place of keeping what they made.

As arXiv:1604.06174 and, for the core of attention, arXiv:2205.05198, section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import paddle
from paddle.autograd import PyLayer

Tensor: TypeAlias = paddle.Tensor


def computed_again(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``compute(*inputs)``, of which only the inputs are kept; backward computes it again and goes back through it.

    ``compute`` makes the same of the same values whenever it is called. Each input is a tensor with a gradient; the
    bits of the gradients are those of ``compute`` called directly.
    """
    return _Again.apply(compute, *inputs)


class _Again(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.compute, ctx.inputs = compute, tuple(x.detach() for x in inputs)
        return compute(*ctx.inputs)  # autograd is off inside a PyLayer's forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        for x in ctx.inputs:
            x.stop_gradient = False
        with paddle.enable_grad():
            output = ctx.compute(*ctx.inputs)
        paddle.autograd.backward([output], [gradient])
        return tuple(x.grad for x in ctx.inputs)
