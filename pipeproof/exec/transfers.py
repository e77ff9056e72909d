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

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod

from pipeproof.comm.boundary_tensors import tensors_of
from pipeproof.comm.channel_models import ChannelModel
from pipeproof.comm.entry_order import EntryOrder
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.framework import Arrays, Channels, Collectives, Tensor, Transfer, Value, WeightGradients
from pipeproof.exec.oplog import LogEntry
from pipeproof.exec.slices import Slice, SliceChannels, SliceCollectives, whole_of
from pipeproof.exec.slots import Slots
from pipeproof.schedule.columns import unit_of
from pipeproof.schedule.ops import RECV_KINDS, SEND_KINDS, Op
from pipeproof.schedule.optable import Channel
from pipeproof.stages.describe.boundary import Boundary

Members = dict[int, Tensor]
"""Tensors of a boundary by their place in the edge."""


@dataclass(slots=True)
class UnitTensors:
    """What this rank holds of one stage's micro-batch, or a piece of it, between its operations."""

    input: Members = field(default_factory=dict)
    output: Value = ()
    output_grad: Members = field(default_factory=dict)
    input_grad: Members = field(default_factory=dict)
    received: dict[tuple[bool, int], Tensor | Slice] = field(default_factory=dict)
    """Slices that came in by the partial transport, before their gather, by (forward, member)."""
    sliced: dict[tuple[bool, int], Tensor | Slice] = field(default_factory=dict)
    """Slices that go out by the partial transport, by (forward, member)."""
    weights: WeightGradients | None = None
    """What the input gradient left for the weight gradient to compute."""

    def outgoing(self, place: int, *, forward: bool) -> Tensor:
        """The member that is sent on, or its gradient that is sent back."""
        return self.output[place] if forward else self.input_grad[place]

    def incoming(self, *, forward: bool) -> Members:
        """Where what comes in is put."""
        return self.input if forward else self.output_grad


@dataclass(frozen=True, slots=True)
class _Message:
    """What the graph says of one transfer, slice or gather, looked up once."""

    op: Op
    text: str
    is_send: bool
    is_forward: bool
    shape: list[int]
    """Of the whole tensor."""
    dtype: str
    start: int
    stop: int
    is_whole: bool
    place: int
    """Of the member in its edge."""
    changes_layout: bool

    @property
    def is_slice(self) -> bool:
        """Whether the partial transport moves it, and a gather joins it with others."""
        return not self.is_whole and not self.changes_layout

    def slice_of(self, whole: Tensor) -> Slice:
        """Its range of a tensor, for a backend that moves ranges itself."""
        size = self.stop - self.start
        return Slice(whole, prod(self.shape) // size, self.start // size)


@dataclass(frozen=True, slots=True)
class _Order:
    """The entry of a transfer, and what it stands in."""

    channel: Channel
    channel_text: str
    is_last: bool
    """Of the transfers that are posted with it."""
    entry: int
    """The last of them."""
    orders: tuple[Hashable, ...]
    """Of all of them."""


class RankTransfers:
    """The tensors of one rank's units of work, and the transfers between them and other ranks."""

    def __init__(self, plan: LoweredPlan, rank: int, channels: Channels, arrays: Arrays) -> None:
        self._plan, self._channels, self._arrays = plan, channels, arrays
        self._member = {
            number: (stage - 1 if side.startswith("input") else stage, variant, place)
            for (side, stage, variant, place), number in tensors_of(plan.edges, plan.layers).index.items()
        }
        buffers = plan.spec.buffers
        self._receive_slots, self._send_slots = (
            None if num_slots is None else Slots(num_slots, plan.graph, rank, kinds, arrays)
            for num_slots, kinds in ((buffers.receive_slots, RECV_KINDS), (buffers.send_slots, SEND_KINDS))
        )
        by_backend = not (buffers.receive_slots or buffers.send_slots) and buffers.release_output == "after_backward"
        self._slicing = channels if by_backend and isinstance(channels, SliceChannels) else None
        """Where the backend moves ranges of tensors itself: a slot has room for the slice alone, and what is given back
        early has been cut before."""
        self._is_one_queue = plan.spec.transport.queue == "device"
        self._entries = EntryOrder(plan.graph, ChannelModel(plan.spec.transport.queue or "directed_edge"))
        self._messages: dict[int, _Message] = {}
        self._orders: dict[int, _Order] = {}
        self._last: dict[Hashable, list[Transfer]] = {}
        self._ready: dict[int, list[tuple[int, Channel, Tensor | Slice]]] = {}
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
        key = stage, unit_of(op, self._plan.num_splits)
        tensors = self._tensors.get(key)
        if tensors is None:
            tensors = self._tensors[key] = UnitTensors()
        return tensors

    def post(self, op_id: int) -> None:
        """Begin a transfer; ``wait`` ends it."""
        message, order = self._message(op_id), self._order(op_id)
        tensors = self.of(message.op)
        buffer = (self._outgoing if message.is_send else self._incoming)(message, order.channel, tensors)
        self._post(op_id, order, buffer)

    def _outgoing(self, message: _Message, channel: Channel, tensors: UnitTensors) -> Tensor | Slice:
        """What a send moves."""
        forward, place = message.is_forward, message.place
        buffer: Tensor | Slice
        if message.is_slice:
            buffer = tensors.sliced[forward, place]
        else:
            buffer = tensors.outgoing(place, forward=forward).detach().contiguous()
            if not message.is_whole:
                buffer = buffer.flatten()[message.start : message.stop].clone()
        if self._send_slots is None or isinstance(buffer, Slice):  # which is there without slots alone
            return buffer
        slot = self._send_slots.take((channel, forward), list(buffer.shape), message.dtype)
        return self._arrays.copy_into(slot, buffer)

    def _incoming(self, message: _Message, channel: Channel, tensors: UnitTensors) -> Tensor | Slice:
        """Where a receive puts what comes."""
        forward, place = message.is_forward, message.place
        if message.is_slice and self._slicing is not None:
            part = message.slice_of(self._arrays.empty(message.shape, message.dtype))
            tensors.received[forward, place] = part
            return part
        shape = message.shape if message.is_whole else [message.stop - message.start]
        if self._receive_slots is None:
            buffer = self._arrays.empty(shape, message.dtype)
        else:
            buffer = self._receive_slots.take((channel, forward), shape, message.dtype)
        if message.is_whole:
            tensors.incoming(forward=forward)[place] = buffer
        elif message.is_slice:
            tensors.received[forward, place] = buffer
        elif place not in tensors.incoming(forward=forward):
            tensors.incoming(forward=forward)[place] = self._arrays.zeros(message.shape, message.dtype)
        return buffer

    def _post(self, op_id: int, order: _Order, buffer: Tensor | Slice) -> None:
        """Post a transfer behind those that it follows, all of a batch with the last of them."""
        ready = self._ready.setdefault(order.entry, [])
        ready.append((op_id, order.channel, buffer))
        if not order.is_last:
            return
        after = [earlier for one in order.orders for earlier in self._last.get(one, ())]
        posted = {one: self._begin(channel, moved, after) for one, channel, moved in ready}
        together = [*posted.values()]
        for one in order.orders:
            self._last[one] = together
        self._posted.update(posted)
        del self._ready[order.entry]

    def _begin(self, channel: Channel, buffer: Tensor | Slice, after: Sequence[Transfer]) -> Transfer:
        if isinstance(buffer, Slice):
            assert self._slicing is not None
            return self._slicing.post_slice(channel, buffer, after)
        return self._channels.post(channel, buffer, after)

    def drain(self) -> None:
        """Before a collective: where all communication of a device is one queue, what was posted ends first."""
        if self._is_one_queue:
            for transfer in self._posted.values():
                transfer.wait()

    def wait(self, step: int, op_id: int) -> LogEntry:
        """Block until the transfer that an operation waits for is done; what it was."""
        target = int(self._plan.graph.waits_for[op_id])
        transfer = self._posted.pop(target)
        transfer.wait()
        message, order = self._message(target), self._order(target)
        if not message.is_send and message.changes_layout and not message.is_whole:
            self._put_in_place(message, transfer.buffer)
        return LogEntry(
            step,
            order.channel_text,
            message.text,
            transfer.start_ns,
            transfer.end_ns,
            (order.channel.src, order.channel.dst),
            *self.size_of(transfer.buffer),
            transfer.posted_ns,
        )

    def size_of(self, buffer: Tensor | Slice) -> tuple[int, str]:
        """How many elements of which type a transfer moves, or a member puts into a gather."""
        tensor, num_slices = whole_of(buffer)
        return self._arrays.numel(tensor) // num_slices, self._arrays.dtype(tensor)

    def _put_in_place(self, message: _Message, buffer: Tensor) -> None:
        """A received range of a tensor that is laid out anew goes where it belongs."""
        into = self.of(message.op).incoming(forward=message.is_forward)
        flat = into[message.place].flatten()
        flat[message.start : message.stop] = buffer
        into[message.place] = flat.reshape(message.shape)

    def release_output(self, op: Op) -> None:
        """Give back the memory of an output that was sent; autograd needs the tensors, not their values."""
        tensors = self.of(op)
        assert tensors.output
        for tensor in tensors.output:
            self._arrays.release(tensor)
        tensors.sliced.clear()

    def slice(self, op_id: int) -> None:
        """Cut out what the partial transport sends of a tensor."""
        message = self._message(op_id)
        tensors = self.of(message.op)
        outgoing = tensors.outgoing(message.place, forward=message.is_forward).detach()
        if self._slicing is not None:
            sliced = message.slice_of(outgoing.contiguous())
        else:
            sliced = outgoing.flatten()[message.start : message.stop].clone()
        tensors.sliced[message.is_forward, message.place] = sliced

    def gather(self, op_id: int, collectives: Collectives) -> Tensor | Slice:
        """Join the slices of a tensor that all TP ranks received; this rank's slice."""
        message = self._message(op_id)
        tensors = self.of(message.op)
        own = tensors.received.pop((message.is_forward, message.place))
        if isinstance(own, Slice):
            assert isinstance(collectives, SliceCollectives)
            joined = collectives.gather_slices(own)
        else:
            joined = collectives.all_gather(own, 0).reshape(message.shape)
        tensors.incoming(forward=message.is_forward)[message.place] = joined
        return own

    def _message(self, op_id: int) -> _Message:
        message = self._messages.get(op_id)
        if message is None:
            row = self._plan.graph.row(op_id)
            op, spec = row.op, self._plan.graph.tensors[row.tensor]
            boundary, place = self._boundary(row.tensor)
            message = self._messages[op_id] = _Message(
                op,
                str(op),
                op.kind in SEND_KINDS,
                op.is_forward,
                list(spec.shape),
                spec.dtype,
                row.start,
                row.stop,
                row.stop - row.start == spec.numel,
                place,
                boundary.changes_layout,
            )
        return message

    def _order(self, op_id: int) -> _Order:
        order = self._orders.get(op_id)
        if order is None:
            entry: Sequence[int] = self._entries.members(op_id)
            channel = self._plan.graph.channels[int(self._plan.graph.channel[op_id])]
            orders = dict.fromkeys(one for member in entry for one in self._entries.orders(member))
            order = self._orders[op_id] = _Order(channel, str(channel), op_id == entry[-1], entry[-1], tuple(orders))
        return order

    def _boundary(self, tensor: int) -> tuple[Boundary, int]:
        """The member of an edge that one of the graph's tensors is, and its place there."""
        edge, variant, place = self._member[tensor]
        return self._plan.edges[edge].variants[variant][place], place
