"""Tensors of a rank's work items between its operations, and the transfers that move them between ranks.

A boundary's value is a tuple of tensors, one for each member of the edge. A message carries one member whole, a slice
of it (the partial transport; a gather joins slices again), or, where the layouts of both sides differ, the range that
the receiver needs. A packed message carries the bytes of all members.

Each end of a channel executes its transfers in the order of their posts. If the plan has further queues (a queue of
another name, or ``transport.queue``), a transfer also follows the earlier transfers of that queue. Transfers of one
batch are posted together, with the last of them, and are not ordered among themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from pipeproof.comm.channel_models import ChannelModel, EntryOrder, completed_sends
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.framework_protocol import (
    Arrays,
    Channels,
    Collectives,
    Tensor,
    Transfer,
    Value,
    WeightGradients,
)
from pipeproof.exec.rank.machine import ProtocolError
from pipeproof.exec.rank.message_buffers import Slice, SliceChannels, SliceCollectives, Slots, whole_of
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.schedule.columns import NONE, work_item_of
from pipeproof.schedule.op_parts import TensorPart, part_starts
from pipeproof.schedule.op_table import Channel
from pipeproof.schedule.ops import RECV_KINDS, SEND_KINDS, Op, OpKind

_BACKWARD = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT})

Members = dict[int, Tensor]
"""Tensors of a boundary by their index in the edge."""


@dataclass(slots=True)
class WorkItemTensors:
    """Tensors of one stage's work item on this rank, between its operations."""

    input: Members = field(default_factory=dict)
    output: Value = ()
    output_grad: Members = field(default_factory=dict)
    input_grad: Members = field(default_factory=dict)
    direct_grads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Gradients that consumers of direct edges sent back, by (member, consumer)."""
    received: dict[tuple[bool, int], Tensor | Slice] = field(default_factory=dict)
    """Slices received by the partial transport, before their gather, by (forward, member)."""
    sliced: dict[tuple[bool, int], Tensor | Slice] = field(default_factory=dict)
    """Slices to send by the partial transport, by (forward, member)."""
    weights: WeightGradients | None = None
    """Deferred weight gradients."""

    @property
    def held(self) -> list[str]:
        """Names of the fields that have tensors."""
        return [name.replace("_", " ") for name in self.__slots__ if getattr(self, name)]

    def outgoing(self, member: int, *, forward: bool) -> Tensor:
        """Member that is sent forward, or its gradient that is sent back."""
        return self.output[member] if forward else self.input_grad[member]

    def incoming(self, *, forward: bool) -> Members:
        """Members that are received."""
        return self.input if forward else self.output_grad


@dataclass(frozen=True, slots=True)
class _Message:
    """Facts of the graph about one transfer, slice or gather, looked up once."""

    op: Op
    text: str
    is_send: bool
    is_forward: bool
    shape: list[int]
    """Shape of the whole tensor."""
    dtype: str
    start: int
    stop: int
    is_whole: bool
    member: int
    """Index of the member in its edge."""
    changes_layout: bool
    parts: tuple[TensorPart, ...]
    """The members of a packed message, whose ``shape`` is in bytes."""

    @property
    def members(self) -> list[int]:
        """Indices of all members that it carries."""
        return [part.index for part in self.parts] or [self.member]

    @property
    def is_slice(self) -> bool:
        """True if the partial transport moves it and a gather joins it with others."""
        return not self.is_whole and not self.changes_layout

    def slice_of(self, whole: Tensor) -> Slice:
        """Return the message's slice of a tensor, for a backend that moves slices itself."""
        size = self.stop - self.start
        return Slice(whole, prod(self.shape) // size, self.start // size)


@dataclass(frozen=True, slots=True)
class _Order:
    """Batch and queues of a transfer."""

    channel: Channel
    channel_text: str
    is_last: bool
    """True for the last transfer of its batch."""
    entry: int
    """Last transfer of the batch."""
    orders: tuple[Hashable, ...]
    """Queues of all transfers of the batch."""


class RankTransfers:
    """Tensors of one rank's work items, and their transfers to and from other ranks.

    With ``frees_sends`` the memory of a send is freed as soon as its end is known, not when the plan waits for it.
    """

    def __init__(
        self, plan: LoweredPlan, rank: int, channels: Channels, arrays: Arrays, *, frees_sends: bool = False
    ) -> None:
        self._plan, self._channels, self._arrays, self._num_splits = plan, channels, arrays, plan.num_splits
        buffers, row_rank = plan.spec.buffers, plan.graph.global_rank.index(rank)
        self._receive_slots, self._send_slots = (
            None if num_slots is None else Slots(num_slots, plan.graph, row_rank, kinds, arrays)
            for num_slots, kinds in ((buffers.receive_slots, RECV_KINDS), (buffers.send_slots, SEND_KINDS))
        )
        by_backend = not (buffers.receive_slots or buffers.send_slots) and buffers.free_output == "after_backward"
        self._slicing = channels if by_backend and isinstance(channels, SliceChannels) else None
        """Set if the backend moves slices itself. A slot has room only for the slice, and an output that is freed early
        must be sliced before, so neither is combined with this."""
        self._is_one_queue = plan.spec.transport.queue == "device"
        self._completed = completed_sends(plan.graph, row_rank) if frees_sends else {}
        self._entries = EntryOrder(plan.graph, ChannelModel(plan.spec.transport.queue or "directed_edge"))
        self._messages: dict[int, _Message] = {}
        self._orders: dict[int, _Order] = {}
        self._last: dict[Hashable, list[Transfer]] = {}
        self._ready: dict[int, list[tuple[int, Channel, Tensor | Slice]]] = {}
        self._posted: dict[int, Transfer] = {}
        self.keeps_log = True
        """If False, waits make no log entries."""
        self._freed: dict[int, LogEntry | None] = {}
        graph, own = plan.graph, plan.graph.rank_ops(row_rank)
        ids = np.arange(own.start, own.stop)
        backward = ids[graph.is_kind(_BACKWARD)[own.start : own.stop]]
        sends = ids[graph.is_kind(frozenset({OpKind.SEND_BACKWARD}))[own.start : own.stop]]
        self._backward = frozenset(zip(graph.stage[backward].tolist(), graph.work_item[backward].tolist(), strict=True))
        """Stage and work item of each backward."""
        columns = (column[sends].tolist() for column in (graph.stage, graph.work_item, graph.tensor))
        gradients = zip(*columns, strict=True)
        self._last_sends = frozenset(dict(zip(gradients, sends.tolist(), strict=True)).values())
        """The last send of each gradient."""
        self._tensors: dict[tuple[int, int], WorkItemTensors] = {}

    def begin(self) -> None:
        """Begin a step: drop all tensors, and start with the first slots."""
        self._tensors.clear()
        self._posted.clear()
        self._freed.clear()
        self._ready.clear()
        self._last.clear()
        for slots in (self._receive_slots, self._send_slots):
            if slots is not None:
                slots.begin()

    def of(self, op: Op) -> WorkItemTensors:
        """Tensors of an operation's work item."""
        return self.on_stage(op.stage, op)

    def on_stage(self, stage: int, op: Op) -> WorkItemTensors:
        """Tensors of an operation's work item on a stage of this rank."""
        key = stage, work_item_of(op, self._num_splits)
        tensors = self._tensors.get(key)
        if tensors is None:
            tensors = self._tensors[key] = WorkItemTensors()
        return tensors

    def post(self, op_id: int) -> None:
        """Start a transfer; ``wait`` ends it."""
        message, order = self._message(op_id), self._order(op_id)
        if self._is_under_way(op_id):
            raise ProtocolError(f"{message.text} (op {op_id}) is posted twice")
        tensors = self.of(message.op)
        buffer = (self._outgoing if message.is_send else self._incoming)(op_id, message, order.channel, tensors)
        self._post(op_id, order, buffer)

    def _outgoing(self, op_id: int, message: _Message, channel: Channel, tensors: WorkItemTensors) -> Tensor | Slice:
        forward, member = message.is_forward, message.member
        buffer: Tensor | Slice
        if message.parts:
            return self._packed(op_id, message, channel, tensors)
        if message.is_slice:
            buffer = tensors.sliced.pop((forward, member))
        else:
            buffer = tensors.outgoing(member, forward=forward).detach().contiguous()
            if op_id in self._last_sends:
                del tensors.input_grad[member]  # nothing else reads it, and the plan may wait for the send much later
            if not message.is_whole:
                buffer = buffer.flatten()[message.start : message.stop].clone()
        if self._send_slots is None or isinstance(buffer, Slice):  # slices exist only without slots
            return buffer
        slot = self._send_slots.take(op_id, (channel, forward), list(buffer.shape), message.dtype)
        return self._arrays.copy_into(slot, buffer)

    def _packed(self, op_id: int, message: _Message, channel: Channel, tensors: WorkItemTensors) -> Tensor:
        """A copy of the members in one buffer."""
        if self._send_slots is None:
            buffer = self._arrays.empty(message.shape, message.dtype)
        else:
            buffer = self._send_slots.take(op_id, (channel, message.is_forward), message.shape, message.dtype)
        for part, view in zip(message.parts, self._places(message, buffer), strict=True):
            self._arrays.copy_into(view, tensors.outgoing(part.index, forward=message.is_forward).detach())
            if op_id in self._last_sends:
                del tensors.input_grad[part.index]
        return buffer

    def _places(self, message: _Message, buffer: Tensor) -> list[Tensor]:
        """The members of a packed message as tensors that share its memory."""
        starts = part_starts(part.num_bytes for part in message.parts)
        return [
            self._arrays.shaped(buffer, part.shape, part.dtype, start)
            for part, start in zip(message.parts, starts, strict=False)
        ]

    def _incoming(self, op_id: int, message: _Message, channel: Channel, tensors: WorkItemTensors) -> Tensor | Slice:
        forward, member = message.is_forward, message.member
        if message.is_slice and self._slicing is not None:
            part = message.slice_of(self._arrays.empty(message.shape, message.dtype))
            tensors.received[forward, member] = part
            return part
        shape = message.shape if message.is_whole else [message.stop - message.start]
        if self._receive_slots is None:
            buffer = self._arrays.empty(shape, message.dtype)
        else:
            buffer = self._receive_slots.take(op_id, (channel, forward), shape, message.dtype)
        if message.parts:
            places = self._places(message, buffer)
            tensors.incoming(forward=forward).update(zip(message.members, places, strict=True))
        elif message.op.index is not None and not forward:
            tensors.direct_grads[member, message.op.index] = buffer
        elif message.is_whole:
            tensors.incoming(forward=forward)[member] = buffer
        elif message.is_slice:
            tensors.received[forward, member] = buffer
        elif member not in tensors.incoming(forward=forward):
            tensors.incoming(forward=forward)[member] = self._arrays.zeros(message.shape, message.dtype)
        return buffer

    def _post(self, op_id: int, order: _Order, buffer: Tensor | Slice) -> None:
        """Post a transfer after those that it follows; post a whole batch with its last transfer."""
        ready = self._ready.setdefault(order.entry, [])
        ready.append((op_id, order.channel, buffer))
        if not order.is_last:
            return
        after = [transfer for queue in order.orders for transfer in self._last.get(queue, ())]
        posted = {member: self._start(channel, moved, after) for member, channel, moved in ready}
        batch = [*posted.values()]
        for queue in order.orders:
            self._last[queue] = batch
        self._posted.update(posted)
        del self._ready[order.entry]

    def _start(self, channel: Channel, buffer: Tensor | Slice, after: Sequence[Transfer]) -> Transfer:
        if isinstance(buffer, Slice):
            assert self._slicing is not None
            return self._slicing.post_slice(channel, buffer, after)
        return self._channels.post(channel, buffer, after)

    def drain(self) -> None:
        """Before a collective, wait for all posted transfers if all communication of a device is one queue."""
        if self._is_one_queue:
            for transfer in self._posted.values():
                transfer.wait()

    def wait(self, step: int, op_id: int, target: int) -> LogEntry | None:
        """Block until the transfer ``target``, for which an operation waits, is done; return its log entry."""
        entry = self._freed.pop(target) if target in self._freed else self._end(step, target)
        for send in self._completed.get(op_id, ()):
            self._freed[send] = self._end(step, send)
        return entry

    def _end(self, step: int, target: int) -> LogEntry | None:
        """End a posted transfer, and forget its buffer."""
        transfer = self._posted[target]
        transfer.wait()
        del self._posted[target]
        message = self._message(target)
        if not message.is_send and message.changes_layout and not message.is_whole:
            self._copy_range(message, transfer.buffer)
        if not self.keeps_log:
            return None
        order = self._order(target)
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
        """Number and type of the elements of a transfer, or of a member's part of a gather."""
        tensor, num_slices = whole_of(buffer)
        return self._arrays.numel(tensor) // num_slices, self._arrays.dtype(tensor)

    def _copy_range(self, message: _Message, buffer: Tensor) -> None:
        """Copy a received range into its tensor, whose layout differs from the sender's."""
        into = self.of(message.op).incoming(forward=message.is_forward)
        flat = into[message.member].flatten()
        flat[message.start : message.stop] = buffer
        into[message.member] = flat.reshape(message.shape)

    def free_output(self, op: Op) -> None:
        """Free the memory of an output that was sent; autograd needs the tensors, not their values."""
        tensors = self.of(op)
        assert tensors.output
        for tensor in tensors.output:
            self._arrays.release(tensor)

    def slice(self, op_id: int) -> None:
        """Take the slice of a tensor that the partial transport sends."""
        message = self._message(op_id)
        tensors = self.of(message.op)
        outgoing = tensors.outgoing(message.member, forward=message.is_forward).detach()
        if self._slicing is not None:
            sliced = message.slice_of(outgoing.contiguous())
        else:
            sliced = outgoing.flatten()[message.start : message.stop].clone()
        tensors.sliced[message.is_forward, message.member] = sliced
        if not message.is_forward:
            del tensors.input_grad[message.member]

    def gather(self, op_id: int, collectives: Collectives) -> Tensor | Slice:
        """Join the slices of a tensor that all TP ranks received; return this rank's slice."""
        message = self._message(op_id)
        tensors = self.of(message.op)
        part = tensors.received.pop((message.is_forward, message.member))
        if isinstance(part, Slice):
            assert isinstance(collectives, SliceCollectives)
            joined = collectives.gather_slices(part)
        else:
            joined = collectives.all_gather(part, 0).reshape(message.shape)
        tensors.incoming(forward=message.is_forward)[message.member] = joined
        return part

    def validate_state(self, under_way: frozenset[int], *, due: frozenset[int], at_end: bool) -> None:
        """Check the invariants between operations.

        - Each transfer of ``under_way`` is posted, waits for the last of its batch, or was ended early. Otherwise only
          transfers of ``due``, which are posted next, may be in such a state.
        - A slot has one message at most that is under way, or received and not yet released.
        - At the end of a step no batch is open, and a work item has no tensor after its last backward.

        Raises:
            ProtocolError: an invariant is violated.
        """
        ready = {op_id for batch in self._ready.values() for op_id, *_ in batch}
        transfer_ids = [op_id for ids in (self._posted, ready, self._freed) for op_id in ids]
        if len(transfer_ids) > len(set(transfer_ids)):
            raise ProtocolError(f"a transfer is in two states: {self._texts(transfer_ids)}")
        if forgotten := set(transfer_ids) - under_way - due:
            raise ProtocolError(f"posted, although the wait for it is finished: {self._texts(forgotten)}")
        if missing := under_way - set(transfer_ids):
            raise ProtocolError(f"under way, but not posted: {self._texts(missing)}")
        for slot, op_ids in self._slots_in_use().items():
            if len(op_ids) > 1:
                raise ProtocolError(f"{slot} has several messages: {self._texts(op_ids)}")
        if at_end and self._ready:
            raise ProtocolError(f"the step is complete, but a batch is not: {self._texts(ready)}")
        for stage, work_item in self._backward if at_end else ():
            tensors = self._tensors.get((stage, work_item))
            if tensors is not None and tensors.held:
                left = ", ".join(tensors.held)
                raise ProtocolError(f"the step is complete, but work item {work_item} of stage {stage} has: {left}")

    def story(self) -> list[str]:
        """Return lines on the transfers, slots and work items that have tensors."""
        lines = [
            f"  {state}: {self._texts(op_ids)}"
            for state, op_ids in (
                ("posted", self._posted),
                ("ready for the last of its batch", [op_id for batch in self._ready.values() for op_id, *_ in batch]),
                ("ended before its wait", self._freed),
            )
            if op_ids
        ]
        lines += [f"  {slot}: {self._texts(op_ids)}" for slot, op_ids in self._slots_in_use().items()]
        lines += [
            f"  work item {work_item} of stage {stage} has: {', '.join(tensors.held)}"
            for (stage, work_item), tensors in sorted(self._tensors.items())
            if tensors.held
        ]
        return lines

    def _slots_in_use(self) -> dict[str, list[int]]:
        """Messages in each slot that are under way, or received and not yet released, by the slot's text."""
        in_use: dict[str, list[int]] = {}
        for verb, slots in (("receive", self._receive_slots), ("send", self._send_slots)):
            for ((channel, forward), index), users in (slots.users if slots is not None else {}).items():
                if op_ids := [op_id for op_id in users if self._needs_slot(op_id)]:
                    in_use[f"{verb} slot {index} of {channel}, {'forward' if forward else 'backward'}"] = op_ids
        return in_use

    def _needs_slot(self, op_id: int) -> bool:
        message = self._message(op_id)
        if self._is_under_way(op_id):
            return True
        tensors = self._tensors.get((message.op.stage, work_item_of(message.op, self._num_splits)))
        if tensors is None:  # a look at the state must not make them
            return False
        is_held = not tensors.incoming(forward=message.is_forward).keys().isdisjoint(message.members)
        is_slice = (message.is_forward, message.member) in tensors.received
        return not message.is_send and (is_held if message.is_whole else is_slice)

    def _is_under_way(self, op_id: int) -> bool:
        return op_id in self._posted or any(op_id == ready for batch in self._ready.values() for ready, *_ in batch)

    def _texts(self, op_ids: Iterable[int]) -> str:
        return ", ".join(f"{self._message(op_id).text} (op {op_id})" for op_id in sorted(op_ids))

    def _message(self, op_id: int) -> _Message:
        message = self._messages.get(op_id)
        if message is None:
            row = self._plan.graph.row(op_id)
            op, spec = row.op, self._plan.graph.tensors[row.tensor]
            assert spec.position is not None  # transfers move tensors of boundaries only
            edge, variant, member = spec.position
            changes_layout = (
                not spec.parts and edge != NONE and self._plan.edges[edge].variants[variant][member].changes_layout
            )
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
                member,
                changes_layout,
                spec.parts,
            )
        return message

    def _order(self, op_id: int) -> _Order:
        order = self._orders.get(op_id)
        if order is None:
            entry: Sequence[int] = self._entries.members(op_id)
            channel = self._plan.graph.channels[int(self._plan.graph.channel[op_id])]
            orders = dict.fromkeys(queue for member in entry for queue in self._entries.orders(member))
            order = self._orders[op_id] = _Order(channel, str(channel), op_id == entry[-1], entry[-1], tuple(orders))
        return order
