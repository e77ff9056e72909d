"""Optimizer and gradient clip of one rank. Gradient buffers begin every step as +0.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import paddle

from pipeproof.specs.plan_sections import RunSpec
from pipeproof.stages.describe.stage_memory import Kept, shard_numel, shard_range

_STATE_NAMES = MappingProxyType(
    {"moment1": "moment1", "moment2": "moment2", "beta1_power": "beta1_pow_acc", "beta2_power": "beta2_pow_acc"}
)
"""AdamW's state of each weight: slot names here, and Paddle's names."""


class StageOptimizer:
    """Paddle's own SGD or AdamW over one rank's parameters.

    AdamW (arXiv:1711.05101) has betas 0.9 and 0.999, epsilon 1e-8 and weight decay 0.01 on every parameter. The
    learning rate is constant. ``GradientClip`` clips gradients before the step.
    """

    def __init__(self, run: RunSpec, parameters: Mapping[str, paddle.Tensor]) -> None:
        self._named, self._parameters = dict(parameters), list(parameters.values())
        self._state_names = _STATE_NAMES if run.optimizer == "adamw" else {}
        self._update = update_rule(run, self._parameters)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Give every parameter a new gradient buffer of +0.0.

        A buffer that begins as the gradient of the first micro-batch may hold -0.0 where this one holds +0.0.
        """
        for parameter in self._parameters:
            parameter.grad = paddle.zeros_like(parameter)

    def step(self) -> None:
        """Update every parameter in place from its gradient buffer."""
        if self._parameters:  # AdamW needs at least one; a stage of empty layers has none
            self._update.step()

    def state(self) -> dict[tuple[str, str], paddle.Tensor]:
        """The optimizer's state by weight and slot. It exists after the first step."""
        state = self._update.state_dict() if self._parameters else {}
        return {
            (name, slot): state[f"{parameter.name}_{paddle_name}_0"]
            for name, parameter in self._named.items()
            for slot, paddle_name in self._state_names.items()
        }

    def restore_state(
        self, weights: Mapping[str, paddle.Tensor], saved: Mapping[tuple[str, str], paddle.Tensor]
    ) -> None:
        """Load weights and the saved state of another optimizer, before the first step."""
        for name, value in weights.items():
            self._named[name].set_value(value)
        state = {}
        for name, parameter in self._named.items():
            for slot, paddle_name in self._state_names.items():
                value = saved[name, slot]
                state[f"{parameter.name}_{paddle_name}_0"] = value if value.shape else value.reshape([1])
        if state:
            self._update.set_state_dict(state)


def update_rule(run: RunSpec, parameters: Sequence[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    """Paddle's own optimizer for the plan's ``run``, with its constants."""
    if run.optimizer == "sgd":
        return paddle.optimizer.SGD(run.learning_rate, parameters=parameters)
    return paddle.optimizer.AdamW(
        run.learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, parameters=parameters
    )


class ShardedOptimizer:
    """The optimizer of a stage over this rank's shards of its weights (``stages.describe.stage_memory``).

    Each data-parallel rank updates one shard of each weight. A shard is a separate flat tensor. Both optimizers work
    element by element, so the weights have the same bits as in an update of whole weights. If whole gradients are not
    ``kept``, the sum of each micro-batch is added to the shards, and they exist from ``allocate`` to ``put_sum``.
    """

    def __init__(
        self, run: RunSpec, weights: Mapping[str, paddle.Tensor], num_shards: int, shard: int, kept: Kept
    ) -> None:
        self._weights, self._num_shards, self._shard = weights, num_shards, shard
        self._kept = kept
        self.updated: dict[str, paddle.Tensor] = {}
        """The shards by weight name. A shard may be empty."""
        for name, weight in weights.items():
            start, stop = shard_range(weight.size, num_shards, shard)
            self.updated[name] = weight.detach().flatten()[start:stop].clone()
            self.updated[name].stop_gradient = False
        self._optimizer = StageOptimizer(run, {name: part for name, part in self.updated.items() if part.size})
        if not kept.weights:
            self.drop_weights()

    def zero_grad(self) -> None:
        """Give every weight, if its gradient is kept, and every shard a new gradient buffer of +0.0."""
        for tensor in (*(self._weights.values() if self._kept.gradients else ()), *self.updated.values()):
            tensor.grad = paddle.zeros_like(tensor)

    def allocate(self) -> None:
        """Give every weight whose gradient has been dropped a new buffer of +0.0."""
        for weight in self._weights.values():
            if weight.grad is None:
                weight.grad = paddle.zeros_like(weight)

    def to_scatter(self, name: str) -> paddle.Tensor:
        """The gradient of a weight, flat and padded with zeros to shards of equal size."""
        return self._padded(self._weights[name].grad.flatten(), self._num_shards * self._shard_numel(name))

    def put_sum(self, name: str, part: paddle.Tensor) -> None:
        """Store this rank's part of the reduce-scattered gradient, or add it and drop the whole gradient."""
        updated = self.updated[name]
        own = part[: updated.size]
        updated.grad.set_value(own if self._kept.gradients else updated.grad + own)
        if not self._kept.gradients:
            self._weights[name].grad = None

    def step(self) -> None:
        """Update every shard from its gradient."""
        self._optimizer.step()

    def to_gather(self, name: str) -> paddle.Tensor:
        """This rank's shard of a weight, padded with zeros."""
        return self._padded(self.updated[name].detach(), self._shard_numel(name))

    def put_whole(self, name: str, shards: paddle.Tensor) -> None:
        """Set a weight to the updated shards of all ranks, joined in rank order."""
        weight = self._weights[name]
        whole = shards[: weight.size].reshape(weight.shape)
        if self._kept.weights:
            weight.set_value(whole)
        else:
            whole.clone()._share_buffer_to(weight)  # noqa: SLF001  # as Paddle's own sharding does

    def drop_weights(self) -> None:
        """Free the memory of whole weights, also in what a forward has kept, until the next ``put_whole``."""
        for weight in self._weights.values():
            weight._clear_data()  # noqa: SLF001  # as Paddle's own sharding does

    def state(self) -> dict[tuple[str, str], paddle.Tensor]:
        """Counterpart of ``StageOptimizer.state`` for this rank's shards. An empty shard has no state."""
        return self._optimizer.state()

    def restore_state(
        self, weights: Mapping[str, paddle.Tensor], saved: Mapping[tuple[str, str], paddle.Tensor]
    ) -> None:
        """Counterpart of ``StageOptimizer.restore_state``.

        ``saved`` has this rank's shards; ``weights`` are whole, or shards where whole weights are not kept.
        """
        shards = {}
        for name, value in weights.items():
            if not self._kept.weights:
                shards[name] = value
                continue
            self._weights[name].set_value(value)
            start, stop = shard_range(value.size, self._num_shards, self._shard)
            if start < stop:
                shards[name] = value.flatten()[start:stop]
        self._optimizer.restore_state(shards, saved)

    def _shard_numel(self, name: str) -> int:
        return shard_numel(self._weights[name].size, self._num_shards)

    def _padded(self, flat: paddle.Tensor, numel: int) -> paddle.Tensor:
        missing = numel - flat.size
        return paddle.concat([flat, paddle.zeros([missing], dtype=flat.dtype)]) if missing else flat.clone()


class GradientClip:
    """Clip of all gradients together to a norm of at most ``limit``, on one rank.

    ``counted`` are the weights whose gradients this rank counts, by their index in the vector of squared norms, which
    has ``num_weights`` entries. Numbers have the type of gradients, ``dtype``.
    """

    def __init__(self, counted: Mapping[int, paddle.Tensor], num_weights: int, limit: float, dtype: str) -> None:
        self._counted, self._num_weights, self._limit, self._dtype = counted, num_weights, limit, dtype
        self._factor: paddle.Tensor | None = None
        self._squares: paddle.Tensor | None = None

    def begin(self) -> None:
        """Reset for a new step."""
        self._factor = self._squares = None

    @property
    def squares(self) -> paddle.Tensor:
        """The vector of squared norms: this rank's entries, or the sum over ranks once it is set.

        Gradients must be complete.
        """
        if self._squares is None:
            entries = np.zeros(self._num_weights, dtype=self._dtype)
            for index, weight in self._counted.items():
                entries[index] = paddle.sum(paddle.square(weight.grad)).numpy()
            self._squares = paddle.to_tensor(entries)
        return self._squares

    @squares.setter
    def squares(self, summed: paddle.Tensor) -> None:
        self._squares = summed

    def clip(self, weights: Mapping[str, paddle.Tensor]) -> None:
        """Multiply gradients by limit / max(norm, limit).

        numpy computes the factor: on a CPU, Paddle's quotient of two float32 scalars is sometimes off by one ulp.
        """
        if self._factor is None:
            total, *others = self.squares.numpy()
            for entry in others:
                total = total + entry
            limit = np.dtype(self._dtype).type(self._limit)
            self._factor = paddle.to_tensor(np.asarray(limit / np.maximum(np.sqrt(total), limit)))
        for weight in weights.values():
            weight.grad.set_value(weight.grad * self._factor)
