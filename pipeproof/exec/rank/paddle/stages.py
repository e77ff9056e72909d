"""Stages of a rank with Paddle; the tensors between them are tuples, one tensor per member of the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import paddle

from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.exec.rank.boundary_members import activation_index, member_values, tp_shard, with_member
from pipeproof.exec.rank.framework_protocol import Array, RankStage, StageCollectives, WeightGradients
from pipeproof.exec.rank.paddle.arrays import PaddleArrays
from pipeproof.schedule.ops import OpKind
from pipeproof.stages.common.balance import Balance
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.synthetic import Batch, micro_batch
from pipeproof.stages.paddle.stage import PaddleStage

if TYPE_CHECKING:  # which loads Fleet
    from pipeproof.stages.paddle.custom_stage import CustomStage

Tensor: TypeAlias = paddle.Tensor
Value: TypeAlias = tuple[Tensor, ...]
"""Tensors that cross a boundary, in the order of the edge's members."""


class GptStage:
    """A stage of the plan's GPT between its boundaries."""

    def __init__(
        self,
        plan: LoweredPlan,
        number: int,
        coords: Mapping[str, int],
        collectives: StageCollectives,
        lent: Mapping[str, Tensor],
    ) -> None:
        ranks = coords["tp"], collectives, coords["ep"], collectives
        self._plan, self._number, self._tp = plan, number, coords["tp"]
        self._cp_rank = coords["cp"]
        self._stage = PaddleStage(plan.spec, plan.layers_of(number), *ranks, lent=lent, context=collectives)
        self.parameters, self.balance = self._stage.parameters, self._stage.balance

    def forward(self, inputs: Value, *, step: int, index: int, split: int, watch: LayerWatch | None) -> Value:
        """Run one work item on the micro-batch that the stage draws; received members replace its own values."""
        spec = self._plan.spec
        batch, activation = micro_batch(spec, step, index), None
        members, after = self._members(self._number - 1, index, split), self._members(self._number, index, split)
        num_splits = spec.schedule.num_sequence_splits * spec.topology.cp
        split = self._cp_rank if spec.topology.cp > 1 else split
        shards: dict[str, Tensor] = {}
        if members:
            position = activation_index(members)
            activation = _as(inputs[position], spec.run.dtype)
            item = _sequence_split(batch, split, num_splits)
            for member, received in zip(members, inputs, strict=True):
                if member is members[position]:
                    continue
                if member.placement(at_sender=False, gradient=False).dim is None:
                    item = with_member(item, member, received.numpy())
                else:  # this stage only sends its shard on
                    shards[member.member] = received
            batch = _with_split(batch, item, split, num_splits)
        output = self._stage.forward(activation, batch, step=step, index=index, split=split, watch=watch)
        if not after:
            losses = self._stage.losses
            return (output,) if losses is None or not losses.shape else (output, paddle.to_tensor(losses))
        item = _sequence_split(batch, split, num_splits)
        position = activation_index(after)
        return tuple(
            _as(output, member.dtype)
            if member is after[position]
            else shards[member.member].clone()
            if member.member in shards
            else self._outgoing(item, member)
            for member in after
        )

    def backward_input(self, outputs: Value, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one work item backward to the activation."""
        position = next((index for index, gradient in enumerate(gradients) if gradient is not None), 0)
        return self._stage.backward_input(outputs[position], gradients[position])

    def _members(self, edge: int, index: int, split: int) -> tuple[Boundary, ...]:
        """Members of an edge for one work item; empty before the first stage and after the last."""
        schedule = self._plan.spec.schedule
        work_item = index % schedule.num_micro_batches * schedule.num_sequence_splits + split
        return self._plan.edges[edge].members(work_item) if 0 <= edge < len(self._plan.edges) else ()

    def _outgoing(self, batch: Batch, member: Boundary) -> Tensor:
        """This rank's part of a member that comes from the micro-batch."""
        placement = member.placement(at_sender=True, gradient=False)
        shard = tp_shard(member_values(batch, member), placement, self._tp, member.num_tp_ranks)
        return paddle.to_tensor(np.ascontiguousarray(shard))

    def return_gradients(self) -> None:
        """Return the gradients of borrowed weights, see ``PaddleStage.return_gradients``."""
        self._stage.return_gradients()


def _as(tensor: Tensor, dtype: str) -> Tensor:
    """Cast a tensor to the type of its message or of the computation."""
    return tensor if PaddleArrays().dtype(tensor) == dtype else paddle.cast(tensor, dtype)


def _sequence_split(batch: Batch, split: int, num_splits: int) -> Batch:
    """One sequence split of a micro-batch."""
    return Batch(*(np.split(array, num_splits, axis=1)[split] for array in (batch.tokens, batch.labels)))


def _with_split(batch: Batch, item: Batch, split: int, num_splits: int) -> Batch:
    """The micro-batch with another split in position of its item."""
    splits = [_sequence_split(batch, index, num_splits) for index in range(num_splits)]
    splits[split] = item
    return Batch(*(np.concatenate([getattr(part, name) for part in splits], axis=1) for name in ("tokens", "labels")))


class PaddleStages:
    """Factory of a rank's stages; a ``Stages``. Custom layers are built once for all stages of the rank."""

    def __init__(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> None:
        self._plan, self._coords, self._collectives = plan, coords, collectives
        if plan.spec.is_custom:
            from pipeproof.stages.custom.built_layers import BuiltModel

            self._model = BuiltModel(plan.spec, [layer.name for layer in plan.spec.custom.layers])
            self._split = {op.stage for op in plan.programs[coords["pp"]] if op.kind is OpKind.BACKWARD_INPUT}

    def make(self, number: int, lent: Mapping[str, Tensor]) -> RankStage:
        """Return a stage, with the weights that the rank's other stages lend it."""
        if not self._plan.spec.is_custom:
            return GptStage(self._plan, number, self._coords, self._collectives, lent)
        from pipeproof.stages.paddle.custom_stage import CustomStage

        names = self._plan.stages[number]
        return CustomStage(self._plan.spec, self._model, names, lent, splits=number in self._split)

    def routers(self, stage: RankStage) -> PaddleRouters | None:
        """Return the routers of a GPT's stage, None for custom layers."""
        return PaddleRouters(stage.balance) if isinstance(stage, GptStage) else None

    def buffers(self, stage: RankStage) -> dict[str, Tensor]:
        """Return the buffers of custom layers; a GPT has none."""
        return {} if isinstance(stage, GptStage) else self._own(stage).buffers()

    def restore_buffers(self, stage: RankStage, buffers: Mapping[str, Tensor]) -> None:
        """Resume with the buffers, see ``CustomStage.restore_buffers``."""
        if not isinstance(stage, GptStage):
            self._own(stage).restore_buffers(buffers)

    def _own(self, stage: RankStage) -> CustomStage:
        from pipeproof.stages.paddle.custom_stage import CustomStage

        assert isinstance(stage, CustomStage), "stages are GPT stages or custom ones"
        return stage

    def load(self, step: int) -> None:
        """Do nothing: stages draw each micro-batch when they need it."""


class PaddleRouters:
    """Routers of one stage, which count in numpy; a ``Routers``."""

    def __init__(self, balance: Balance) -> None:
        self._balance = balance
        self.begin, self.move_biases = balance.begin, balance.move_biases

    def biased(self) -> Sequence[str]:
        """Return the experts whose routers have a bias that moves."""
        return list(self._balance.biases)

    def load(self, experts: str) -> Tensor:
        """Return the load as a tensor, see ``Balance.load``."""
        return paddle.to_tensor(self._balance.load(experts))

    def set_load(self, experts: str, load: Tensor) -> None:
        """Replace the load by a tensor, see ``Balance.set_load``."""
        self._balance.set_load(experts, load.numpy())

    def bias(self, experts: str) -> Tensor:
        """Return the bias of one router as a tensor."""
        return paddle.to_tensor(self._balance.biases[experts])

    def put_bias(self, experts: str, bias: Tensor) -> None:
        """Replace the bias of one router in position."""
        self._balance.biases[experts][...] = bias.numpy()

    def values(self) -> dict[str, Array]:
        """Return the router values, see ``Balance.values``."""
        return self._balance.values()
