"""Dropout for the references: values are multiplied by a tensor of gains and zeros.

Shape letters: S sequence, B rows, H hidden, A heads.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.synthetic import DropoutKeys, DropoutSite, dropout_gain, dropout_rate

Tensor: TypeAlias = paddle.Tensor


class DropoutRng:
    """Dropout of the selected micro-batch."""

    def __init__(self, plan: PlanSpec) -> None:
        self._plan = plan
        self._keys = DropoutKeys(plan, 0, 0)

    def select(self, step: int, index: int) -> None:
        """Select a micro-batch of a step; ``index`` counts over all data ranks."""
        self._keys = DropoutKeys(self._plan, step, index)

    def tokens(self, x: Tensor, site: DropoutSite, layer: str, start: int = 0) -> Tensor:
        """Apply dropout to [S, B, H] or [B, S, H], whose first position is ``start``."""
        rate = dropout_rate(self._plan, site)
        if rate == 0.0:
            return x
        sequence_first = self._plan.gpt.activation_order == "sbh"
        length = x.shape[0 if sequence_first else 1]
        gains = _gains(self._keys.of_tokens(layer, rate, (start, start + length)), rate, x)
        return x * paddle.to_tensor(np.swapaxes(gains, 0, 1) if sequence_first else gains)

    def probabilities(self, p: Tensor, layer: str, first_head: int = 0, start: int = 0) -> Tensor:
        """Apply dropout to [B, .., S, keys]; the dims between are heads, from ``first_head`` on."""
        rate = dropout_rate(self._plan, "attention")
        if rate == 0.0:
            return p
        rows, length, keys = p.shape[0], p.shape[-2], p.shape[-1]
        num_heads = int(np.prod(p.shape)) // (rows * length * keys)
        mask = self._keys.of_attention(layer, rate, (first_head, first_head + num_heads), (start, start + length))
        return p * paddle.to_tensor(_gains(mask, rate, p).reshape(p.shape))


def _gains(mask: npt.NDArray[np.bool_], rate: float, like: Tensor) -> npt.NDArray[Any]:
    dtype = str(like.dtype).removeprefix("paddle.")
    gains: npt.NDArray[Any] = mask.astype(dtype) * np.asarray(dropout_gain(rate), dtype=dtype)
    return gains
