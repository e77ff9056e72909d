"""Stages as a rank runs them with Paddle: between them is a tuple of tensors, one for each member of the edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import paddle

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.framework import Array, RankStage, StageCollectives, WeightGradients
from pipeproof.exec.gpt_members import activation_place, local_part, put_into, taken_from
from pipeproof.exec.paddle.arrays import PaddleArrays
from pipeproof.schedule.ops import OpKind
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.synthetic import Batch, micro_batch
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.stages.paddle.balance import Balance
from pipeproof.stages.paddle.stage import PaddleStage

if TYPE_CHECKING:  # which loads Fleet
    from pipeproof.stages.paddle.own_stage import OwnStage

Tensor: TypeAlias = paddle.Tensor
Value: TypeAlias = tuple[Tensor, ...]
"""What crosses a boundary, in the order of the edge's members."""


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
        at = coords["tp"], collectives, coords["ep"], collectives
        self._plan, self._number, self._tp = plan, number, coords["tp"]
        self._part_of_sequence = coords["cp"]
        self._stage = PaddleStage(plan.spec, plan.layers_of(number), *at, lent=lent, context=collectives)
        self.parameters, self.balance = self._stage.parameters, self._stage.balance

    def forward(self, inputs: Value, *, step: int, index: int, piece: int, watch: LayerWatch | None) -> Value:
        """Run one unit of work on the micro-batch, which every stage draws for itself.

        What of it came from the stage before takes the place of the stage's own.
        """
        spec = self._plan.spec
        batch, activation = micro_batch(spec, step, index), None
        members, after = self._members(self._number - 1, index, piece), self._members(self._number, index, piece)
        num_pieces = spec.schedule.num_sequence_splits * spec.topology.cp
        piece = self._part_of_sequence if spec.topology.cp > 1 else piece
        parts: dict[str, Tensor] = {}
        if members:
            place = activation_place(members)
            activation = _as(inputs[place], spec.run.dtype)
            own = _piece(batch, piece, num_pieces)
            for member, received in zip(members, inputs, strict=True):
                if member is members[place]:
                    continue
                if member.placement(at_sender=False, gradient=False).dim is None:
                    own = put_into(own, member, received.numpy())
                else:  # not all of it: this stage only hands it on
                    parts[member.member] = received
            batch = _with_piece(batch, own, piece, num_pieces)
        output = self._stage.forward(activation, batch, step=step, index=index, piece=piece, watch=watch)
        if not after:
            losses = self._stage.losses
            return (output,) if losses is None or not losses.shape else (output, paddle.to_tensor(losses))
        own = _piece(batch, piece, num_pieces)
        place = activation_place(after)
        return tuple(
            _as(output, member.dtype)
            if member is after[place]
            else parts[member.member].clone()
            if member.member in parts
            else self._part(own, member)
            for member in after
        )

    def backward_input(self, outputs: Value, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one unit of work back to the activation."""
        place = next((place for place, gradient in enumerate(gradients) if gradient is not None), 0)
        return self._stage.backward_input(outputs[place], gradients[place])

    def _members(self, edge: int, index: int, piece: int) -> tuple[Boundary, ...]:
        """What crosses an edge for one unit of work; nothing does before the first stage and after the last."""
        schedule = self._plan.spec.schedule
        unit = index % schedule.num_micro_batches * schedule.num_sequence_splits + piece
        return self._plan.edges[edge].members(unit) if 0 <= edge < len(self._plan.edges) else ()

    def _part(self, batch: Batch, member: Boundary) -> Tensor:
        """What this rank sends of a member that comes from the micro-batch."""
        placed = member.placement(at_sender=True, gradient=False)
        part = local_part(taken_from(batch, member), placed, self._tp, member.num_tp_ranks)
        return paddle.to_tensor(np.ascontiguousarray(part))

    def give_back(self) -> None:
        """As ``PaddleStage.give_back``."""
        self._stage.give_back()


def _as(tensor: Tensor, dtype: str) -> Tensor:
    """The tensor in the type in which it travels, or is computed with."""
    return tensor if PaddleArrays().dtype(tensor) == dtype else paddle.cast(tensor, dtype)


def _piece(batch: Batch, piece: int, num_pieces: int) -> Batch:
    """One piece of the sequences of a micro-batch."""
    return Batch(*(np.split(words, num_pieces, axis=1)[piece] for words in (batch.tokens, batch.labels)))


def _with_piece(batch: Batch, own: Batch, piece: int, num_pieces: int) -> Batch:
    """The micro-batch with another piece in place of its own."""
    pieces = [_piece(batch, other, num_pieces) for other in range(num_pieces)]
    pieces[piece] = own
    return Batch(*(np.concatenate([getattr(one, what) for one in pieces], axis=1) for what in ("tokens", "labels")))


class PaddleStages:
    """What makes a rank's stages; a ``Stages``. Own layers are built once for all stages of the rank."""

    def __init__(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> None:
        self._plan, self._coords, self._collectives = plan, coords, collectives
        own = plan.spec.own_layers
        if own is not None:
            from pipeproof.stages.own.model import OwnModel

            self._model = OwnModel(plan.spec, [layer.name for layer in own.layers])
            self._split = {op.stage for op in plan.programs[coords["pp"]] if op.kind is OpKind.BACKWARD_INPUT}

    def make(self, number: int, lent: Mapping[str, Tensor]) -> RankStage:
        """A stage, with the weights that the rank's other stages lend it."""
        if self._plan.spec.own_layers is None:
            return GptStage(self._plan, number, self._coords, self._collectives, lent)
        from pipeproof.stages.paddle.own_stage import OwnStage

        names = self._plan.stages[number]
        return OwnStage(self._plan.spec, self._model, names, lent, splits=number in self._split)

    def routers(self, stage: RankStage) -> PaddleRouters | None:
        """The routers of a stage of a GPT."""
        return PaddleRouters(stage.balance) if isinstance(stage, GptStage) else None

    def buffers(self, stage: RankStage) -> dict[str, Tensor]:
        """Those of own layers; a GPT has none."""
        return {} if isinstance(stage, GptStage) else self._own(stage).buffers()

    def put_buffers(self, stage: RankStage, buffers: Mapping[str, Tensor]) -> None:
        """As ``OwnStage.put_buffers``."""
        if not isinstance(stage, GptStage):
            self._own(stage).put_buffers(buffers)

    def _own(self, stage: RankStage) -> OwnStage:
        from pipeproof.stages.paddle.own_stage import OwnStage

        assert isinstance(stage, OwnStage), "there are stages of two kinds"
        return stage

    def load(self, step: int) -> None:
        """Stages draw their micro-batches themselves, when they come to them."""


class PaddleRouters:
    """The routers of one stage, which count in numpy; a ``Routers``."""

    def __init__(self, balance: Balance) -> None:
        self._balance = balance
        self.begin, self.move_biases = balance.begin, balance.move_biases

    def biased(self) -> Sequence[str]:
        """The experts whose routers have a bias that moves."""
        return list(self._balance.biases)

    def load(self, experts: str) -> Tensor:
        """As ``Balance.load``, as a tensor."""
        return paddle.to_tensor(self._balance.load(experts))

    def set_load(self, experts: str, load: Tensor) -> None:
        """As ``Balance.set_load``, from a tensor."""
        self._balance.set_load(experts, load.numpy())

    def bias(self, experts: str) -> Tensor:
        """The bias of one router, as a tensor."""
        return paddle.to_tensor(self._balance.biases[experts])

    def put_bias(self, experts: str, bias: Tensor) -> None:
        """Replace it, in place."""
        self._balance.biases[experts][...] = bias.numpy()

    def shown(self) -> dict[str, Array]:
        """As ``Balance.shown``."""
        return self._balance.shown()
