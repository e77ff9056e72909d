"""Carries out a rank's instructions with Paddle: computes with the stage, moves tensors, logs what it did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import paddle

from pipeproof.comm.gradient_norm import counted_by, num_weights
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.comm.rank_blocks import is_reduced
from pipeproof.exec.jobs import Loss
from pipeproof.exec.machine import Instruction
from pipeproof.exec.oplog import HOST_QUEUE, LogEntry, Traffic
from pipeproof.exec.paddle_children import ChildCollectives
from pipeproof.exec.paddle_comm import PaddleWorld, PairwiseCollectives, Transfer
from pipeproof.exec.paddle_slots import Slots
from pipeproof.schedule.columns import unit_of
from pipeproof.schedule.ops import (
    GATHER_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    SLICE_KINDS,
    TRANSFER_KINDS,
    Op,
    OpKind,
)
from pipeproof.stages.describe.synthetic import micro_batch
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.stages.paddle.clip import GradientClip
from pipeproof.stages.paddle.optimizer import make_optimizer
from pipeproof.stages.paddle.stage import PaddleStage
from pipeproof.stages.paddle.weights import WeightGradients


@dataclass(slots=True)
class _Tensors:
    """What this rank holds of one micro-batch, or a piece of it, between its operations."""

    input: paddle.Tensor | None = None
    output: paddle.Tensor | None = None
    output_grad: paddle.Tensor | None = None
    input_grad: paddle.Tensor | None = None
    received: paddle.Tensor | None = None
    """A slice that came in by the partial transport, before its gather."""
    sliced: paddle.Tensor | None = None
    """A slice that goes out by the partial transport."""
    weights: WeightGradients | None = None
    """What the input gradient left for the weight gradient to compute."""


@dataclass(slots=True)
class StepOutcome:
    """What one rank has to show for a step: its loss (last stage only) and its shard of each gradient."""

    loss: Loss | None = None
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


class PaddleAdapter:
    """One rank: its stages, their tensors and optimizers, and its communication.

    ``enter`` is called with the step and id of each host operation and each
    child collective before it is carried out. ``watch`` is shown what crosses
    the borders between layers.
    """

    def __init__(
        self,
        plan: LoweredPlan,
        rank: int,
        world: PaddleWorld,
        enter: Callable[[int, int], None],
        watch: LayerWatch | None = None,
    ) -> None:
        self.rank = rank
        self._plan, self._world, self._enter, self._watch = plan, world, enter, watch
        self._coords = plan.mesh.coords(rank)
        self._collectives = {
            (plan.graph.groups[index].axis, collectives.ranks): collectives
            for index, collectives in world.collectives.items()
        }
        self._children = ChildCollectives(self)
        self._stages: dict[int, PaddleStage] = {}
        lent: dict[str, paddle.Tensor] = {}
        for number in plan.stages_of_rank(rank):
            at = self._coords["tp"], self._children, self._coords["ep"], self._children
            stage = PaddleStage(plan.spec, plan.layers_of(number), *at, lent=lent)
            self._stages[number] = stage
            lent |= stage.parameters
        self._given_back = False
        self._optimizers = {
            number: make_optimizer(plan.spec.run, stage.parameters) for number, stage in self._stages.items()
        }
        self._clip = self._make_clip()
        buffers = plan.spec.buffers
        self._receive_slots, self._send_slots = (
            None if num_slots is None else Slots(num_slots, plan.graph, rank, kinds)
            for num_slots, kinds in ((buffers.receive_slots, RECV_KINDS), (buffers.send_slots, SEND_KINDS))
        )
        self._transfers: dict[int, Transfer] = {}
        self._tensors: dict[tuple[int, int], _Tensors] = {}
        self._step = -1
        self.log: list[LogEntry] = []
        self.outcome = StepOutcome()

    def begin(self, step: int) -> None:
        """Forget the step before."""
        self._step = step
        self._tensors.clear()
        self._transfers.clear()
        self.outcome = StepOutcome()
        self._given_back = False
        if self._clip is not None:
            self._clip.begin()
        for slots in (self._receive_slots, self._send_slots):
            if slots is not None:
                slots.begin()
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    def carry_out(self, instruction: Instruction) -> None:
        """Do what one instruction says; a transfer is posted, everything else is finished on return."""
        op = instruction.op
        if op.kind in TRANSFER_KINDS:
            self._post(instruction)
            return
        self.enter(instruction.op_id)
        self._children.begin(instruction.op_id, op)
        start = time.monotonic_ns()
        place = len(self.log)
        ranks: tuple[int, ...] = ()
        numel, dtype = 0, ""
        if op.kind in GATHER_KINDS:
            ranks, numel, dtype = self._gather(instruction)
        elif op.kind in SLICE_KINDS:
            self._slice(instruction)
        elif op.kind is OpKind.ALL_REDUCE:
            ranks, numel, dtype = self._sum_norms(instruction)
        elif op.kind is OpKind.WAIT:
            self._wait(instruction)
        elif op.kind is OpKind.FREE:
            self._release_output(op)
        else:
            self._compute(op)
        entry = LogEntry(self._step, HOST_QUEUE, str(op), start, time.monotonic_ns(), ranks, numel, dtype)
        self.log.insert(place, entry)  # before the children that ran inside it

    def enter(self, op_id: int) -> None:
        """Say which operation is about to run."""
        self._enter(self._step, op_id)

    def log_collective(
        self, op: Op, collectives: PairwiseCollectives, tensor: paddle.Tensor, start_ns: int, traffic: Traffic
    ) -> None:
        """Write down a collective that just ended."""
        self.log.append(
            LogEntry(
                self._step,
                HOST_QUEUE,
                str(op),
                start_ns,
                time.monotonic_ns(),
                collectives.ranks,
                _numel(tensor),
                _dtype(tensor),
                traffic=traffic,
            )
        )

    def collectives_over(self, axis: str, stage: int, weight: str = "") -> PairwiseCollectives:
        """This rank's collectives along a mesh axis; along ``pp`` those with the other holders of a stage's weight."""
        num_ranks = self._plan.mesh.size(axis)
        places = self._plan.shared_weights.places(stage, weight) if axis == "pp" else range(num_ranks)
        ranks = tuple(self._plan.mesh.rank({**self._coords, axis: place}) for place in places)
        return self._collectives[axis, ranks]

    def _compute(self, op: Op) -> None:
        if op.kind is OpKind.FORWARD:
            self._forward(op)
        elif op.kind is OpKind.BACKWARD_INPUT:
            self._backward_input(op)
        elif op.kind is OpKind.BACKWARD_WEIGHT:
            self._backward_weight(op)
        elif op.kind is OpKind.BACKWARD:
            self._backward_input(op)
            self._backward_weight(op)
        elif op.kind is OpKind.REDUCE_GRAD:
            self._reduce_grad(op)
        elif op.kind is OpKind.STEP:
            self._update(op.stage)
        else:
            raise ValueError(f"the Paddle adapter cannot carry out {op}")

    def _forward(self, op: Op) -> None:
        tensors = self._of(op)
        assert op.micro_batch is not None
        data_rank = self._coords["dp"] * self._plan.mesh.size("ep") + self._coords["ep"]
        data = data_rank * self._plan.spec.schedule.num_micro_batches + op.micro_batch
        batch = micro_batch(self._plan.spec, self._step, data)
        if tensors.input is not None:
            tensors.input.stop_gradient = False
        stage, piece = self._stages[op.stage], op.split or 0
        tensors.output = stage.forward(
            tensors.input, batch, step=self._step, index=data, piece=piece, watch=self._watch
        )
        if self._is_here(op.stage + 1, op):  # nothing is sent to a stage of the same rank
            self._at(op.stage + 1, op).input = tensors.output.detach()
        if op.stage == len(self._plan.stages) - 1:
            loss = tensors.output.detach().numpy()[()]
            total = self.outcome.loss
            self.outcome.loss = loss if total is None else total + loss

    def _backward_input(self, op: Op) -> None:
        tensors = self._of(op)
        assert tensors.output is not None
        tensors.weights = self._stages[op.stage].backward_input(tensors.output, tensors.output_grad)
        if tensors.input is not None:
            tensors.input_grad = tensors.input.grad
        if self._is_here(op.stage - 1, op):
            self._at(op.stage - 1, op).output_grad = tensors.input_grad
        tensors.input = tensors.output = tensors.output_grad = None

    def _backward_weight(self, op: Op) -> None:
        tensors = self._of(op)
        assert tensors.weights is not None
        tensors.weights.accumulate()
        tensors.weights = None

    def _reduce_grad(self, op: Op) -> None:
        self._give_back()
        for parameter in self._plan.weights_of(op.stage, self._coords["pp"]):
            num_holders = len(self._plan.shared_weights.places(op.stage, parameter.name))
            if num_holders > 1 if op.axis == "pp" else is_reduced(parameter, str(op.axis)):
                weight = self._stages[op.stage].parameters[parameter.name]
                total = self._children.reduce_over(str(op.axis), weight.grad, "sum", parameter.name)
                weight.grad.set_value(total)

    def _give_back(self) -> None:
        """Before any sum over ranks: what was made of a weight of another stage on this rank is added to it."""
        if not self._given_back:
            for stage in self._stages.values():
                stage.give_back()
        self._given_back = True

    def _make_clip(self) -> GradientClip | None:
        run = self._plan.spec.run
        if run.clip_norm is None:
            return None
        counted = {
            place: self._stages[stage].parameters[name] for place, stage, name in counted_by(self._plan, self._coords)
        }
        return GradientClip(counted, num_weights(self._plan), run.clip_norm, run.dtype)

    def _sum_norms(self, instruction: Instruction) -> tuple[tuple[int, ...], int, str]:
        """A collective that stands alone is one of the norm's."""
        assert self._clip is not None
        self._give_back()
        group = self._plan.graph.groups[instruction.row.group]
        squares, collectives = self._clip.squares, self._collectives[group.axis, group.ranks]
        self._clip.squares = collectives.reduce(squares, "sum")
        return collectives.ranks, _numel(squares), _dtype(squares)

    def _update(self, stage: int) -> None:
        self._give_back()
        if self._clip is not None:
            self._clip.clip(self._stages[stage].parameters)
        for name, weight in self._stages[stage].parameters.items():
            self.outcome.gradients[name] = weight.grad.numpy().copy()
        self._optimizers[stage].step()

    def _post(self, instruction: Instruction) -> None:
        op, row = instruction.op, instruction.row
        tensors = self._of(op)
        channel = self._plan.graph.channels[int(self._plan.graph.channel[instruction.op_id])]
        spec = self._plan.graph.tensors[row.tensor]
        whole = row.stop - row.start == spec.numel
        if op.kind in SEND_KINDS:
            outgoing = tensors.output if op.is_forward else tensors.input_grad
            buffer = outgoing if whole else tensors.sliced
            assert buffer is not None
            buffer = buffer.detach().contiguous()
            if self._send_slots is not None:
                slot = self._send_slots.take((channel, op.is_forward), buffer.shape)
                buffer = paddle.assign(buffer, output=slot)
        else:
            shape = list(spec.shape) if whole else [row.stop - row.start]
            if self._receive_slots is not None:
                buffer = self._receive_slots.take((channel, op.is_forward), shape)
            else:
                buffer = paddle.zeros(shape, dtype=spec.dtype)
            if not whole:
                tensors.received = buffer
            elif op.is_forward:
                tensors.input = buffer
            else:
                tensors.output_grad = buffer
        self._transfers[instruction.op_id] = self._world.channels.post(channel, buffer)

    def _wait(self, instruction: Instruction) -> None:
        graph = self._plan.graph
        target = int(graph.waits_for[instruction.op_id])
        transfer = self._transfers.pop(target)
        transfer.wait()
        channel = graph.channels[int(graph.channel[target])]
        self.log.append(
            LogEntry(
                self._step,
                str(channel),
                str(graph.ops[target]),
                transfer.start_ns,
                transfer.end_ns,
                (channel.src, channel.dst),
                _numel(transfer.buffer),
                _dtype(transfer.buffer),
                transfer.posted_ns,
            )
        )

    def _release_output(self, op: Op) -> None:
        """Give back the memory of an output that was sent; autograd needs the tensor, not its values."""
        tensors = self._of(op)
        assert tensors.output is not None
        tensors.output._clear_data()  # noqa: SLF001 - what Fleet does too: there is no public way
        tensors.sliced = None

    def _slice(self, instruction: Instruction) -> None:
        op, row = instruction.op, instruction.row
        tensors = self._of(op)
        outgoing = tensors.output if op.is_forward else tensors.input_grad
        assert outgoing is not None
        tensors.sliced = outgoing.detach().flatten()[row.start : row.stop].clone()

    def _gather(self, instruction: Instruction) -> tuple[tuple[int, ...], int, str]:
        op = instruction.op
        tensors = self._of(op)
        assert tensors.received is not None
        collectives = self.collectives_over("tp", op.stage)
        parts = collectives.gather(tensors.received)
        joined = paddle.concat(parts).reshape(list(self._plan.graph.tensors[instruction.row.tensor].shape))
        if op.is_forward:
            tensors.input = joined
        else:
            tensors.output_grad = joined
        numel, dtype = _numel(tensors.received), _dtype(tensors.received)
        tensors.received = None
        return collectives.ranks, numel, dtype

    def _is_here(self, stage: int, op: Op) -> bool:
        """Whether this rank computes the operation's unit of work on a stage, which need not exist."""
        in_model = 0 <= stage < len(self._plan.stages)
        return in_model and int(self._plan.owner[stage, self._unit(op)]) == self._coords["pp"]

    def _of(self, op: Op) -> _Tensors:
        return self._at(op.stage, op)

    def _at(self, stage: int, op: Op) -> _Tensors:
        """The tensors of an operation's unit of work on a stage of this rank."""
        return self._tensors.setdefault((stage, self._unit(op)), _Tensors())

    def _unit(self, op: Op) -> int:
        return unit_of(op, self._plan.num_splits)


def _numel(tensor: paddle.Tensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64))


def _dtype(tensor: paddle.Tensor) -> str:
    return str(tensor.dtype).removeprefix("paddle.")
