"""What layers do with weights, as far as both frameworks do the same; each has its own way to split backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeproof.stages.common.ops import Tensor, Weight


class WeightGradients(Protocol):
    """Weight gradients of one unit of work that are still to be computed."""

    def accumulate(self) -> None:
        """Add them, once."""
        ...


class SplitWeights(Protocol):
    """The weights of one stage as its layers use them; their gradients are computed when they are asked for."""

    def backward(self, output: Tensor, gradient: Tensor | None) -> WeightGradients:
        """Compute the gradients of all inputs of ``output``; those of weights are returned, to be accumulated."""
        ...

    def product(self, activation: Tensor, weight: Weight, *, transposed: bool = False) -> Tensor:
        """``activation @ weight``: [.., K] and [K, M] to [.., M]; transposed, the weight is [M, K]."""
        ...

    def scaled_and_shifted(self, activation: Tensor, scale: Weight, shift: Weight, sizes: Sequence[int]) -> Tensor:
        """``activation * scale + shift``, a ``scale`` for each group of columns: [.., K], [groups] and [K]."""
        ...


class BorrowedWeight(Protocol):
    """A weight as a layer uses it that it is lent to: with a gradient of its own, which is one addend."""

    @property
    def used(self) -> Weight:
        """What the borrower computes with."""
        ...

    def give_back(self) -> None:
        """Add the gradient to the weight's own, and begin the next one as +0.0."""
        ...
