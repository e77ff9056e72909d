"""The routers of a reference beside what they route: losses, and biases that move with loads.

A router's losses are plain autograd's roots beside the main loss. What they
are is said in ``pipeproof.stages.describe.balance``.

Shape letters: N tokens, E experts, k of them for a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.balance import bias_key, loss_key, loss_weights, moves_biases, routers
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.reference.mixture import Routing, route
from pipeproof.stages.reference.pieces import Copies

Tensor: TypeAlias = paddle.Tensor
Array: TypeAlias = npt.NDArray[Any]


class Routers:
    """All routers of the plan's model: what they choose with, what they cost, and how many visits they caused.

    ``state`` has the biases under the names of ``bias_key``; without them they are zero.
    """

    def __init__(self, plan: PlanSpec, state: Mapping[str, Array] | None = None) -> None:
        self._plan, self._weights = plan, loss_weights(plan)
        names = routers(describe_gpt(plan)) if moves_biases(plan) else ()
        num_experts = 0 if plan.model.moe is None else plan.model.moe.num_experts
        zero = np.zeros(num_experts, dtype=plan.run.dtype)
        self.biases = {name: np.array((state or {}).get(bias_key(name), zero)) for name in names}
        self.visits = {name: np.zeros(num_experts, dtype=np.int64) for name in names}
        self.values: dict[str, Array] = {}
        self._roots: list[Tensor] = []
        self._unit = 0, 0

    def begin_step(self) -> dict[str, Array]:
        """Forget losses and visits of the step before; the biases that this one begins with."""
        self.values = {}
        for visits in self.visits.values():
            visits[:] = 0
        return self._state()

    def turn_to(self, micro_batch: int, piece: int = 0) -> None:
        """Say which unit of work comes next; ``micro_batch`` counts over all data ranks."""
        self._unit = micro_batch, piece

    def route(
        self,
        logits: Tensor,
        name: str,
        *,
        counts: bool = True,
        sequence_dim: int | None = None,
    ) -> Routing:
        """The choice by a router's outputs [.., E].

        ``counts`` is False for another tensor-parallel piece's outputs of the same tokens: their losses and visits are
        there already. With ``sequence_dim`` the outputs are those of whole sequences, and the losses those of each of
        the pieces into which the plan cuts them.
        """
        moe, num_pieces = self._plan.model.moe, self._plan.schedule.num_sequence_splits
        assert moe is not None
        if counts and self._weights:
            logits, for_losses = Copies.apply(logits, 2)
            is_cut = sequence_dim is not None and num_pieces > 1
            parts = for_losses.split(num_pieces, axis=sequence_dim) if is_cut else [for_losses]
            for place, part in enumerate(parts):
                self._lose(part, name, place)
        routing = route(logits, moe, self.biases.get(name))
        if counts and name in self.visits:
            np.add.at(self.visits[name], routing.experts.reshape(-1), 1)
        return routing

    def _lose(self, logits: Tensor, name: str, place: int) -> None:
        moe = self._plan.model.moe
        assert moe is not None
        flat = logits.reshape([-1, moe.num_experts])
        micro_batch, piece = self._unit
        copies = Copies.apply(flat, len(self._weights)) if len(self._weights) > 1 else [flat]
        for (loss, weight), own in zip(self._weights.items(), copies, strict=True):
            value = (balance_loss(own, moe) if loss == "aux" else z_loss(own)) * weight
            self._roots.append(value)
            self.values[loss_key(loss, name, micro_batch, piece + place)] = value.numpy()

    def take_roots(self) -> list[Tensor]:
        """The losses since the last call, to go back from beside the main loss."""
        roots, self._roots = self._roots, []
        return roots

    def end_step(self) -> dict[str, Array]:
        """Move the biases; what there is to compare of the step."""
        moe = self._plan.model.moe
        for name, bias in self.biases.items():
            assert moe is not None
            mean = self.visits[name].sum() / moe.num_experts
            for expert, visits in enumerate(self.visits[name]):
                step = bias.dtype.type(moe.expert_bias_rate)
                bias[expert] += step if visits < mean else -step if visits > mean else 0
        return {**self.values, **self._state()}

    def _state(self) -> dict[str, Array]:
        return {bias_key(name): bias.copy() for name, bias in self.biases.items()}


def without_biases(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Weights alone, of what a step begins with."""
    return {name: weight for name, weight in weights.items() if not name.startswith(bias_key(""))}


def balance_loss(logits: Tensor, moe: MoeSpec) -> Tensor:
    """The sum over experts of (visits over their mean) times (mean share of the scores), of outputs [N, E]."""
    scores = F.softmax(logits, axis=-1) if moe.score == "softmax" else F.sigmoid(logits)
    chosen = route(logits.detach(), moe).experts
    over_mean = np.array([np.sum(chosen == e) * moe.num_experts / chosen.size for e in range(moe.num_experts)])
    shares = scores if moe.score == "softmax" else scores / scores.sum(axis=-1, keepdim=True)
    return (shares.mean(axis=0) * paddle.to_tensor(over_mean, dtype=logits.dtype)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The mean square of the logarithm of the softmax's denominator, of outputs [N, E]."""
    return paddle.logsumexp(logits, axis=-1).square().mean()
