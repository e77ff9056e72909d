"""An optimizer that updates one share of each weight: the shares of the other ranks are theirs to update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from pipeproof.specs.plan import RunSpec
from pipeproof.stages.describe.shares import share_numel, share_range
from pipeproof.stages.torch.optimizer import make_optimizer
from pipeproof.stages.torch.weights import Weight

Tensor: TypeAlias = torch.Tensor


class ShardedOptimizer:
    """The optimizer of a stage over this rank's shares of its weights, as ``stages.describe.shares`` cuts them.

    A share is a flat part of the main weight's own memory, with a gradient buffer of its own. Both optimizers go
    element by element.
    """

    def __init__(self, run: RunSpec, weights: Mapping[str, Weight], num_shares: int, place: int) -> None:
        self._weights, self._num_shares, self._place = weights, num_shares, place
        self.updated: dict[str, Weight] = {}
        """The shares by the names of their weights; one may be empty."""
        for name, weight in weights.items():
            start, stop = share_range(weight.main.numel(), num_shares, place)
            self.updated[name] = Weight(weight.main.view(-1)[start:stop])
        self._optimizer = make_optimizer(run, {name: share for name, share in self.updated.items() if _size(share)})

    def zero_grad(self) -> None:
        """Begin the gradient buffer of every weight, and of every share, as +0.0, in place."""
        for weight in (*self._weights.values(), *self.updated.values()):
            weight.zero_gradient()

    def to_scatter(self, name: str) -> Tensor:
        """The gradient of a weight, flat and filled up with zeros to shares of one size."""
        return self._filled(self._weights[name].gradient.view(-1), self._num_shares * self._share_numel(name))

    def put_sum(self, name: str, part: Tensor) -> None:
        """What came of it: this rank's part of the sum."""
        share = self.updated[name]
        share.gradient.copy_(part[: _size(share)])

    def step(self) -> None:
        """Update every share from its gradient."""
        self._optimizer.step()

    def to_gather(self, name: str) -> Tensor:
        """This rank's share of a main weight, filled up with zeros."""
        return self._filled(self.updated[name].main, self._share_numel(name))

    def put_whole(self, name: str, shares: Tensor) -> None:
        """The shares of all ranks, one behind the other: the weight gets what they were updated to."""
        weight = self._weights[name]
        weight.main.view(-1).copy_(shares[: weight.main.numel()])
        weight.renew()

    def state(self) -> dict[tuple[str, str], Tensor]:
        """As ``StageOptimizer.state``, of this rank's shares; an empty one has none."""
        return self._optimizer.state()

    def put_state(self, weights: Mapping[str, Tensor], kept: Mapping[tuple[str, str], Tensor]) -> None:
        """As ``StageOptimizer.put_state``: weights are whole, what is kept is of this rank's shares."""
        for name, value in weights.items():
            self._weights[name].main.copy_(value)
            self._weights[name].renew()
        self._optimizer.put_state({}, kept)

    def _share_numel(self, name: str) -> int:
        return share_numel(_size(self._weights[name]), self._num_shares)

    def _filled(self, flat: Tensor, numel: int) -> Tensor:
        missing = numel - flat.numel()
        return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat.clone()


def _size(weight: Weight) -> int:
    return int(weight.main.numel())
