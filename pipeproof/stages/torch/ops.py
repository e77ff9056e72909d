"""PyTorch's functions as the shared half of a stage calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy.typing as npt
import torch

from pipeproof.stages.common.ops import Ops
from pipeproof.stages.torch.again import computed_again
from pipeproof.stages.torch.functional import causal_attention, fork, rms_norm, rotate, wide_type
from pipeproof.stages.torch.gathered import GatheredInput

Tensor: TypeAlias = torch.Tensor


class TorchOps:
    """An ``Ops``."""

    concat = staticmethod(torch.cat)
    stack = staticmethod(torch.stack)
    chunk = staticmethod(torch.chunk)
    split = staticmethod(torch.split)
    permuted = staticmethod(torch.permute)
    zeros_like = staticmethod(torch.zeros_like)
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
    def alias(tensor: Tensor) -> Tensor:
        """As ``Ops.alias``: a view, which costs no kernel."""
        return tensor.view_as(tensor)

    @staticmethod
    def leaf(tensor: Tensor) -> Tensor:
        """As ``Ops.leaf``."""
        return tensor.detach().requires_grad_()

    @staticmethod
    def repeated(tensor: Tensor, number: int, dim: int) -> Tensor:
        """As ``Ops.repeated``, without a copy."""
        shape = [*tensor.shape[:dim], number, *tensor.shape[dim:]]
        return tensor.unsqueeze(dim).expand(shape)

    @staticmethod
    def wide(tensor: Tensor) -> Tensor:
        """As ``Ops.wide``."""
        return tensor.to(wide_type(tensor.dtype))

    @staticmethod
    def as_type_of(tensor: Tensor, like: Tensor) -> Tensor:
        """As ``Ops.as_type_of``."""
        return tensor.to(like.dtype)

    @staticmethod
    def masked_gain(kept: npt.NDArray[Any], gain: float, like: Tensor) -> Tensor:
        """As ``Ops.masked_gain``; the host waits for the copy to a GPU."""
        return torch.tensor(kept, device=like.device).to(like.dtype) * gain

    @staticmethod
    def gather_again(tensor: Tensor, gather: Callable[[], Tensor]) -> None:
        """As ``Ops.gather_again``."""
        GatheredInput(gather).mark(tensor)


OPS: Final[Ops] = TorchOps()


class _Passed(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
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
