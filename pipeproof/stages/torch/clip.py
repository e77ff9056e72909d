"""Gradients clipped to a norm of all of them together, on one rank; nothing makes the host wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from pipeproof.stages.torch.weights import Weight

Tensor: TypeAlias = torch.Tensor


class GradientClip:
    """The clip of one rank.

    ``counted`` are the weights whose gradients the rank counts, by their place
    in the vector of squared norms, which has ``num_weights`` entries; ``limit``
    is the norm that gradients may have. Numbers are of ``dtype``, as gradients are; 16 bits are widened to float32.
    """

    def __init__(
        self, counted: Mapping[int, Weight], num_weights: int, limit: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._counted, self._num_weights, self._limit = counted, num_weights, limit
        self._dtype, self._device = dtype, device
        self._factor: Tensor | None = None
        self._squares: Tensor | None = None

    def begin(self) -> None:
        """Forget the step before."""
        self._factor = self._squares = None

    @property
    def squares(self) -> Tensor:
        """The vector as far as it has been summed; the rank's own before that. Gradients are whole by then."""
        if self._squares is None:
            self._squares = torch.zeros(self._num_weights, dtype=self._dtype, device=self._device)
            for place, weight in self._counted.items():
                self._squares[place] = weight.gradient.to(self._dtype).square().sum()
        return self._squares

    @squares.setter
    def squares(self, summed: Tensor) -> None:
        self._squares = summed

    def clip(self, weights: Mapping[str, Weight]) -> None:
        """Multiply gradients by limit / max(norm, limit)."""
        if self._factor is None:
            self._factor = self._limit / self.squares.sum().sqrt().clamp(min=self._limit)
        for weight in weights.values():
            weight.gradient.mul_(self._factor)
