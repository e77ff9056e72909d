"""Stages as a rank runs them with PyTorch: between them is a tuple of tensors, one for each member of the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.framework import Array, RankStage, StageCollectives, WeightGradients
from pipeproof.exec.gpt_members import activation_place
from pipeproof.stages.common.units import Unit
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.stages.torch.balance import Balance
from pipeproof.stages.torch.batches import StepBatches
from pipeproof.stages.torch.members import put_into, taken_from
from pipeproof.stages.torch.stage import TorchStage
from pipeproof.stages.torch.weights import Weight

Tensor: TypeAlias = torch.Tensor
Value: TypeAlias = tuple[Tensor, ...]
"""What crosses a boundary, in the order of the edge's members."""


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
        self._tp, self._part_of_sequence = coords["tp"], coords["cp"] if plan.spec.topology.cp > 1 else None
        self._batch_first = plan.spec.model.activation_order == "bsh"
        self._dtype: torch.dtype = getattr(torch, plan.spec.run.dtype)
        self.parameters, self.balance = stage.parameters, stage.balance

    def forward(self, inputs: Value, *, step: int, index: int, piece: int, watch: LayerWatch | None) -> Value:
        """Run one unit of work on the micro-batch, which every stage has.

        What of it came from the stage before takes the place of the stage's own.
        """
        members, after = self._members(self._number - 1, index, piece), self._members(self._number, index, piece)
        piece = piece if self._part_of_sequence is None else self._part_of_sequence
        unit, activation = self._batches.unit(index, piece), None
        handed_on: dict[str, Tensor] = {}
        if members:
            place = activation_place(members)
            activation = inputs[place].to(self._dtype)
            for member, received in zip(members, inputs, strict=True):
                if member is members[place]:
                    continue
                if member.placement(at_sender=False, gradient=False).dim is None:
                    unit = put_into(unit, member, received, batch_first=self._batch_first)
                else:  # not all of it: this stage only hands it on
                    handed_on[member.member] = received
        output = self._stage.forward(activation, unit, step=step, index=index, piece=piece, watch=watch)
        if not after:
            losses = self._stage.losses
            return (output,) if losses is None or not losses.dim() else (output, losses)
        place = activation_place(after)
        return tuple(
            output.to(getattr(torch, member.dtype))
            if member is after[place]
            else handed_on[member.member].clone()
            if member.member in handed_on
            else self._part(unit, member)
            for member in after
        )

    def backward_input(self, outputs: Value, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one unit of work back to the activation."""
        place = next((place for place, gradient in enumerate(gradients) if gradient is not None), 0)
        return self._stage.backward_input(outputs[place], gradients[place])

    def give_back(self) -> None:
        """As ``TorchStage.give_back``."""
        self._stage.give_back()

    def _members(self, edge: int, index: int, piece: int) -> tuple[Boundary, ...]:
        """What crosses an edge for one unit of work; nothing does before the first stage and after the last."""
        schedule = self._plan.spec.schedule
        unit = index % schedule.num_micro_batches * schedule.num_sequence_splits + piece
        return self._plan.edges[edge].members(unit) if 0 <= edge < len(self._plan.edges) else ()

    def _part(self, unit: Unit, member: Boundary) -> Tensor:
        """What this rank sends of a member that comes from the micro-batch: a copy, for what is sent is freed."""
        whole = taken_from(unit, member, batch_first=self._batch_first)
        dim = member.placement(at_sender=True, gradient=False).dim
        return (whole if dim is None else whole.chunk(member.num_tp_ranks, dim)[self._tp]).clone()


class TorchStages:
    """What makes a rank's stages, and has the tokens that they read; a ``Stages``."""

    def __init__(
        self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives, device: torch.device
    ) -> None:
        self._plan, self._coords, self._collectives, self._device = plan, coords, collectives, device
        data_rank = coords["dp"] * plan.mesh.size("ep") + coords["ep"]
        self._batches = StepBatches(plan.spec, data_rank * plan.spec.schedule.num_micro_batches, device)

    def make(self, number: int, lent: Mapping[str, Weight]) -> RankStage:
        """A stage, with the weights that the rank's other stages lend it."""
        at = self._coords["tp"], self._collectives, self._coords["ep"], self._collectives
        layers = self._plan.layers_of(number)
        stage = TorchStage(self._plan.spec, layers, self._device, *at, lent=lent, context=self._collectives)
        return TorchGptStage(self._plan, number, self._coords, stage, self._batches)

    def routers(self, stage: RankStage) -> TorchRouters | None:
        """The routers of a stage."""
        return TorchRouters(stage.balance) if isinstance(stage, TorchGptStage) else None

    def buffers(self, _: RankStage) -> dict[str, Tensor]:
        """A GPT has none."""
        return {}

    def put_buffers(self, stage: RankStage, buffers: Mapping[str, Tensor]) -> None:
        """Nothing to put."""

    def load(self, step: int) -> None:
        """Draw a step's micro-batches, and put them on the device."""
        self._batches.load(step)


class TorchRouters:
    """The routers of one stage, which count on the device; a ``Routers``."""

    def __init__(self, balance: Balance) -> None:
        self._balance = balance
        self.begin, self.move_biases = balance.begin, balance.move_biases
        self.load, self.set_load = balance.load, balance.set_load

    def biased(self) -> Sequence[str]:
        """The experts whose routers have a bias that moves."""
        return list(self._balance.biases)

    def bias(self, experts: str) -> Tensor:
        """The bias of one router."""
        return self._balance.biases[experts]

    def put_bias(self, experts: str, bias: Tensor) -> None:
        """Replace it, in place."""
        self._balance.biases[experts].copy_(bias)

    def shown(self) -> dict[str, Array]:
        """As ``Balance.shown``."""
        return self._balance.shown()
