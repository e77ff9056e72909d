"""Paddle's functions as the shared half of a stage calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
from paddle.autograd import PyLayer

from pipeproof.stages.common.ops import Ops
from pipeproof.stages.paddle.again import computed_again
from pipeproof.stages.paddle.expert_exchange import fork
from pipeproof.stages.paddle.functional import causal_attention, rms_norm, rotate
from pipeproof.stages.paddle.gathered import GatheredInput

Tensor: TypeAlias = paddle.Tensor


class PaddleOps:
    """An ``Ops``. Stages on Paddle compute in 32 or 64 bits, so nothing is widened."""

    concat = staticmethod(paddle.concat)
    stack = staticmethod(paddle.stack)
    chunk = staticmethod(paddle.chunk)
    split = staticmethod(paddle.split)
    permuted = staticmethod(paddle.transpose)
    zeros_like = staticmethod(paddle.zeros_like)
    alias = staticmethod(paddle.clone)
    fork = staticmethod(fork)
    computed_again = staticmethod(computed_again)
    rms_norm = staticmethod(rms_norm)
    rotate = staticmethod(rotate)
    causal_attention = staticmethod(causal_attention)

    @staticmethod
    def passed(
        forward: Callable[..., Sequence[Tensor]], backward: Callable[..., Sequence[Tensor]], *inputs: Tensor
    ) -> Sequence[Tensor]:
        """As ``Ops.passed``."""
        made: Sequence[Tensor] = _Passed.apply(forward, backward, *inputs)
        return made

    @staticmethod
    def leaf(tensor: Tensor) -> Tensor:
        """As ``Ops.leaf``."""
        own = tensor.detach()
        own.stop_gradient = False
        return own

    @staticmethod
    def repeated(tensor: Tensor, number: int, dim: int) -> Tensor:
        """As ``Ops.repeated``; the gradient adds those of the repetitions in their order."""
        return paddle.stack(fork(tensor, number), axis=dim)

    @staticmethod
    def wide(tensor: Tensor) -> Tensor:
        """As ``Ops.wide``: the tensor itself."""
        return tensor

    @staticmethod
    def as_type_of(tensor: Tensor, like: Tensor) -> Tensor:
        """As ``Ops.as_type_of``: the tensor itself."""
        assert tensor.dtype == like.dtype, (tensor.dtype, like.dtype)
        return tensor

    @staticmethod
    def masked_gain(kept: npt.NDArray[Any], gain: float, like: Tensor) -> Tensor:
        """As ``Ops.masked_gain``."""
        return paddle.to_tensor(np.where(kept, gain, 0.0), dtype=like.dtype)

    @staticmethod
    def gather_again(tensor: Tensor, gather: Callable[[], Tensor]) -> None:
        """As ``Ops.gather_again``."""
        GatheredInput(gather).mark(tensor)


OPS: Final[Ops] = PaddleOps()


class _Passed(PyLayer):  # type: ignore[misc]  # Paddle ships no types
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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(ctx.back(*gradients))
