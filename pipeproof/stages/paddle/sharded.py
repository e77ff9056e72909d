"""An optimizer that updates one share of each weight: the shares of the other ranks are theirs to update."""

from __future__ import annotations

from collections.abc import Mapping

import paddle

from pipeproof.specs.plan import RunSpec
from pipeproof.stages.describe.shares import share_numel, share_range
from pipeproof.stages.paddle.optimizer import make_optimizer


class ShardedOptimizer:
    """The optimizer of a stage over this rank's shares of its weights, as ``stages.describe.shares`` cuts them.

    A share is a flat tensor of its own. Both optimizers go element by element, so that the weights have the same bits
    as if they were updated whole.
    """

    def __init__(self, run: RunSpec, weights: Mapping[str, paddle.Tensor], num_shares: int, place: int) -> None:
        self._weights, self._num_shares, self._place = weights, num_shares, place
        self.updated: dict[str, paddle.Tensor] = {}
        """The shares by the names of their weights; one may be empty."""
        for name, weight in weights.items():
            start, stop = share_range(weight.size, num_shares, place)
            self.updated[name] = weight.detach().flatten()[start:stop].clone()
            self.updated[name].stop_gradient = False
        filled = {name: share for name, share in self.updated.items() if share.size}
        self._optimizer = make_optimizer(run, filled) if filled else None

    def zero_grad(self) -> None:
        """Give every weight, and every share, a fresh gradient buffer of +0.0."""
        for tensor in (*self._weights.values(), *self.updated.values()):
            tensor.grad = paddle.zeros_like(tensor)

    def to_scatter(self, name: str) -> paddle.Tensor:
        """The gradient of a weight, flat and filled up with zeros to shares of one size."""
        return self._filled(self._weights[name].grad.flatten(), self._num_shares * self._share_numel(name))

    def put_sum(self, name: str, part: paddle.Tensor) -> None:
        """What came of it: this rank's part of the sum."""
        share = self.updated[name]
        share.grad.set_value(part[: share.size])

    def step(self) -> None:
        """Update every share from its gradient."""
        if self._optimizer is not None:
            self._optimizer.step()

    def to_gather(self, name: str) -> paddle.Tensor:
        """This rank's share of a weight, filled up with zeros."""
        return self._filled(self.updated[name].detach(), self._share_numel(name))

    def put_whole(self, name: str, shares: paddle.Tensor) -> None:
        """The shares of all ranks, one behind the other: the weight gets what they were updated to."""
        weight = self._weights[name]
        weight.set_value(shares[: weight.size].reshape(weight.shape))

    def state(self) -> dict[tuple[str, str], paddle.Tensor]:
        """As ``StageOptimizer.state``, of this rank's shares; an empty one has none."""
        return {} if self._optimizer is None else self._optimizer.state()

    def put_state(self, weights: Mapping[str, paddle.Tensor], kept: Mapping[tuple[str, str], paddle.Tensor]) -> None:
        """As ``StageOptimizer.put_state``: weights are whole, what is kept is of this rank's shares."""
        shares = {}
        for name, value in weights.items():
            self._weights[name].set_value(value)
            start, stop = share_range(value.size, self._num_shares, self._place)
            if start < stop:
                shares[name] = value.flatten()[start:stop]
        if self._optimizer is not None:
            self._optimizer.put_state(shares, kept)

    def _share_numel(self, name: str) -> int:
        return share_numel(self._weights[name].size, self._num_shares)

    def _filled(self, flat: paddle.Tensor, numel: int) -> paddle.Tensor:
        missing = numel - flat.size
        return paddle.concat([flat, paddle.zeros([missing], dtype=flat.dtype)]) if missing else flat.clone()
