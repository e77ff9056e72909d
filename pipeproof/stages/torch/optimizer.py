"""Optimizer and gradient clip of one rank, on the main weights and gradient buffers of ``Weight``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

from pipeproof.specs.plan_sections import RunSpec
from pipeproof.stages.describe.stage_memory import Kept, shard_numel, shard_range
from pipeproof.stages.torch.weights import Weight

Tensor: TypeAlias = torch.Tensor

_STATE_NAMES = MappingProxyType({"moment1": "exp_avg", "moment2": "exp_avg_sq", "step": "step"})
"""AdamW's state of each weight: slot names here, and PyTorch's names."""


class StageOptimizer:
    """PyTorch's own SGD or AdamW over one rank's weights, by name.

    AdamW (arXiv:1711.05101) has betas 0.9 and 0.999, epsilon 1e-8 and weight decay 0.01 on every weight. The learning
    rate is constant. ``GradientClip`` clips gradients before the step. On GPUs one kernel updates many weights and
    counts its steps on the device: a step can be captured in a graph.
    """

    def __init__(self, run: RunSpec, weights: Mapping[str, Weight]) -> None:
        self._weights = dict(weights)
        for weight in self._weights.values():
            weight.main.grad = weight.gradient
        on_gpu = any(weight.main.is_cuda for weight in self._weights.values())
        self._update: torch.optim.Optimizer | None = None
        self._state_names = _STATE_NAMES if run.optimizer == "adamw" else {}
        mains = [weight.main for weight in self._weights.values()]
        if not mains:  # PyTorch needs at least one; a stage of empty layers has none
            return
        if run.optimizer == "sgd":
            self._update = torch.optim.SGD(mains, lr=run.learning_rate, fused=on_gpu)
        else:
            self._update = torch.optim.AdamW(
                mains,
                lr=run.learning_rate,
                betas=(0.9, 0.999),
                eps=1e-8,
                weight_decay=0.01,
                fused=on_gpu,
                foreach=False if not on_gpu else None,
                capturable=on_gpu,
            )

    def zero_grad(self) -> None:
        """Set every gradient buffer to +0.0, in place."""
        for weight in self._weights.values():
            weight.zero_gradient()

    def step(self) -> None:
        """Update every main weight in place from its gradient buffer, and round the weights of layers again."""
        if self._update is not None:
            self._update.step()
        for weight in self._weights.values():
            weight.renew()

    def state(self) -> dict[tuple[str, str], torch.Tensor]:
        """The optimizer's state by weight and slot. It exists after the first step."""
        if self._update is None:
            return {}
        state = self._update.state
        return {
            (name, slot): state[weight.main][torch_name]
            for name, weight in self._weights.items()
            for slot, torch_name in self._state_names.items()
        }

    def restore_state(self, weights: Mapping[str, torch.Tensor], saved: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Load main weights and the saved state of another optimizer, before the first step."""
        for name, value in weights.items():
            self._weights[name].main.copy_(value)
        if self._update is not None and self._state_names:
            state = {
                index: {torch_name: saved[name, slot] for slot, torch_name in self._state_names.items()}
                for index, name in enumerate(self._weights)
            }
            self._update.load_state_dict({"state": state, "param_groups": self._update.state_dict()["param_groups"]})
        for weight in self._weights.values():
            weight.renew()


class ShardedOptimizer:
    """The optimizer of a stage over this rank's shards of its weights (``stages.describe.stage_memory``).

    Each data-parallel rank updates one shard of each weight. A shard is a flat view of the main weight's memory with
    its own gradient buffer. Both optimizers work element by element. Unless ``kept`` has gradients the sum of each
    micro-batch is added to the shards, and whole gradients exist from ``allocate`` to ``put_sum``.
    """

    def __init__(self, run: RunSpec, weights: Mapping[str, Weight], num_shards: int, shard: int, kept: Kept) -> None:
        self._weights, self._num_shards, self._shard = weights, num_shards, shard
        self._kept = kept
        self.updated: dict[str, Weight] = {}
        """The shards by weight name. A shard may be empty."""
        for name, weight in weights.items():
            start, stop = shard_range(weight.main.numel(), num_shards, shard)
            own = weight.main.view(-1)[start:stop]
            self.updated[name] = Weight(own if kept.weights else own.clone())
            if not kept.gradients:
                weight.drop_gradient()
        self._optimizer = StageOptimizer(run, {name: part for name, part in self.updated.items() if _size(part)})
        if not kept.weights:
            self.drop_weights()

    def zero_grad(self) -> None:
        """Set the gradient buffer of every weight and every shard to +0.0, in place."""
        for weight in (*self._weights.values(), *self.updated.values()):
            weight.zero_gradient()

    def allocate(self) -> None:
        """Give every weight whose gradient has been dropped a new buffer of +0.0."""
        for weight in self._weights.values():
            if weight.gradient.shape != weight.main.shape:
                weight.allocate_gradient()

    def to_scatter(self, name: str) -> Tensor:
        """The gradient of a weight, flat and padded with zeros to shards of equal size."""
        return self._padded(self._weights[name].gradient.view(-1), self._num_shards * self._shard_numel(name))

    def put_sum(self, name: str, part: Tensor) -> None:
        """Store this rank's part of the reduce-scattered gradient, or add it and drop the whole gradient."""
        updated = self.updated[name]
        own = part[: _size(updated)]
        if not self._kept.gradients:
            updated.gradient.add_(own)
            self._weights[name].drop_gradient()
        else:
            updated.gradient.copy_(own)

    def step(self) -> None:
        """Update every shard from its gradient."""
        self._optimizer.step()

    def to_gather(self, name: str) -> Tensor:
        """This rank's shard of a main weight, padded with zeros."""
        return self._padded(self.updated[name].main, self._shard_numel(name))

    def put_whole(self, name: str, shards: Tensor) -> None:
        """Set a weight to the updated shards of all ranks, joined in rank order."""
        weight = self._weights[name]
        if not self._kept.weights:
            weight.main.untyped_storage().resize_(weight.main.numel() * weight.main.element_size())
        # By ``data``, for else what a forward has kept of the weight would count as changed.
        weight.main.data.view(-1).copy_(shards[: weight.main.numel()])
        weight.renew()

    def drop_weights(self) -> None:
        """Free the memory of whole weights, also in what a forward has kept, until the next ``put_whole``."""
        for weight in self._weights.values():
            weight.main.untyped_storage().resize_(0)

    def state(self) -> dict[tuple[str, str], Tensor]:
        """Counterpart of ``StageOptimizer.state`` for this rank's shards. An empty shard has no state."""
        return self._optimizer.state()

    def restore_state(self, weights: Mapping[str, Tensor], saved: Mapping[tuple[str, str], Tensor]) -> None:
        """Counterpart of ``StageOptimizer.restore_state``.

        ``saved`` has this rank's shards; ``weights`` are whole, or shards where whole weights are not kept.
        """
        for name, value in weights.items():
            (self._weights if self._kept.weights else self.updated)[name].main.copy_(value)
            if self._kept.weights:
                self._weights[name].renew()
        self._optimizer.restore_state({}, saved)

    def _shard_numel(self, name: str) -> int:
        return shard_numel(_size(self._weights[name]), self._num_shards)

    def _padded(self, flat: Tensor, numel: int) -> Tensor:
        missing = numel - flat.numel()
        return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat.clone()


def _size(weight: Weight) -> int:
    return int(weight.main.numel())


class GradientClip:
    """Clip of all gradients together to a norm of at most ``limit``, on one rank. The host never waits.

    ``counted`` are the weights whose gradients this rank counts, by their index in the vector of squared norms, which
    has ``num_weights`` entries. Numbers have the type of gradients, ``dtype``; 16-bit types become float32.
    """

    def __init__(
        self, counted: Mapping[int, Weight], num_weights: int, limit: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._counted, self._num_weights, self._limit = counted, num_weights, limit
        self._dtype, self._device = dtype, device
        self._factor: Tensor | None = None
        self._squares: Tensor | None = None

    def begin(self) -> None:
        """Reset for a new step."""
        self._factor = self._squares = None

    @property
    def squares(self) -> Tensor:
        """The vector of squared norms: this rank's entries, or the sum over ranks once it is set.

        Gradients must be complete.
        """
        if self._squares is None:
            self._squares = torch.zeros(self._num_weights, dtype=self._dtype, device=self._device)
            for index, weight in self._counted.items():
                self._squares[index] = weight.gradient.to(self._dtype).square().sum()
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
