"""Losses, biases and visits of routers on the device, which stay there; see ``stages.common.balance``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeproof.specs.model_parts import MoeSpec
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
        assert self._moe is not None
        leaf = OPS.leaf(OPS.widened(logits.detach()))
        with torch.enable_grad():
            losses = {name: _LOSSES[name](leaf, self._moe) * weight for name, weight in self._weights.items()}
        detached = {name: loss.detach() for name, loss in losses.items()}
        if not logits.requires_grad:
            return detached, None
        torch.autograd.backward(list(losses.values()))
        return detached, leaf.grad.to(logits.dtype)


def _even_loads(logits: Tensor, moe: MoeSpec) -> Tensor:
    if moe.score == "softmax":
        scores = parts = logits.softmax(-1)
    else:
        scores = logits.sigmoid()
        parts = scores / scores.sum(-1, keepdim=True)
    largest = scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    visits = torch.zeros_like(logits).scatter_(-1, largest, 1.0).sum(0)  # bincount would make the host wait
    return (parts.mean(0) * (visits * (moe.num_experts / largest.numel()))).sum()


def _small_outputs(logits: Tensor, moe: MoeSpec) -> Tensor:
    return logits.logsumexp(-1).square().mean()


_LOSSES: Mapping[str, Callable[[Tensor, MoeSpec], Tensor]] = {"aux": _even_loads, "z": _small_outputs}
