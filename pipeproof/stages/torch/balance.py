"""What keeps the experts of one stage evenly loaded, on one rank: losses of routers, and biases of the choice.

What they are is said in ``pipeproof.stages.describe.balance``. A router's
losses are computed where it is, from its outputs alone, and their gradient is
at once; the backward of the router adds it to what experts make of the
outputs. So no other stage knows of them, and a layer whose forward comes again
puts them in once. All stays on the device until ``shown``.

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
from pipeproof.stages.describe.layers import Layer
from pipeproof.stages.torch.functional import wide_type

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = npt.NDArray[Any]


class Balance:
    """The routers of one stage on one rank.

    ``puts_in_losses`` is for the first of the TP ranks, which all route the same tokens. Losses and biases of runs in
    16 bits are float32.
    """

    def __init__(self, plan: PlanSpec, layers: Sequence[Layer], device: torch.device, *, puts_in_losses: bool) -> None:
        moe = plan.model.moe
        self._moe = moe
        self._weights = loss_weights(plan) if puts_in_losses else {}
        self._rate = None if moe is None else moe.expert_bias_rate
        self.biases: dict[str, Tensor] = {}
        """Of each router [E]; none where they do not move."""
        if moe is not None and self._rate is not None:
            dtype = wide_type(getattr(torch, plan.run.dtype))
            self.biases = {name: torch.zeros(moe.num_experts, dtype=dtype, device=device) for name in routers(layers)}
        self._losses: dict[str, Tensor] = {}
        self._visits: dict[str, dict[tuple[int, int], Tensor]] = {}
        self._loads: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Forget the step before, but for the biases."""
        self._losses.clear()
        self._visits.clear()
        self._loads.clear()

    def of(self, experts: str, micro_batch: int, piece: int) -> RouterBalance:
        """One router's unit of work."""
        return RouterBalance(self, experts, micro_batch, piece)

    def load(self, experts: str) -> Tensor:
        """How many visits, int64 [E], the experts of a router have had in the step: of this rank, unless it is set."""
        if experts not in self._loads:
            self._loads[experts] = torch.stack(list(self._visits[experts].values())).sum(0)
        return self._loads[experts]

    def set_load(self, experts: str, load: Tensor) -> None:
        """Put in place what was summed over ranks."""
        self._loads[experts] = load

    def move_biases(self) -> None:
        """The end of a step: each bias by the rate towards the mean load."""
        for experts, bias in self.biases.items():
            assert self._rate is not None
            load = self.load(experts)
            bias.add_(torch.sign(load.sum() - load * len(load)).to(bias.dtype) * self._rate)

    def shown(self) -> dict[str, Array]:
        """What there is to compare of the step, by name: each loss that this rank put in, and each bias."""
        biases = {bias_key(experts): bias for experts, bias in self.biases.items()}
        return {key: np.array(value.cpu().numpy()) for key, value in (self._losses | biases).items()}

    def enter(self, logits: Tensor, key_of: Callable[[str], str]) -> Tensor:
        """[N, E] outputs of a router, with a backward that adds the gradient of the router's losses."""
        if not self._weights:
            return logits
        assert self._moe is not None
        own = logits.detach().to(wide_type(logits.dtype)).requires_grad_()
        with torch.enable_grad():
            losses = {name: _LOSSES[name](own, self._moe) * weight for name, weight in self._weights.items()}
        self._losses |= {key_of(name): loss.detach() for name, loss in losses.items()}
        if not logits.requires_grad:  # no backward leads here: this forward will come again
            return logits
        torch.autograd.backward(list(losses.values()))
        return _Enter.apply(logits, own.grad.to(logits.dtype))

    def count(self, experts: str, unit: tuple[int, int], visits: Tensor) -> None:
        """Take note of the visits [E] of a unit of work, once however often it is computed."""
        if experts in self.biases:
            self._visits.setdefault(experts, {})[unit] = visits


class RouterBalance:
    """One router's unit of work: what its choice adds to scores, and what becomes of its outputs and choices."""

    def __init__(self, balance: Balance, experts: str, micro_batch: int, piece: int) -> None:
        self._balance, self._experts, self._unit = balance, experts, (micro_batch, piece)

    @property
    def bias(self) -> Tensor | None:
        """[E], or None where there is none."""
        return self._balance.biases.get(self._experts)

    def enter(self, logits: Tensor) -> Tensor:
        """The outputs [N, E], with a backward that adds the gradient of the losses."""
        return self._balance.enter(logits, lambda loss: loss_key(loss, self._experts, *self._unit))

    def count(self, visits: Tensor) -> None:
        """Take note of how many visits each expert has [E]."""
        self._balance.count(self._experts, self._unit, visits)


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
