"""The executor's ``Framework`` for a script's own Paddle layers: the script has the optimizer, the plan the order."""

# ruff: noqa: D102 - `Framework` and `Stages` document the methods
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import paddle

from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.exec.rank.framework_protocol import Array, StageCollectives
from pipeproof.exec.rank.paddle.arrays import PaddleArrays
from pipeproof.exec.train.paddle.module_stage import ModuleStage
from pipeproof.exec.train.scripts_optimizer import ScriptsOptimizer
from pipeproof.specs.plan_sections import RunSpec

Tensor: TypeAlias = paddle.Tensor


class ModuleFramework:
    """Paddle with the layers of one rank; a ``Framework`` and its ``Stages``. A weight is a parameter."""

    def __init__(self, stages: Mapping[int, ModuleStage]) -> None:
        self.arrays = PaddleArrays()
        self._stages = stages

    def stages(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> ModuleFramework:
        return self

    def make(self, number: int, lent: Mapping[str, Tensor]) -> ModuleStage:
        return self._stages[number]

    def routers(self, stage: ModuleStage) -> None:
        return None

    def buffers(self, stage: ModuleStage) -> dict[str, Tensor]:
        return {}

    def restore_buffers(self, stage: ModuleStage, buffers: Mapping[str, Tensor]) -> None:
        """Do nothing: buffers are in the layers."""

    def load(self, step: int) -> None:
        """Do nothing: the script passes the data."""

    def optimizer(self, run: RunSpec, weights: Mapping[str, Tensor]) -> ScriptsOptimizer:
        return ScriptsOptimizer()

    def gradient(self, weight: Tensor) -> Tensor:
        """The main gradient of mixed precision if the weight has one; zeros without any, as Fleet takes it."""
        main: Any = getattr(weight, "main_grad", None)
        gradient = weight.grad if main is None else main
        return paddle.zeros_like(weight) if gradient is None else gradient.contiguous()

    def put_gradient(self, weight: Tensor, gradient: Tensor) -> None:
        main: Any = getattr(weight, "main_grad", None)
        current = weight.grad if main is None else main
        if current is None:
            weight.grad = gradient
        else:
            current.set_value(gradient)

    def value(self, weight: Tensor) -> Array:
        return self.arrays.to_numpy(weight)
