"""Load balance of the experts of one stage, on one rank: router losses, and biases of the expert choice.

``pipeproof.stages.describe.balance`` defines them. A router's losses depend on its outputs alone. Forward computes
them and their gradient at once; the backward of the router adds this gradient to the one from the experts. So no other
stage has to know about them, and a layer with a recomputed forward adds them once. Everything stays on the device until
``values`` is called.

Shape letters: N tokens, E experts, k of them for a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.balance import bias_key, loss_key, loss_weights, routers
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.torch.functional import wide_type

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = npt.NDArray[Any]


class Balance:
    """The routers of one stage on one rank.

    ``adds_losses`` is true on the first TP rank only, because all TP ranks route the same tokens. Losses and biases of
    16-bit runs are float32.
    """

    def __init__(self, plan: PlanSpec, layers: Sequence[Layer], device: torch.device, *, adds_losses: bool) -> None:
        moe = plan.model.moe
        self._moe = moe
        self._weights = loss_weights(plan) if adds_losses else {}
        self._rate = None if moe is None else moe.expert_bias_rate
        self.biases: dict[str, Tensor] = {}
        """Bias of each router, [E]; empty if the plan has no biases."""
        if moe is not None and self._rate is not None:
            dtype = wide_type(getattr(torch, plan.run.dtype))
            self.biases = {name: torch.zeros(moe.num_experts, dtype=dtype, device=device) for name in routers(layers)}
        self._losses: dict[str, Tensor] = {}
        self._visits: dict[str, dict[tuple[int, int], Tensor]] = {}
        self._loads: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Reset everything but the biases."""
        self._losses.clear()
        self._visits.clear()
        self._loads.clear()

    def of(self, experts: str, micro_batch: int, split: int) -> RouterBalance:
        """The view of one router and work item."""
        return RouterBalance(self, experts, micro_batch, split)

    def load(self, experts: str) -> Tensor:
        """Visits to each expert of a router in this step, int64 [E]: this rank's, unless ``set_load`` was called."""
        if experts not in self._loads:
            self._loads[experts] = torch.stack(list(self._visits[experts].values())).sum(0)
        return self._loads[experts]

    def set_load(self, experts: str, load: Tensor) -> None:
        """Set the visits, summed over ranks."""
        self._loads[experts] = load

    def move_biases(self) -> None:
        """End the step: move each bias by the rate towards the mean load."""
        for experts, bias in self.biases.items():
            assert self._rate is not None
            load = self.load(experts)
            bias.add_(torch.sign(load.sum() - load * len(load)).to(bias.dtype) * self._rate)

    def values(self) -> dict[str, Array]:
        """The results of the step, by name: each loss that this rank added, and each bias."""
        biases = {bias_key(experts): bias for experts, bias in self.biases.items()}
        return {key: np.array(value.cpu().numpy()) for key, value in (self._losses | biases).items()}

    def enter(self, logits: Tensor, key_of: Callable[[str], str]) -> Tensor:
        """Return a router's outputs [N, E] with a backward that adds the gradient of the router's losses."""
        if not self._weights:
            return logits
        assert self._moe is not None
        leaf = logits.detach().to(wide_type(logits.dtype)).requires_grad_()
        with torch.enable_grad():
            losses = {name: _LOSSES[name](leaf, self._moe) * weight for name, weight in self._weights.items()}
        self._losses |= {key_of(name): loss.detach() for name, loss in losses.items()}
        if not logits.requires_grad:  # autograd is off: this forward will be recomputed
            return logits
        torch.autograd.backward(list(losses.values()))
        return _Enter.apply(logits, leaf.grad.to(logits.dtype))

    def count(self, experts: str, work_item: tuple[int, int], visits: Tensor) -> None:
        """Store the visits [E] of a work item. A recomputation does not count twice."""
        if experts in self.biases:
            self._visits.setdefault(experts, {})[work_item] = visits


class RouterBalance:
    """Balance of one router for one work item."""

    def __init__(self, balance: Balance, experts: str, micro_batch: int, split: int) -> None:
        self._balance, self._experts, self._work_item = balance, experts, (micro_batch, split)

    @property
    def bias(self) -> Tensor | None:
        """The bias [E], None without biases."""
        return self._balance.biases.get(self._experts)

    def enter(self, logits: Tensor) -> Tensor:
        """Return the outputs [N, E] with a backward that adds the gradient of the losses."""
        return self._balance.enter(logits, lambda loss: loss_key(loss, self._experts, *self._work_item))

    def count(self, visits: Tensor) -> None:
        """Store the visits to each expert [E]."""
        self._balance.count(self._experts, self._work_item, visits)


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


class _Enter(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (of_losses,) = ctx.saved_tensors
        return gradient + of_losses, None
