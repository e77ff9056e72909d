"""The executor's ``Framework`` for a script's own PyTorch modules."""

# ruff: noqa: D102 - `Framework` documents the methods
from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from pipeproof.exec.rank.torch.arrays import TorchArrays
from pipeproof.exec.rank.torch.thread_state import as_this_thread
from pipeproof.exec.train.script_framework import ScriptFramework
from pipeproof.exec.train.torch.data_parallel import local_part
from pipeproof.exec.train.torch.module_stage import ModuleStage


class TorchModules(ScriptFramework[ModuleStage]):
    """PyTorch with the modules of one rank. A weight is a ``Parameter``."""

    def __init__(self, device: torch.device, stages: Mapping[int, ModuleStage]) -> None:
        super().__init__(TorchArrays(device), stages)
        self._device = device

    def as_this_thread(self) -> Callable[[], None]:
        return as_this_thread(self._device)

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
