"""The optimizer of one rank, with gradient buffers that begin every step as +0.0."""

from __future__ import annotations

from collections.abc import Mapping

import paddle

from pipeproof.specs.plan import RunSpec


class StageOptimizer:
    """Paddle's own SGD or AdamW over one rank's parameters.

    AdamW (arXiv:1711.05101) has betas 0.9 and 0.999, epsilon 1e-8 and weight
    decay 0.01 on every parameter. There is no schedule of the learning rate;
    gradients are clipped before (``clip``).
    """

    def __init__(self, run: RunSpec, parameters: Mapping[str, paddle.Tensor]) -> None:
        self._parameters = list(parameters.values())
        if run.optimizer == "sgd":
            self._update = paddle.optimizer.SGD(run.learning_rate, parameters=self._parameters)
        else:
            self._update = paddle.optimizer.AdamW(
                run.learning_rate,
                beta1=0.9,
                beta2=0.999,
                epsilon=1e-8,
                weight_decay=0.01,
                parameters=self._parameters,
            )
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


def make_optimizer(run: RunSpec, parameters: Mapping[str, paddle.Tensor]) -> StageOptimizer:
    """The optimizer that the plan's ``run`` names, over ``parameters`` by name, in their order."""
    return StageOptimizer(run, parameters)
