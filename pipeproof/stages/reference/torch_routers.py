"""Routers of the unpartitioned PyTorch reference: choices, losses, and biases that follow the load.

A router's losses are additional roots of plain autograd. ``pipeproof.stages.describe.gradient_facts`` defines them.

Shape letters: N tokens, E experts, k of them for a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeproof.specs.model import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.gradient_facts import bias_key, loss_key, loss_weights, moves_biases, routers
from pipeproof.stages.reference.torch_reference_weights import copies

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = npt.NDArray[Any]


class TorchRouters:
    """Biases, losses and visit counts of all routers of the plan's model.

    ``state`` has the biases under the names of ``bias_key``. Missing biases are zero. Losses and biases of 16-bit runs
    are float32.
    """

    def __init__(self, plan: PlanSpec, state: Mapping[str, Array], device: torch.device) -> None:
        self._plan, self._weights = plan, loss_weights(plan)
        names = routers(describe_gpt(plan)) if moves_biases(plan) else ()
        num_experts = 0 if plan.model.moe is None else plan.model.moe.num_experts
        dtype = np.float64 if plan.run.dtype == "float64" else np.float32
        zero = np.zeros(num_experts, dtype=dtype)
        self.biases = {name: torch.tensor(state.get(bias_key(name), zero), device=device) for name in names}
        self._visits = {name: torch.zeros(num_experts, dtype=torch.int64, device=device) for name in names}
        self._losses: dict[str, Tensor] = {}
        self._roots: list[Tensor] = []
        self._micro_batch = 0

    def begin_step(self) -> dict[str, Array]:
        """Reset losses and visits, and return the biases at the beginning of the step."""
        self._losses = {}
        for visits in self._visits.values():
            visits.zero_()
        return self._state()

    def select(self, micro_batch: int) -> None:
        """Select the next micro-batch, counted over all data ranks."""
        self._micro_batch = micro_batch

    def route(self, logits: Tensor, name: str, sequence_dim: int) -> tuple[Tensor, Tensor]:
        """The experts of each token, best first, and their weights: two of [N, k], from outputs [.., E].

        Each sequence split of the plan has its own losses.
        """
        moe = self._plan.model.moe
        assert moe is not None
        if self._weights:
            logits, for_losses = copies(logits, 2)
            for split, part in enumerate(for_losses.chunk(self._plan.schedule.num_sequence_splits, dim=sequence_dim)):
                self._add_losses(part.flatten(0, -2), name, split, moe)
        scores = _scores(logits.flatten(0, -2), moe)
        ranked = scores.detach() + self.biases[name] if name in self.biases else scores.detach()
        experts = _largest(ranked, moe.top_k)
        if name in self._visits:
            self._visits[name] += torch.bincount(experts.flatten(), minlength=moe.num_experts)
        gains = torch.gather(scores, 1, experts)
        return experts, gains / gains.sum(-1, keepdim=True) if moe.normalize else gains

    def _add_losses(self, logits: Tensor, name: str, split: int, moe: MoeSpec) -> None:
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        for loss, weight in self._weights.items():
            value = (_balance(logits, moe) if loss == "aux" else _z(logits)) * weight
            self._roots.append(value)
            self._losses[loss_key(loss, name, self._micro_batch, split)] = value.detach()

    def take_roots(self) -> list[Tensor]:
        """Return the losses since the last call, as roots of backward in addition to the main loss."""
        roots, self._roots = self._roots, []
        return roots

    def end_step(self) -> dict[str, Array]:
        """Move the biases and return the losses and biases of the step, for comparison."""
        moe = self._plan.model.moe
        for name, bias in self.biases.items():
            assert moe is not None
            assert moe.expert_bias_rate is not None
            visits = self._visits[name]
            side = torch.sign(visits.sum() - visits * moe.num_experts)
            bias += side.to(bias.dtype) * moe.expert_bias_rate
        return {**{key: np.array(loss.cpu().numpy()) for key, loss in self._losses.items()}, **self._state()}

    def _state(self) -> dict[str, Array]:
        return {bias_key(name): np.array(bias.cpu().numpy()) for name, bias in self.biases.items()}


def without_biases(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Return the weights without router biases."""
    return {name: weight for name, weight in weights.items() if not name.startswith(bias_key(""))}


def _scores(logits: Tensor, moe: MoeSpec) -> Tensor:
    return torch.softmax(logits, -1) if moe.score == "softmax" else torch.sigmoid(logits)


def _largest(ranked: Tensor, number: int) -> Tensor:
    """The indices [N, k] of the largest entries of [N, E]. Ties go to the lower index."""
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :number]


def _balance(logits: Tensor, moe: MoeSpec) -> Tensor:
    scores = _scores(logits, moe)
    visits = torch.bincount(_largest(scores.detach(), moe.top_k).flatten(), minlength=moe.num_experts)
    over_mean = visits.to(scores.dtype) * (moe.num_experts / (len(scores) * moe.top_k))
    shares = scores if moe.score == "softmax" else scores / scores.sum(-1, keepdim=True)
    return (shares.mean(0) * over_mean).sum()


def _z(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1).square().mean()
