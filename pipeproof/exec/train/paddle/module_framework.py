"""The executor's ``Framework`` for a script's own Paddle layers."""

# ruff: noqa: D102 - `Framework` documents the methods
from __future__ import annotations

from typing import Any, TypeAlias

import paddle

from pipeproof.exec.train.paddle.module_stage import ModuleStage
from pipeproof.exec.train.script_framework import ScriptFramework

Tensor: TypeAlias = paddle.Tensor


class PaddleLayers(ScriptFramework[ModuleStage]):
    """Paddle with the layers of one rank. A weight is a parameter."""

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
