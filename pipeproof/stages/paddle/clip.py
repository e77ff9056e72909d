"""Gradients clipped to a norm of all of them together, on one rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import paddle


class GradientClip:
    """The clip of one rank.

    ``counted`` are the weights whose gradients the rank counts, by their place
    in the vector of squared norms, which has ``num_weights`` entries; ``limit``
    is the norm that gradients may have. Numbers are of ``dtype``, as gradients are.
    """

    def __init__(self, counted: Mapping[int, paddle.Tensor], num_weights: int, limit: float, dtype: str) -> None:
        self._counted, self._num_weights, self._limit, self._dtype = counted, num_weights, limit, dtype
        self._factor: paddle.Tensor | None = None
        self._squares: paddle.Tensor | None = None

    def begin(self) -> None:
        """Forget the step before."""
        self._factor = self._squares = None

    @property
    def squares(self) -> paddle.Tensor:
        """The vector as far as it has been summed; the rank's own before that. Gradients are whole by then."""
        if self._squares is None:
            entries = np.zeros(self._num_weights, dtype=self._dtype)
            for place, weight in self._counted.items():
                entries[place] = paddle.sum(paddle.square(weight.grad)).numpy()
            self._squares = paddle.to_tensor(entries)
        return self._squares

    @squares.setter
    def squares(self, summed: paddle.Tensor) -> None:
        self._squares = summed

    def clip(self, weights: Mapping[str, paddle.Tensor]) -> None:
        """Multiply gradients by limit / max(norm, limit).

        The factor is numpy's: Paddle's quotient of two float32 scalars is off by one place now and then, on a CPU.
        """
        if self._factor is None:
            total, *others = self.squares.numpy()
            for entry in others:
                total = total + entry
            limit = np.dtype(self._dtype).type(self._limit)
            self._factor = paddle.to_tensor(np.asarray(limit / np.maximum(np.sqrt(total), limit)))
        for weight in weights.values():
            weight.grad.set_value(weight.grad * self._factor)
