"""Stages of a rank with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.framework_protocol import RankStage, StageCollectives
from pipeproof.exec.rank.gpt_stage import GptRouters, GptStage
from pipeproof.stages.common.balance import Balance
from pipeproof.stages.common.work_items import WorkItem
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.torch.batches import StepBatches, member_values, with_member
from pipeproof.stages.torch.graph_stage import GraphStage
from pipeproof.stages.torch.stage import TorchStage
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

    def capture(self) -> str:
        """Make the graphs of a ``GraphStage``; return why it does not run as graphs, empty if it does."""
        assert isinstance(self._torch_stage, GraphStage), "the plan has no run.compiler"
        self._torch_stage.capture()
        return self._torch_stage.reason

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
        self._first = data_rank * plan.spec.schedule.num_micro_batches
        self._batches = StepBatches(plan.spec, self._first, device)
        self._made: list[TorchStage] = []

    def make(self, number: int, lent: Mapping[str, Weight]) -> RankStage:
        """Return a stage, with the weights that the rank's other stages lend it."""
        spec, layers = self._plan.spec, self._plan.layers_of(number)
        if spec.run.compiler is not None:
            stage: TorchStage = GraphStage(spec, layers, self._device, number, lent, self._coords, self._collectives)
        else:
            ranks = self._coords["tp"], self._collectives, self._coords["ep"], self._collectives
            stage = TorchStage(spec, layers, self._device, *ranks, lent=lent, context=self._collectives)
        self._made.append(stage)
        return TorchGptStage(self._plan, number, self._coords, stage, self._batches)

    def routers(self, stage: RankStage) -> TorchRouters | None:
        """Return the routers of a stage."""
        return TorchRouters(stage.balance) if isinstance(stage, TorchGptStage) else None

    def load(self, step: int) -> None:
        """Draw a step's micro-batches and copy them to the device, with the states of its dropout masks."""
        self._batches.load(step)
        for stage in self._made:
            stage.load_masks(step, self._first)


class TorchRouters(GptRouters):
    """Routers of one stage, which count on the device; a ``Routers``."""

    def __init__(self, balance: Balance) -> None:
        super().__init__(balance)
        self.load, self.set_load = balance.load, balance.set_load

    def bias(self, experts: str) -> Tensor:
        """Return the bias of one router."""
        return self._balance.biases[experts]

    def put_bias(self, experts: str, bias: Tensor) -> None:
        """Replace the bias of one router in position."""
        self._balance.biases[experts].copy_(bias)
