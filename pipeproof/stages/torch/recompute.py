"""Recomputation in backward, and inputs that W gathers again.

Recomputation follows arXiv:1604.06174 and, for the core of attention, arXiv:2205.05198, section 5.

With sequence parallelism each rank has its own tokens between layers, and products with weights read all tokens. If
the gathered tensor is kept for W, it takes T times the memory of the rank's own tokens. If it is not kept, W needs one
more gather (arXiv:2205.05198, section 4.2.2).
"""

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

    def use(self) -> None:
        """Count a product that will call ``take`` once."""
        self._num_uses += 1

    def take(self) -> Tensor:
        """Return the gathered tensor for one use."""
        gathered = self._gather() if self._tensor is None else self._tensor
        self._num_uses -= 1
        self._tensor = gathered if self._num_uses else None
        return gathered


def source_of(tensor: Tensor) -> GatheredInput | None:
    """The source of a tensor that must not be kept; None for any other tensor."""
    source: GatheredInput | None = getattr(tensor, _SOURCE, None)
    return source
