"""The optimizer of one rank, with gradient buffers that begin every step as +0.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import paddle

from pipeproof.specs.plan import RunSpec

_KEPT = MappingProxyType(
    {"moment1": "moment1", "moment2": "moment2", "beta1_power": "beta1_pow_acc", "beta2_power": "beta2_pow_acc"}
)
"""What AdamW keeps of each weight: our names of it, and Paddle's."""


class StageOptimizer:
    """Paddle's own SGD or AdamW over one rank's parameters.

    AdamW (arXiv:1711.05101) has betas 0.9 and 0.999, epsilon 1e-8 and weight
    decay 0.01 on every parameter. There is no schedule of the learning rate;
    gradients are clipped before (``clip``).
    """

    def __init__(self, run: RunSpec, parameters: Mapping[str, paddle.Tensor]) -> None:
        self._named, self._parameters = dict(parameters), list(parameters.values())
        self._kept = _KEPT if run.optimizer == "adamw" else {}
        self._update = update_rule(run, self._parameters)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Give every parameter a fresh gradient buffer of +0.0.

        A buffer that began as the first micro-batch's gradient could hold -0.0
        where one that began as +0.0 holds +0.0.
        """
        for parameter in self._parameters:
            parameter.grad = paddle.zeros_like(parameter)

    def step(self) -> None:
        """Update every parameter in place from its gradient buffer."""
        if self._parameters:  # AdamW wants a first one; a stage of empty layers has none
            self._update.step()

    def state(self) -> dict[tuple[str, str], paddle.Tensor]:
        """What is kept from step to step beside weights, by weight and slot; there is something after a step."""
        kept = self._update.state_dict() if self._parameters else {}
        return {
            (name, slot): kept[f"{parameter.name}_{theirs}_0"]
            for name, parameter in self._named.items()
            for slot, theirs in self._kept.items()
        }

    def put_state(self, weights: Mapping[str, paddle.Tensor], kept: Mapping[tuple[str, str], paddle.Tensor]) -> None:
        """Go on with these weights, and with what another optimizer kept of them; before the first step."""
        for name, value in weights.items():
            self._named[name].set_value(value)
        state = {}
        for name, parameter in self._named.items():
            for slot, theirs in self._kept.items():
                one = kept[name, slot]
                state[f"{parameter.name}_{theirs}_0"] = one if one.shape else one.reshape([1])  # Paddle's numbers
        if state:
            self._update.set_state_dict(state)


def update_rule(run: RunSpec, parameters: Sequence[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    """Paddle's own optimizer that the plan's ``run`` names, with its constants."""
    if run.optimizer == "sgd":
        return paddle.optimizer.SGD(run.learning_rate, parameters=parameters)
    return paddle.optimizer.AdamW(
        run.learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, parameters=parameters
    )


def make_optimizer(run: RunSpec, parameters: Mapping[str, paddle.Tensor]) -> StageOptimizer:
    """The optimizer that the plan's ``run`` names, over ``parameters`` by name, in their order."""
    return StageOptimizer(run, parameters)
