"""Paddle in one process, as ``pipeproof.exec.framework.Framework`` asks for it. Start it before importing this."""

# ruff: noqa: D102 - what each method does stands once, at `Framework`
from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
import paddle

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.framework import StageCollectives, World
from pipeproof.exec.paddle import comm, nccl
from pipeproof.exec.paddle.arrays import PaddleArrays
from pipeproof.exec.paddle.stages import PaddleStages
from pipeproof.exec.rendezvous import await_store
from pipeproof.specs.plan import RunSpec
from pipeproof.stages.paddle.clip import GradientClip
from pipeproof.stages.paddle.optimizer import StageOptimizer, make_optimizer
from pipeproof.stages.paddle.runtime import num_math_threads
from pipeproof.stages.paddle.sharded import ShardedOptimizer


class PaddleFramework:
    """Paddle over gloo, or over NCCL; a ``Framework`` whose weights are tensors with their gradient in ``grad``.

    It is on the device on which ``start_paddle`` put it; ``computes`` says whether kernels are to be used there.
    """

    def __init__(self, device: str = "cpu", *, computes: bool = True) -> None:
        self.arrays = PaddleArrays()
        self._device, self._computes = device, computes

    def num_threads(self) -> int:
        return num_math_threads()

    def connect(self, rank: int, plan: LoweredPlan, progress: Callable[[str], None]) -> World:
        if rank > 0 and "PADDLE_MASTER" in os.environ:
            await_store(os.environ["PADDLE_MASTER"])
        channels, groups = plan.graph.channels, plan.graph.groups
        if self._device == "gpu":
            return nccl.connect(rank, plan.mesh.num_ranks, channels, groups, progress, computes=self._computes)
        return comm.connect(rank, channels, groups, progress)

    def stages(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> PaddleStages:
        return PaddleStages(plan, coords, collectives)

    def optimizer(self, run: RunSpec, weights: Mapping[str, paddle.Tensor]) -> StageOptimizer:
        return make_optimizer(run, weights)

    def sharded_optimizer(
        self, run: RunSpec, weights: Mapping[str, paddle.Tensor], num_shares: int, place: int
    ) -> ShardedOptimizer:
        return ShardedOptimizer(run, weights, num_shares, place)

    def clip(self, counted: Mapping[int, paddle.Tensor], num_weights: int, limit: float, dtype: str) -> GradientClip:
        return GradientClip(counted, num_weights, limit, dtype)

    def gradient(self, weight: paddle.Tensor) -> paddle.Tensor:
        return weight.grad

    def put_gradient(self, weight: paddle.Tensor, gradient: paddle.Tensor) -> None:
        weight.grad.set_value(gradient)

    def main(self, weight: paddle.Tensor) -> paddle.Tensor:
        return weight

    def value(self, weight: paddle.Tensor) -> np.ndarray:
        return self.arrays.to_numpy(weight)
