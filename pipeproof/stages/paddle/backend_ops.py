"""Paddle's functions for the shared part of a stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.stages.common.backend_ops import BackendOps
from pipeproof.stages.common.weights import GatheredInput, mark
from pipeproof.stages.paddle.functional import causal_attention, fork, rms_norm, rotate, rotated_heads


class _Recompute(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], after: Callable[[], None] | None, *inputs: Tensor) -> Tensor:
        ctx.compute, ctx.after, ctx.inputs = compute, after, tuple(x.detach() for x in inputs)
        return compute(*ctx.inputs)  # autograd is off inside a PyLayer's forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        for x in ctx.inputs:
            x.stop_gradient = False
        with paddle.enable_grad():
            output = ctx.compute(*ctx.inputs)
        paddle.autograd.backward([output], [gradient])
        if ctx.after is not None:
            ctx.after()
        return tuple(x.grad for x in ctx.inputs)


class PaddleGatheredInput(GatheredInput):
    """A ``GatheredInput`` whose products are on small graphs of autograd."""

    def without_keeping(
        self, value_of: Callable[[Tensor], Tensor], part: Callable[[Tensor], Tensor] | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Wrap ``value_of``: autograd does not keep the tensor, but gathers it again when it is needed."""

        def value(x: Tensor) -> Tensor:
            self.use()

            def pack(saved: Tensor) -> Any:
                return self if saved.data_ptr() == x.data_ptr() else saved

            def unpack(saved: Any) -> Tensor:
                if saved is not self:
                    return saved
                gathered = self.take()
                return gathered if part is None else part(gathered)

            with paddle.autograd.saved_tensors_hooks(pack, unpack):
                return value_of(x)

        return value


class PartOfGathered:
    """The source of a part of a gathered tensor. All parts share one gather in W."""

    def __init__(self, whole: PaddleGatheredInput, part: Callable[[Tensor], Tensor]) -> None:
        self._whole, self._part = whole, part

    def without_keeping(self, value_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Counterpart of ``PaddleGatheredInput.without_keeping``."""
        return self._whole.without_keeping(value_of, self._part)


Tensor: TypeAlias = paddle.Tensor


class _AutogradNode(PyLayer):  # type: ignore[misc]  # Paddle ships no types
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


class PaddleOps:
    """Paddle's ``BackendOps``. Stages on Paddle compute in 32 or 64 bits, so nothing is widened."""

    autograd_node = staticmethod(_AutogradNode.apply)
    concat = staticmethod(paddle.concat)
    stack = staticmethod(paddle.stack)
    chunk = staticmethod(paddle.chunk)
    split = staticmethod(paddle.split)
    permute = staticmethod(paddle.transpose)
    take_rows = staticmethod(paddle.index_select)
    zeros_like = staticmethod(paddle.zeros_like)
    alias = staticmethod(paddle.clone)
    fork = staticmethod(fork)
    rms_norm = staticmethod(rms_norm)
    softmax = staticmethod(F.softmax)
    relu = staticmethod(F.relu)
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
    def leaf(tensor: Tensor) -> Tensor:
        """Implement ``BackendOps.leaf``."""
        leaf = tensor.detach()
        leaf.stop_gradient = False
        return leaf

    @staticmethod
    def repeat(tensor: Tensor, number: int, dim: int) -> Tensor:
        """Implement ``BackendOps.repeat``. The gradient adds the gradients of the copies in order."""
        return paddle.stack(fork(tensor, number), axis=dim)

    @staticmethod
    def widened(tensor: Tensor) -> Tensor:
        """Implement ``BackendOps.widened``: the tensor itself."""
        return tensor

    @staticmethod
    def as_type_of(tensor: Tensor, like: Tensor) -> Tensor:
        """Implement ``BackendOps.as_type_of``: the tensor itself."""
        assert tensor.dtype == like.dtype, (tensor.dtype, like.dtype)
        return tensor

    @staticmethod
    def masked_gain(mask: npt.NDArray[Any], gain: float, like: Tensor) -> Tensor:
        """Implement ``BackendOps.masked_gain``."""
        return paddle.to_tensor(np.where(mask, gain, 0.0), dtype=like.dtype)

    @staticmethod
    def constant(values: npt.NDArray[Any], like: Tensor) -> Tensor:
        """Implement ``BackendOps.constant``."""
        return paddle.to_tensor(values, dtype=None if values.dtype.kind == "i" else like.dtype)

    @staticmethod
    def unchosen(scores: Tensor, number: int) -> Tensor:
        """Implement ``BackendOps.unchosen``."""
        order = paddle.argsort(scores.detach(), axis=-1, descending=True, stable=True)
        zeros = paddle.zeros_like(scores)
        return paddle.where(paddle.argsort(order, axis=-1) >= number, zeros - np.inf, zeros)

    @staticmethod
    def regather_input(tensor: Tensor, gather: Callable[[], Tensor]) -> None:
        """Implement ``BackendOps.regather_input``."""
        mark(PaddleGatheredInput(gather), tensor)


OPS: Final[BackendOps] = PaddleOps()
