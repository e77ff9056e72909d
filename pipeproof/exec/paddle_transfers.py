"""What a rank holds of each unit of work between its operations, and how it gets to other ranks and from them.

A boundary's value is a tuple of tensors, one for each member of the edge. A
message carries one of them whole, a slice of it (the partial transport; a
gather joins slices again), or, where the two sides lay it out otherwise, the
range of it that the receiver wants.

Each end of a channel carries out what is posted there in order. Where the
plan says more (a queue of another name, or ``transport.queue``), a transfer
also follows what was posted before it in that order. Transfers of one batch
are posted together, with the last of them, and have no order among themselves.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import paddle

from pipeproof.comm.boundary_tensors import tensors_of
from pipeproof.comm.channel_models import ChannelModel
from pipeproof.comm.entry_order import EntryOrder
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.machine import Instruction
from pipeproof.exec.oplog import LogEntry
from pipeproof.exec.paddle_comm import PaddleChannels, PairwiseCollectives, Transfer
from pipeproof.exec.paddle_slots import Slots
from pipeproof.exec.paddle_stages import Value
from pipeproof.exec.tensor_facts import dtype_of, numel_of
from pipeproof.schedule.columns import unit_of
from pipeproof.schedule.ops import RECV_KINDS, SEND_KINDS, Op
from pipeproof.schedule.optable import Channel
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.paddle.weights import WeightGradients

Members = dict[int, paddle.Tensor]
"""Tensors of a boundary by their place in the edge."""


@dataclass(slots=True)
class UnitTensors:
    """What this rank holds of one stage's micro-batch, or a piece of it, between its operations."""

    input: Members = field(default_factory=dict)
    output: Value = ()
    output_grad: Members = field(default_factory=dict)
    input_grad: Members = field(default_factory=dict)
    received: dict[tuple[bool, int], paddle.Tensor] = field(default_factory=dict)
    """Slices that came in by the partial transport, before their gather, by (forward, member)."""
    sliced: dict[tuple[bool, int], paddle.Tensor] = field(default_factory=dict)
    """Slices that go out by the partial transport, by (forward, member)."""
    weights: WeightGradients | None = None
    """What the input gradient left for the weight gradient to compute."""

    def outgoing(self, place: int, *, forward: bool) -> paddle.Tensor:
        """The member that is sent on, or its gradient that is sent back."""
        return self.output[place] if forward else self.input_grad[place]

    def incoming(self, *, forward: bool) -> Members:
        """Where what comes in is put."""
        return self.input if forward else self.output_grad


class _Ready(NamedTuple):
    """A transfer that waits for the rest of its batch to be posted."""

    op_id: int
    channel: Channel
    buffer: paddle.Tensor


class RankTransfers:
    """The tensors of one rank's units of work, and the transfers between them and other ranks."""

    def __init__(self, plan: LoweredPlan, rank: int, channels: PaddleChannels) -> None:
        self._plan, self._channels = plan, channels
        self._member = {
            number: (stage - 1 if side.startswith("input") else stage, variant, place)
            for (side, stage, variant, place), number in tensors_of(plan.edges, plan.layers).index.items()
        }
        buffers = plan.spec.buffers
        self._receive_slots, self._send_slots = (
            None if num_slots is None else Slots(num_slots, plan.graph, rank, kinds)
            for num_slots, kinds in ((buffers.receive_slots, RECV_KINDS), (buffers.send_slots, SEND_KINDS))
        )
        self._order = EntryOrder(plan.graph, ChannelModel(plan.spec.transport.queue or "directed_edge"))
        self._last: dict[Hashable, list[Transfer]] = {}
        self._ready: dict[int, list[_Ready]] = {}
        self._posted: dict[int, Transfer] = {}
        self._tensors: dict[tuple[int, int], UnitTensors] = {}

    def begin(self) -> None:
        """A step starts: nothing is held, and slots are taken from the first again."""
        self._tensors.clear()
        self._posted.clear()
        self._last.clear()
        for slots in (self._receive_slots, self._send_slots):
            if slots is not None:
                slots.begin()

    def of(self, op: Op) -> UnitTensors:
        """The tensors of an operation's unit of work."""
        return self.at(op.stage, op)

    def at(self, stage: int, op: Op) -> UnitTensors:
        """The tensors of an operation's unit of work on a stage of this rank."""
        return self._tensors.setdefault((stage, unit_of(op, self._plan.num_splits)), UnitTensors())

    def post(self, instruction: Instruction) -> None:
        """Begin a transfer; ``wait`` ends it."""
        graph, op, row = self._plan.graph, instruction.op, instruction.row
        tensors, spec = self.of(op), graph.tensors[row.tensor]
        channel = graph.channels[int(graph.channel[instruction.op_id])]
        boundary, place = self._boundary(row.tensor)
        whole = row.stop - row.start == spec.numel
        if op.kind in SEND_KINDS:
            if not whole and not boundary.changes_layout:
                buffer = tensors.sliced[op.is_forward, place]
            else:
                buffer = tensors.outgoing(place, forward=op.is_forward).detach().contiguous()
                buffer = buffer if whole else buffer.flatten()[row.start : row.stop].clone()
            if self._send_slots is not None:
                slot = self._send_slots.take((channel, op.is_forward), buffer.shape, spec.dtype)
                buffer = paddle.assign(buffer, output=slot)
        else:
            shape = list(spec.shape) if whole else [row.stop - row.start]
            if self._receive_slots is not None:
                buffer = self._receive_slots.take((channel, op.is_forward), shape, spec.dtype)
            else:
                buffer = paddle.zeros(shape, dtype=spec.dtype)
            if whole:
                tensors.incoming(forward=op.is_forward)[place] = buffer
            elif not boundary.changes_layout:
                tensors.received[op.is_forward, place] = buffer
            elif place not in tensors.incoming(forward=op.is_forward):
                tensors.incoming(forward=op.is_forward)[place] = paddle.zeros(list(spec.shape), dtype=spec.dtype)
        self._post(_Ready(instruction.op_id, channel, buffer))

    def _post(self, transfer: _Ready) -> None:
        """Post a transfer behind those that it follows, all of a batch with the last of them."""
        entry = self._order.members(transfer.op_id)
        ready = self._ready.setdefault(entry[-1], [])
        ready.append(transfer)
        if transfer.op_id != entry[-1]:
            return
        orders = dict.fromkeys(order for op_id in entry for order in self._order.orders(op_id))
        after = [earlier for order in orders for earlier in self._last.get(order, ())]
        posted = {one.op_id: self._channels.post(one.channel, one.buffer, after) for one in ready}
        self._last.update((order, [*posted.values()]) for order in orders)
        self._posted.update(posted)
        del self._ready[entry[-1]]

    def drain(self) -> None:
        """Before a collective: where all communication of a device is one queue, what was posted ends first."""
        if self._plan.spec.transport.queue == "device":
            for transfer in self._posted.values():
                transfer.wait()

    def wait(self, step: int, op_id: int) -> LogEntry:
        """Block until the transfer that an operation waits for is done; what it was."""
        graph = self._plan.graph
        target = int(graph.waits_for[op_id])
        transfer = self._posted.pop(target)
        transfer.wait()
        self._put_in_place(target, transfer.buffer)
        channel = graph.channels[int(graph.channel[target])]
        return LogEntry(
            step,
            str(channel),
            str(graph.ops[target]),
            transfer.start_ns,
            transfer.end_ns,
            (channel.src, channel.dst),
            numel_of(transfer.buffer),
            dtype_of(transfer.buffer),
            transfer.posted_ns,
        )

    def _put_in_place(self, op_id: int, buffer: paddle.Tensor) -> None:
        """A received range of a tensor that is laid out anew goes where it belongs."""
        row = self._plan.graph.row(op_id)
        op, spec = row.op, self._plan.graph.tensors[row.tensor]
        boundary, place = self._boundary(row.tensor)
        if op.kind in RECV_KINDS and boundary.changes_layout and row.stop - row.start < spec.numel:
            into = self.of(op).incoming(forward=op.is_forward)
            flat = into[place].flatten()
            flat[row.start : row.stop] = buffer
            into[place] = flat.reshape(list(spec.shape))

    def release_output(self, op: Op) -> None:
        """Give back the memory of an output that was sent; autograd needs the tensors, not their values."""
        tensors = self.of(op)
        assert tensors.output
        for tensor in tensors.output:
            tensor._clear_data()  # noqa: SLF001 - what Fleet does too: there is no public way
        tensors.sliced.clear()

    def slice(self, instruction: Instruction) -> None:
        """Cut out what the partial transport sends of a tensor."""
        op, row = instruction.op, instruction.row
        tensors, (_, place) = self.of(op), self._boundary(row.tensor)
        outgoing = tensors.outgoing(place, forward=op.is_forward).detach()
        tensors.sliced[op.is_forward, place] = outgoing.flatten()[row.start : row.stop].clone()

    def gather(self, instruction: Instruction, collectives: PairwiseCollectives) -> paddle.Tensor:
        """Join the slices of a tensor that all TP ranks received; this rank's slice."""
        op, row = instruction.op, instruction.row
        tensors, (_, place) = self.of(op), self._boundary(row.tensor)
        own = tensors.received.pop((op.is_forward, place))
        joined = paddle.concat(collectives.gather(own)).reshape(list(self._plan.graph.tensors[row.tensor].shape))
        tensors.incoming(forward=op.is_forward)[place] = joined
        return own

    def _boundary(self, tensor: int) -> tuple[Boundary, int]:
        """The member of an edge that one of the graph's tensors is, and its place there."""
        edge, variant, place = self._member[tensor]
        return self._plan.edges[edge].variants[variant][place], place
