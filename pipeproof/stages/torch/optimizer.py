"""The optimizer of one rank, on the main weights and the gradient buffers of ``Weight``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from pipeproof.specs.plan import RunSpec
from pipeproof.stages.torch.weights import Weight

_KEPT = MappingProxyType({"moment1": "exp_avg", "moment2": "exp_avg_sq", "step": "step"})
"""What AdamW keeps of each weight: our names of it, and PyTorch's."""


class StageOptimizer:
    """PyTorch's own SGD or AdamW over one rank's weights, by name.

    AdamW (arXiv:1711.05101) has betas 0.9 and 0.999, epsilon 1e-8 and weight
    decay 0.01 on every weight. There is no schedule of the learning rate;
    gradients are clipped before (``clip``). On GPUs one kernel updates many
    weights, and counts its steps on the device, so that a step can be captured in a graph.
    """

    def __init__(self, run: RunSpec, weights: Mapping[str, Weight]) -> None:
        self._weights = dict(weights)
        for weight in self._weights.values():
            weight.main.grad = weight.gradient
        on_gpu = any(weight.main.is_cuda for weight in self._weights.values())
        self._update: torch.optim.Optimizer | None = None
        self._kept = _KEPT if run.optimizer == "adamw" else {}
        mains = [weight.main for weight in self._weights.values()]
        if not mains:  # a stage of empty layers has none, and PyTorch wants one
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
        """Begin every gradient buffer as +0.0, in place."""
        for weight in self._weights.values():
            weight.zero_gradient()

    def step(self) -> None:
        """Update every main weight in place from its gradient buffer, and round what layers compute with."""
        if self._update is not None:
            self._update.step()
        for weight in self._weights.values():
            weight.renew()

    def state(self) -> dict[tuple[str, str], torch.Tensor]:
        """What is kept from step to step beside weights, by weight and slot; there is something after a step."""
        if self._update is None:
            return {}
        of = self._update.state
        return {
            (name, slot): of[weight.main][theirs]
            for name, weight in self._weights.items()
            for slot, theirs in self._kept.items()
        }

    def put_state(self, weights: Mapping[str, torch.Tensor], kept: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Go on with these main weights, and with what another optimizer kept of them; before the first step."""
        for name, value in weights.items():
            self._weights[name].main.copy_(value)
        if self._update is not None and self._kept:
            state = {
                place: {theirs: kept[name, slot] for slot, theirs in self._kept.items()}
                for place, name in enumerate(self._weights)
            }
            self._update.load_state_dict({"state": state, "param_groups": self._update.state_dict()["param_groups"]})
        for weight in self._weights.values():
            weight.renew()


def make_optimizer(run: RunSpec, weights: Mapping[str, Weight]) -> StageOptimizer:
    """The optimizer that the plan's ``run`` names, over ``weights`` by name, in their order."""
    return StageOptimizer(run, weights)
