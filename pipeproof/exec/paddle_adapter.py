"""Carries out a rank's instructions with Paddle: computes with the stage, moves tensors, logs what it did."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import paddle

from pipeproof.comm.lower import LoweredPlan
from pipeproof.exec.jobs import Loss
from pipeproof.exec.machine import Instruction
from pipeproof.exec.oplog import HOST_QUEUE, LogEntry
from pipeproof.exec.paddle_comm import PaddleWorld, PairwiseCollectives, Transfer
from pipeproof.schedule.ops import (
    GATHER_KINDS,
    SEND_KINDS,
    SLICE_KINDS,
    TRANSFER_KINDS,
    Op,
    OpKind,
    child_of,
)
from pipeproof.stages.describe.synthetic import micro_batch
from pipeproof.stages.paddle.optimizer import make_optimizer
from pipeproof.stages.paddle.stage import PaddleStage


@dataclass(slots=True)
class _Tensors:
    """What this rank holds of one micro-batch between its operations."""

    input: paddle.Tensor | None = None
    output: paddle.Tensor | None = None
    output_grad: paddle.Tensor | None = None
    input_grad: paddle.Tensor | None = None
    received: paddle.Tensor | None = None
    """A slice that came in by the partial transport, before its gather."""
    sliced: paddle.Tensor | None = None
    """A slice that goes out by the partial transport."""


@dataclass(slots=True)
class StepOutcome:
    """What one rank has to show for a step: its loss (last stage only) and its shard of each gradient."""

    loss: Loss | None = None
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


class PaddleAdapter:
    """One rank: its stages, their tensors and optimizers, and its communication.

    ``enter`` is called with the step and id of each host operation and each
    child collective before it is carried out.
    """

    def __init__(self, plan: LoweredPlan, rank: int, world: PaddleWorld, enter: Callable[[int, int], None]) -> None:
        self.rank = rank
        self._plan, self._world, self._enter = plan, world, enter
        self._coords = plan.mesh.coords(rank)
        self._collectives = {
            plan.graph.groups[index].axis: collectives for index, collectives in world.collectives.items()
        }
        self._children = _Children(self)
        self._stages = {
            stage: PaddleStage(plan.spec, plan.layers_of(stage), self._coords["tp"], self._children)
            for stage in plan.stages_of_rank(rank)
        }
        self._optimizers = {
            number: make_optimizer(plan.spec.run, stage.parameters) for number, stage in self._stages.items()
        }
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
            ranks, numel, dtype = self._gather(op)
        elif op.kind in SLICE_KINDS:
            self._slice(instruction)
        elif op.kind is OpKind.WAIT:
            self._wait(instruction)
        else:
            self._compute(op)
        entry = LogEntry(self._step, HOST_QUEUE, str(op), start, time.monotonic_ns(), ranks, numel, dtype)
        self.log.insert(place, entry)  # before the children that ran inside it

    def enter(self, op_id: int) -> None:
        """Say which operation is about to run."""
        self._enter(self._step, op_id)

    def log_collective(self, op: Op, collectives: PairwiseCollectives, tensor: paddle.Tensor, start_ns: int) -> None:
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
            )
        )

    def collectives_over(self, axis: str) -> PairwiseCollectives:
        """This rank's collectives along a mesh axis."""
        return self._collectives[axis]

    def _compute(self, op: Op) -> None:
        if op.kind is OpKind.FORWARD:
            self._forward(op)
        elif op.kind is OpKind.BACKWARD:
            self._backward(op)
        elif op.kind is OpKind.REDUCE_GRAD:
            self._reduce_grad(op)
        elif op.kind is OpKind.STEP:
            self._update(op.stage)
        else:
            raise ValueError(f"the Paddle adapter cannot carry out {op}")

    def _forward(self, op: Op) -> None:
        tensors = self._of(op)
        data = self._coords["dp"] * self._plan.spec.schedule.num_micro_batches + _index(op)
        batch = micro_batch(self._plan.spec, self._step, data)
        if tensors.input is not None:
            tensors.input.stop_gradient = False
        tensors.output = self._stages[op.stage].forward(tensors.input, batch, step=self._step, index=data)
        if op.stage + 1 in self._stages:  # nothing is sent to a stage of the same rank
            self._at(op.stage + 1, op).input = tensors.output.detach()
        if op.stage == len(self._plan.stages) - 1:
            loss = tensors.output.detach().numpy()[()]
            total = self.outcome.loss
            self.outcome.loss = loss if total is None else total + loss

    def _backward(self, op: Op) -> None:
        tensors = self._of(op)
        assert tensors.output is not None
        paddle.autograd.backward([tensors.output], [tensors.output_grad])
        if tensors.input is not None:
            tensors.input_grad = tensors.input.grad
        if op.stage - 1 in self._stages:
            self._at(op.stage - 1, op).output_grad = tensors.input_grad
        tensors.input = tensors.output = tensors.output_grad = None

    def _reduce_grad(self, op: Op) -> None:
        for layer in self._plan.layers_of(op.stage):
            for parameter in layer.parameters:
                if op.axis == "dp" or op.axis in parameter.partial_over:
                    weight = self._stages[op.stage].parameters[parameter.name]
                    weight.grad.set_value(self._children.reduce_over(str(op.axis), weight.grad, "sum"))

    def _update(self, stage: int) -> None:
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
        else:
            shape = list(spec.shape) if whole else [row.stop - row.start]
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
            )
        )

    def _slice(self, instruction: Instruction) -> None:
        op, row = instruction.op, instruction.row
        tensors = self._of(op)
        outgoing = tensors.output if op.is_forward else tensors.input_grad
        assert outgoing is not None
        tensors.sliced = outgoing.detach().flatten()[row.start : row.stop].clone()

    def _gather(self, op: Op) -> tuple[tuple[int, ...], int, str]:
        tensors = self._of(op)
        assert tensors.received is not None
        collectives = self._collectives["tp"]
        parts = collectives.gather(tensors.received)
        shape = list(self._plan.boundary.local_shape)
        joined = paddle.concat(parts).reshape(shape)
        if op.is_forward:
            tensors.input = joined
        else:
            tensors.output_grad = joined
        numel, dtype = _numel(tensors.received), _dtype(tensors.received)
        tensors.received = None
        return collectives.ranks, numel, dtype

    def _of(self, op: Op) -> _Tensors:
        return self._at(op.stage, op)

    def _at(self, stage: int, op: Op) -> _Tensors:
        """The tensors of an operation's micro-batch on a stage of this rank."""
        return self._tensors.setdefault((stage, _index(op)), _Tensors())


class _Children:
    """The collectives that compute issues while it runs: does them, and logs each under its parent.

    This is the ``TensorParallelCollectives`` of the stage's layers.
    """

    def __init__(self, adapter: PaddleAdapter) -> None:
        self._adapter = adapter
        self._parent: Op | None = None
        self._parent_id = self._index = 0

    def begin(self, op_id: int, op: Op) -> None:
        """A host operation starts: collectives from here on are its children."""
        self._parent, self._parent_id, self._index = op, op_id, 0

    def all_reduce(self, tensor: paddle.Tensor, *, label: str, reduction: str = "sum") -> paddle.Tensor:
        """The reduction over TP, in TP rank order."""
        return self.reduce_over("tp", tensor, reduction)

    def all_gather(self, tensor: paddle.Tensor, dim: int, *, label: str) -> paddle.Tensor:
        """Every TP rank's part, joined along ``dim``."""
        return self._issue(OpKind.ALL_GATHER, "tp", tensor, lambda c: paddle.concat(c.gather(tensor), axis=dim))

    def reduce_scatter(self, tensor: paddle.Tensor, dim: int, *, label: str) -> paddle.Tensor:
        """This TP rank's part along ``dim`` of the sum over TP, in TP rank order."""

        def act(collectives: PairwiseCollectives) -> paddle.Tensor:
            total = collectives.reduce(tensor, "sum")
            place = collectives.ranks.index(self._adapter.rank)
            return paddle.split(total, len(collectives.ranks), axis=dim)[place].contiguous()

        return self._issue(OpKind.REDUCE_SCATTER, "tp", tensor, act)

    def reduce_over(self, axis: str, tensor: paddle.Tensor, reduction: str) -> paddle.Tensor:
        """An all-reduce over any axis."""
        return self._issue(OpKind.ALL_REDUCE, axis, tensor, lambda c: c.reduce(tensor, reduction))

    def _issue(
        self,
        kind: OpKind,
        axis: str,
        tensor: paddle.Tensor,
        act: Callable[[PairwiseCollectives], paddle.Tensor],
    ) -> paddle.Tensor:
        assert self._parent is not None
        op = child_of(self._parent, self._index, kind, axis)
        self._index += 1
        self._adapter.enter(self._parent_id + self._index)  # children stand right after their parent
        collectives = self._adapter.collectives_over(axis)
        start = time.monotonic_ns()
        result = act(collectives)
        self._adapter.log_collective(op, collectives, tensor, start)
        return result


def _index(op: Op) -> int:
    assert op.micro_batch is not None
    return op.micro_batch


def _numel(tensor: paddle.Tensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64))


def _dtype(tensor: paddle.Tensor) -> str:
    return str(tensor.dtype).removeprefix("paddle.")
