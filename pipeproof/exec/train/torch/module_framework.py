"""The executor's ``Framework`` for a script's own modules: the script has the optimizer, the plan the order."""

# ruff: noqa: D102 - `Framework` and `Stages` document the methods
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.exec.rank.framework_protocol import StageCollectives
from pipeproof.exec.rank.torch.arrays import TorchArrays
from pipeproof.exec.train.scripts_optimizer import ScriptsOptimizer
from pipeproof.exec.train.torch.data_parallel import local_part
from pipeproof.exec.train.torch.module_stage import ModuleStage
from pipeproof.specs.plan_sections import RunSpec


class ModuleFramework:
    """PyTorch with the modules of one rank; a ``Framework`` and its ``Stages``. A weight is a ``Parameter``."""

    def __init__(self, device: torch.device, stages: Mapping[int, ModuleStage]) -> None:
        self.arrays = TorchArrays(device)
        self._stages = stages

    def stages(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> ModuleFramework:
        return self

    def make(self, number: int, lent: Mapping[str, nn.Parameter]) -> ModuleStage:
        return self._stages[number]

    def routers(self, stage: ModuleStage) -> None:
        return None

    def buffers(self, stage: ModuleStage) -> dict[str, torch.Tensor]:
        return {}

    def restore_buffers(self, stage: ModuleStage, buffers: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: buffers are in the modules."""

    def load(self, step: int) -> None:
        """Do nothing: the script passes the data."""

    def optimizer(self, run: RunSpec, weights: Mapping[str, nn.Parameter]) -> ScriptsOptimizer:
        return ScriptsOptimizer()

    def gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """The gradient; of a ``DTensor`` this rank's part, laid out as the weight."""
        if weight.grad is None:
            return local_part(torch.zeros_like(weight))
        placements = getattr(weight, "placements", None)
        if placements is not None and weight.grad.placements != placements:
            weight.grad = weight.grad.redistribute(placements=placements)
        return local_part(weight.grad)

    def put_gradient(self, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        if hasattr(weight, "placements"):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            local_part(weight.grad).copy_(gradient)
        else:
            weight.grad = gradient

    def value(self, weight: nn.Parameter) -> Any:
        return self.arrays.to_numpy(weight)
