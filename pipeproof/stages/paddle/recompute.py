"""Recomputation in backward, and inputs that W gathers again.

Recomputation follows arXiv:1604.06174 and, for the core of attention, arXiv:2205.05198, section 5.

With sequence parallelism each rank has its own tokens between layers, and products with weights read all tokens. If
the gathered tensor is kept for W, it takes T times the memory of the rank's own tokens. If it is not kept, W needs one
more gather (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import paddle
from paddle.autograd import PyLayer

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


_SOURCE = "pipeproof_gathered_input"


class GatheredInput:
    """The source of a gathered tensor that products with weights read. ``gather`` returns it with the same bits.

    W gathers at the first use and frees the tensor after the last.
    """

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self._gather, self._num_uses = gather, 0
        self._tensor: Tensor | None = None

    def mark(self, *tensors: Tensor) -> None:
        """Mark tensors that have the values of ``gather``."""
        for tensor in tensors:
            setattr(tensor, _SOURCE, self)

    def mark_part(self, tensor: Tensor, part: Callable[[Tensor], Tensor]) -> None:
        """Mark a tensor that is a part of the result of ``gather``."""
        PartOfGathered(self, part).mark(tensor)

    def without_keeping(
        self, value_of: Callable[[Tensor], Tensor], part: Callable[[Tensor], Tensor] | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Wrap ``value_of`` so that autograd does not keep the tensor, but gathers it again when it is needed."""

        def value(x: Tensor) -> Tensor:
            self._num_uses += 1

            def pack(saved: Tensor) -> Any:
                return self if saved.data_ptr() == x.data_ptr() else saved

            def unpack(saved: Any) -> Tensor:
                if saved is not self:
                    return saved
                gathered = self._take()
                return gathered if part is None else part(gathered)

            with paddle.autograd.saved_tensors_hooks(pack, unpack):
                return value_of(x)

        return value

    def _take(self) -> Tensor:
        gathered = self._gather() if self._tensor is None else self._tensor
        self._num_uses -= 1
        self._tensor = gathered if self._num_uses else None
        return gathered


class PartOfGathered:
    """The source of a part of a gathered tensor. All parts share one gather in W."""

    def __init__(self, whole: GatheredInput, part: Callable[[Tensor], Tensor]) -> None:
        self._whole, self._part = whole, part

    def mark(self, *tensors: Tensor) -> None:
        """Mark tensors that have the values of the part."""
        for tensor in tensors:
            setattr(tensor, _SOURCE, self)

    def without_keeping(self, value_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Counterpart of ``GatheredInput.without_keeping``."""
        return self._whole.without_keeping(value_of, self._part)


def source_of(tensor: Tensor) -> GatheredInput | PartOfGathered | None:
    """The source of a tensor that must not be kept; None for any other tensor."""
    source: GatheredInput | PartOfGathered | None = getattr(tensor, _SOURCE, None)
    return source
