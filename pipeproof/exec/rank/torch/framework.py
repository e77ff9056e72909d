"""``Framework`` of ``exec.rank.framework_protocol`` for PyTorch."""

# ruff: noqa: D102 - `Framework` documents the methods
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.framework_protocol import RankStage, Routers, StageCollectives
from pipeproof.exec.rank.gpt_stage import GptStage
from pipeproof.exec.rank.torch.arrays import TorchArrays, as_this_thread
from pipeproof.exec.rank.torch.comm import TorchWorld, connect
from pipeproof.stages.common.work_items import WorkItem
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.torch.functional import wide_type
from pipeproof.stages.torch.optimizer import GradientClip, ShardedOptimizer, StageOptimizer
from pipeproof.stages.torch.runtime import start_torch
from pipeproof.stages.torch.stage import StepBatches, TorchStage, member_values, with_member
from pipeproof.stages.torch.weights import Weight

Tensor: TypeAlias = torch.Tensor


class TorchGptStage(GptStage):
    """A stage whose work items are on the device before the step begins."""

    def __init__(
        self, plan: LoweredPlan, number: int, coords: Mapping[str, int], stage: TorchStage, batches: StepBatches
    ) -> None:
        super().__init__(plan, number, coords, stage)
        self._torch_stage = stage
        self._batches, self._batch_first = batches, plan.spec.gpt.activation_order == "bsh"

    def accumulate_deferred(self) -> None:
        """Compute the weight gradients that the running backward has deferred so far."""
        self._torch_stage.accumulate_deferred()

    def _work_item(self, step: int, index: int, split: int) -> WorkItem:
        return self._batches.work_item(index, split)

    def _with_member(self, work_item: WorkItem, split: int, member: Boundary, received: Tensor) -> WorkItem:
        return with_member(work_item, member, received, batch_first=self._batch_first)

    def _outgoing(self, work_item: WorkItem, split: int, member: Boundary) -> Tensor:
        whole = member_values(work_item, member, batch_first=self._batch_first)
        dim = member.placement(at_sender=True, gradient=False).dim
        return (whole if dim is None else whole.chunk(member.num_tp_ranks, dim)[self._tp]).clone()

    def _as(self, tensor: Tensor, dtype: str) -> Tensor:
        return tensor.to(getattr(torch, dtype))


class TorchStages:
    """Factory of a rank's stages, with the tokens that they read; a ``Stages``."""

    def __init__(
        self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives, device: torch.device
    ) -> None:
        self._plan, self._coords, self._collectives, self._device = plan, coords, collectives, device
        data_rank = coords["dp"] * plan.mesh.size("ep") + coords["ep"]
        self._batches = StepBatches(plan.spec, data_rank * plan.spec.schedule.num_micro_batches, device)

    def make(self, number: int, lent: Mapping[str, Weight]) -> RankStage:
        """Return a stage, with the weights that the rank's other stages lend it."""
        spec, layers = self._plan.spec, self._plan.layers_of(number)
        ranks = self._coords["tp"], self._collectives, self._coords["ep"], self._collectives
        stage = TorchStage(spec, layers, self._device, *ranks, lent=lent, context=self._collectives)
        return TorchGptStage(self._plan, number, self._coords, stage, self._batches)

    def routers(self, stage: RankStage) -> Routers | None:
        """Return the routers of a stage."""
        return stage.balance if isinstance(stage, TorchGptStage) else None

    def load(self, step: int) -> None:
        """Draw a step's micro-batches and copy them to the device."""
        self._batches.load(step)


# --- A second stream of a GPU, whose work waits only for earlier launches of the rank's own stream ---


class TorchSideStream:
    """A ``SideStream`` of one device; on a CPU there is none.

    All pairs of a rank share it, because the allocator has separate memory for each stream. Its few small kernels get a
    multiprocessor before waiting kernels of computations.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def follow(self) -> None:
        """Let its next work wait for all work that the current stream has launched so far."""
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

    For the options see ``start_torch``.

    Raises:
        RuntimeError: the device is missing or does not compute.
    """

    has_values = True
    optimizer = StageOptimizer
    sharded_optimizer = ShardedOptimizer

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
        return connect(rank, num_ranks, self.device, graph.channels, graph.groups, progress)

    def stages(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> TorchStages:
        return TorchStages(plan, coords, collectives, self.device)

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
