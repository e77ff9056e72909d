"""Losses, biases and visits of routers on the device, which stay there; see ``stages.common.balance``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeproof.specs.model import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.balance import Balance
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.functional import wide_type

Tensor: TypeAlias = torch.Tensor


class TorchBalance(Balance):
    """A ``Balance`` on the device. Losses and biases of 16-bit runs are float32."""

    def __init__(self, plan: PlanSpec, layers: Sequence[Layer], device: torch.device, *, adds_losses: bool) -> None:
        self._dtype, self._device = wide_type(getattr(torch, plan.run.dtype)), device
        super().__init__(OPS, plan, layers, adds_losses=adds_losses)

    def _zero_bias(self) -> Tensor:
        assert self._moe is not None
        return torch.zeros(self._moe.num_experts, dtype=self._dtype, device=self._device)

    def _total(self, visits: Iterable[Tensor]) -> Tensor:
        return torch.stack([*visits]).sum(0)

    def _move(self, bias: Tensor, distance: Tensor) -> None:
        assert self._rate is not None
        bias.add_(torch.sign(distance).to(bias.dtype) * self._rate)

    def _array(self, value: Tensor) -> npt.NDArray[Any]:
        return np.array(value.cpu().numpy())

    def _losses_of(self, logits: Tensor) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Implement ``Balance._losses_of``, without autograd.

        Its thread of a GPU may hold a backward that has given the turn to the forward which asks for this.
        """
        assert self._moe is not None
        outputs = OPS.widened(logits.detach())
        with torch.no_grad():
            found = {name: _LOSSES[name](outputs, self._moe, weight) for name, weight in self._weights.items()}
            losses = {name: loss for name, (loss, _) in found.items()}
            if not logits.requires_grad:
                return losses, None
            return losses, functools.reduce(torch.add, [slope for _, slope in found.values()]).to(logits.dtype)


def _even_loads(logits: Tensor, moe: MoeSpec, weight: float) -> tuple[Tensor, Tensor]:
    """The auxiliary loss times its weight, and its gradient [N, E]: the operations that autograd would run."""
    scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
    totals = None if moe.score == "softmax" else scores.sum(-1, keepdim=True)
    parts = scores if totals is None else scores / totals
    largest = scores.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    visits = torch.zeros_like(logits).scatter_(-1, largest, 1.0).sum(0)  # bincount would make the host wait
    loads = visits * (moe.num_experts / largest.numel())
    loss = (parts.mean(0) * loads).sum() * weight
    of_parts = (loads * weight).expand_as(parts) / len(parts)
    if totals is None:
        return loss, torch.ops.aten._softmax_backward_data(of_parts, scores, -1, scores.dtype)  # noqa: SLF001 - its name
    of_totals = (-of_parts * (scores / totals / totals)).sum(-1, keepdim=True)
    return loss, torch.ops.aten.sigmoid_backward(of_parts / totals + of_totals, scores)


def _small_outputs(logits: Tensor, _: MoeSpec, weight: float) -> tuple[Tensor, Tensor]:
    """The z loss times its weight, and its gradient [N, E]: the operations that autograd would run."""
    sizes = logits.logsumexp(-1)
    of_sizes = (sizes * 2) * (torch.full_like(sizes, weight) / len(sizes))
    return sizes.square().mean() * weight, of_sizes.unsqueeze(-1) * (logits - sizes.unsqueeze(-1)).exp()


_LOSSES: Mapping[str, Callable[[Tensor, MoeSpec, float], tuple[Tensor, Tensor]]] = {
    "aux": _even_loads, "z": _small_outputs,
}  # fmt: skip
