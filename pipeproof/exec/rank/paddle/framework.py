"""``Framework`` of ``exec.rank.framework_protocol`` for Paddle; start Paddle before importing this module."""

# ruff: noqa: D102 - `Framework` documents the methods
from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import numpy as np
import paddle

from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.exec.launch.rendezvous import await_store
from pipeproof.exec.rank.framework_protocol import StageCollectives, World
from pipeproof.exec.rank.paddle import comm, nccl
from pipeproof.exec.rank.paddle.arrays import PaddleArrays
from pipeproof.exec.rank.paddle.stages import PaddleStages
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.stages.paddle.optimizer import GradientClip, ShardedOptimizer, StageOptimizer
from pipeproof.stages.paddle.runtime import num_math_threads


class PaddleFramework:
    """Paddle over gloo or NCCL; a ``Framework`` whose weights are tensors with their gradient in ``grad``.

    It runs on the device of ``start_paddle``; without ``computes`` it uses no kernels there.
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
        return StageOptimizer(run, weights)

    def sharded_optimizer(
        self, run: RunSpec, weights: Mapping[str, paddle.Tensor], num_shards: int, index: int
    ) -> ShardedOptimizer:
        return ShardedOptimizer(run, weights, num_shards, index)

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
