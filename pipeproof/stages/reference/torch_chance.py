"""Dropout for the uncut PyTorch reference: a tensor of gains and zeros, by which values are multiplied.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values, G query heads of each.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.dropout import DropoutKeys, DropoutPlace, dropout_gain, dropout_rate

Tensor: TypeAlias = torch.Tensor


class TorchChance:
    """Dropout of the micro-batch that ``turn_to`` named last."""

    def __init__(self, plan: PlanSpec) -> None:
        self._plan, self._keys = plan, DropoutKeys(plan, 0, 0)

    def turn_to(self, step: int, index: int) -> None:
        """From now on it is that micro-batch of that step; ``index`` counts over all data ranks."""
        self._keys = DropoutKeys(self._plan, step, index)

    def tokens(self, x: Tensor, place: DropoutPlace, layer: str) -> Tensor:
        """What is left of [S, B, H] or [B, S, H], of whole sequences."""
        rate = dropout_rate(self._plan, place)
        if rate == 0.0:
            return x
        sequence_first = self._plan.model.activation_order == "sbh"
        kept = self._keys.of_tokens(layer, rate, (0, x.shape[0 if sequence_first else 1]))
        gains = _gains(np.swapaxes(kept, 0, 1) if sequence_first else kept, rate, x)
        return x * gains

    def drops_probabilities(self) -> bool:
        """Whether attention's probabilities are dropped at all."""
        return dropout_rate(self._plan, "attention") > 0.0

    def probabilities(self, p: Tensor, layer: str) -> Tensor:
        """What is left of [B, K, G, S, S]."""
        rate = dropout_rate(self._plan, "attention")
        kept = self._keys.of_attention(layer, rate, (0, p.shape[1] * p.shape[2]), (0, p.shape[3]))
        return p * _gains(kept.reshape(p.shape), rate, p)


def _gains(kept: np.ndarray, rate: float, like: Tensor) -> Tensor:
    return torch.tensor(kept, dtype=like.dtype, device=like.device) * dropout_gain(rate)
