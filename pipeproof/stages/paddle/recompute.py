"""Recomputation in backward, and inputs that W gathers again.

Recomputation follows arXiv:1604.06174 and, for the core of attention, arXiv:2205.05198, section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import paddle
from paddle.autograd import PyLayer

from pipeproof.stages.common.gathered_input import GatheredInput

Tensor: TypeAlias = paddle.Tensor


def recompute_in_backward(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return ``compute(*inputs)`` and keep only the inputs. Backward computes it again and differentiates it.

    ``compute`` must be deterministic. Each input is a tensor with a gradient. The gradients have the bits of a direct
    call of ``compute``.
    """
    return _Recompute.apply(compute, *inputs)


class _Recompute(PyLayer):  # type: ignore[misc]  # Paddle ships no types
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


class PaddleGatheredInput(GatheredInput):
    """A ``GatheredInput`` whose products are on small graphs of autograd."""

    def without_keeping(
        self, value_of: Callable[[Tensor], Tensor], part: Callable[[Tensor], Tensor] | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Wrap ``value_of`` so that autograd does not keep the tensor, but gathers it again when it is needed."""

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
