"""``Framework`` of ``exec.rank.framework_protocol`` for PyTorch."""

# ruff: noqa: D102 - `Framework` documents the methods
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import numpy as np
import torch

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.framework_protocol import StageCollectives
from pipeproof.exec.rank.torch.arrays import TorchArrays
from pipeproof.exec.rank.torch.comm import Copied, TorchWorld, connect
from pipeproof.exec.rank.torch.stages import TorchStages
from pipeproof.exec.rank.torch.thread_state import as_this_thread
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.stages.torch.functional import wide_type
from pipeproof.stages.torch.optimizer import GradientClip, ShardedOptimizer, StageOptimizer
from pipeproof.stages.torch.runtime import start_torch
from pipeproof.stages.torch.weights import Weight

# --- A second stream of a GPU, whose work waits only for what the rank's own stream had launched at one point ---


class TorchSideStream:
    """A ``SideStream`` of one device; on a CPU there is none.

    One for all pairs of a rank, because the allocator has memory of its own for each stream. Its few small kernels come
    before those of computations that wait for a multiprocessor.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def follow(self) -> None:
        """Let its next work wait for all that the current stream has launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def launching(self) -> AbstractContextManager[object]:
        """Within the context work is launched on it."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor, which was made within the context, until the current stream does not read it."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._stream.device))


class TorchFramework:
    """PyTorch on ``cpu`` over gloo, or on one GPU over NCCL; a ``Framework`` whose weights are ``Weight``.

    The options are those of ``start_torch``.

    Raises:
        RuntimeError: the device is missing or does not compute.
    """

    has_values = True

    def __init__(self, device: str, local_rank: int = 0, *, computes: bool = True, deterministic: bool = False) -> None:
        self.device = start_torch(device, local_rank, computes=computes, deterministic=deterministic)
        self.arrays = TorchArrays(self.device)

    def num_threads(self) -> int:
        return int(torch.get_num_threads())

    def as_this_thread(self) -> Callable[[], None]:
        return as_this_thread(self.device)

    @cached_property
    def side_stream(self) -> TorchSideStream:
        return TorchSideStream(self.device)

    def connect(self, rank: int, plan: LoweredPlan, progress: Callable[[str], None]) -> TorchWorld:
        graph, num_ranks = plan.graph, plan.mesh.num_ranks
        return connect(rank, num_ranks, self.device, graph.channels, graph.groups, progress, Copied.of(plan))

    def stages(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> TorchStages:
        return TorchStages(plan, coords, collectives, self.device)

    def optimizer(self, run: RunSpec, weights: Mapping[str, Weight]) -> StageOptimizer:
        return StageOptimizer(run, weights)

    def sharded_optimizer(
        self, run: RunSpec, weights: Mapping[str, Weight], num_shards: int, index: int
    ) -> ShardedOptimizer:
        return ShardedOptimizer(run, weights, num_shards, index)

    def clip(self, counted: Mapping[int, Weight], num_weights: int, limit: float, dtype: str) -> GradientClip:
        return GradientClip(counted, num_weights, limit, wide_type(getattr(torch, dtype)), self.device)

    def gradient(self, weight: Weight) -> torch.Tensor:
        return weight.gradient

    def put_gradient(self, weight: Weight, gradient: torch.Tensor) -> None:
        weight.gradient.copy_(gradient)

    def main(self, weight: Weight) -> torch.Tensor:
        return weight.main

    def value(self, weight: Weight) -> np.ndarray:
        return self.arrays.to_numpy(weight.main)
