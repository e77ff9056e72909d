"""Stages of a rank with PyTorch; the tensors between them are tuples, one tensor per member of the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.exec.rank.boundary_members import activation_index
from pipeproof.exec.rank.framework_protocol import Array, RankStage, StageCollectives, WeightGradients
from pipeproof.stages.common.balance import Balance
from pipeproof.stages.common.work_items import WorkItem
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.torch.batches import StepBatches, member_values, with_member
from pipeproof.stages.torch.stage import TorchStage
from pipeproof.stages.torch.weights import Weight

Tensor: TypeAlias = torch.Tensor
Value: TypeAlias = tuple[Tensor, ...]
"""Tensors that cross a boundary, in the order of the edge's members."""


class TorchGptStage:
    """A stage of the plan's GPT between its boundaries; a ``RankStage``."""

    def __init__(
        self,
        plan: LoweredPlan,
        number: int,
        coords: Mapping[str, int],
        stage: TorchStage,
        batches: StepBatches,
    ) -> None:
        self._plan, self._number, self._stage, self._batches = plan, number, stage, batches
        self._tp, self._cp_rank = coords["tp"], coords["cp"] if plan.spec.topology.cp > 1 else None
        self._batch_first = plan.spec.gpt.activation_order == "bsh"
        self._dtype: torch.dtype = getattr(torch, plan.spec.run.dtype)
        self.parameters, self.balance = stage.parameters, stage.balance

    def forward(self, inputs: Value, *, step: int, index: int, split: int, watch: LayerWatch | None) -> Value:
        """Run one work item on the stage's micro-batch; received members of the edge replace the stage's own values."""
        members, after = self._members(self._number - 1, index, split), self._members(self._number, index, split)
        split = split if self._cp_rank is None else self._cp_rank
        work_item, activation = self._batches.work_item(index, split), None
        shards: dict[str, Tensor] = {}
        if members:
            position = activation_index(members)
            activation = inputs[position].to(self._dtype)
            for member, received in zip(members, inputs, strict=True):
                if member is members[position]:
                    continue
                if member.placement(at_sender=False, gradient=False).dim is None:
                    work_item = with_member(work_item, member, received, batch_first=self._batch_first)
                else:  # this stage only sends its shard on
                    shards[member.member] = received
        output = self._stage.forward(activation, work_item, step=step, index=index, split=split, watch=watch)
        if not after:
            losses = self._stage.losses
            return (output,) if losses is None or not losses.dim() else (output, losses)
        position = activation_index(after)
        return tuple(
            output.to(getattr(torch, member.dtype))
            if member is after[position]
            else shards[member.member].clone()
            if member.member in shards
            else self._outgoing(work_item, member)
            for member in after
        )

    def backward_input(self, outputs: Value, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one work item backward to the activation."""
        position = next((index for index, gradient in enumerate(gradients) if gradient is not None), 0)
        return self._stage.backward_input(outputs[position], gradients[position])

    def return_gradients(self) -> None:
        """Return the gradients of borrowed weights, see ``TorchStage.return_gradients``."""
        self._stage.return_gradients()

    def _members(self, edge: int, index: int, split: int) -> tuple[Boundary, ...]:
        """Members of an edge for one work item; empty before the first stage and after the last."""
        schedule = self._plan.spec.schedule
        work_item = index % schedule.num_micro_batches * schedule.num_sequence_splits + split
        return self._plan.edges[edge].members(work_item) if 0 <= edge < len(self._plan.edges) else ()

    def _outgoing(self, work_item: WorkItem, member: Boundary) -> Tensor:
        """Copy of this rank's part of a member that comes from the micro-batch; sent tensors are freed."""
        whole = member_values(work_item, member, batch_first=self._batch_first)
        dim = member.placement(at_sender=True, gradient=False).dim
        return (whole if dim is None else whole.chunk(member.num_tp_ranks, dim)[self._tp]).clone()


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
        ranks = self._coords["tp"], self._collectives, self._coords["ep"], self._collectives
        layers = self._plan.layers_of(number)
        stage = TorchStage(self._plan.spec, layers, self._device, *ranks, lent=lent, context=self._collectives)
        return TorchGptStage(self._plan, number, self._coords, stage, self._batches)

    def routers(self, stage: RankStage) -> TorchRouters | None:
        """Return the routers of a stage."""
        return TorchRouters(stage.balance) if isinstance(stage, TorchGptStage) else None

    def buffers(self, _: RankStage) -> dict[str, Tensor]:
        """Return no buffers: a GPT has none."""
        return {}

    def restore_buffers(self, stage: RankStage, buffers: Mapping[str, Tensor]) -> None:
        """Do nothing: a GPT has no buffers."""

    def load(self, step: int) -> None:
        """Draw a step's micro-batches and copy them to the device."""
        self._batches.load(step)


class TorchRouters:
    """Routers of one stage, which count on the device; a ``Routers``."""

    def __init__(self, balance: Balance) -> None:
        self._balance = balance
        self.begin, self.move_biases = balance.begin, balance.move_biases
        self.load, self.set_load = balance.load, balance.set_load

    def biased(self) -> Sequence[str]:
        """Return the experts whose routers have a bias that moves."""
        return list(self._balance.biases)

    def bias(self, experts: str) -> Tensor:
        """Return the bias of one router."""
        return self._balance.biases[experts]

    def put_bias(self, experts: str, bias: Tensor) -> None:
        """Replace the bias of one router in position."""
        self._balance.biases[experts].copy_(bias)

    def values(self) -> dict[str, Array]:
        """Return the router values, see ``Balance.values``."""
        return self._balance.values()
