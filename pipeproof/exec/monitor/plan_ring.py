"""Ring of a rank that executes a plan: each message and collective has the plan's operation.

The channels and collectives of the rank are wrapped. Messages of a channel are
posted in the plan's order, so the n-th post of a step is the n-th transfer of
the channel; a collective belongs to the operation that the rank entered last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self, cast

from pipeproof.exec.monitor.ring_recorder import DIRECTORY_VARIABLE, RingRecorder, active_recorder
from pipeproof.exec.rank.framework_protocol import (
    Arrays,
    BegunCollective,
    Channels,
    Collectives,
    OverlappedCollectives,
    Tensor,
    Transfer,
    World,
)
from pipeproof.exec.rank.message_buffers import Slice, SliceChannels, SliceCollectives, whole_of
from pipeproof.exec.rank.op_log import ChannelTransfers
from pipeproof.interop.traces.recorder import CallSink
from pipeproof.schedule.columns import NONE
from pipeproof.schedule.op_table import Channel, OpGraph
from pipeproof.schedule.ops import TRANSFER_KINDS


class PlanRing:
    """The ring of one rank and the plan that it executes.

    Args:
        recorder: the ring.
        graph: the graph of the plan.
        index: the rank in the graph.
        ranks: global rank of each rank of the graph.
        backend: ``nccl`` or ``gloo``.
        arrays: the framework's operations on tensors.
    """

    def __init__(
        self, recorder: RingRecorder, graph: OpGraph, index: int, ranks: Sequence[int], backend: str, arrays: Arrays
    ) -> None:
        self.recorder, self.arrays = recorder, arrays
        self._graph, self._index, self._ranks, self._backend = graph, index, ranks, backend
        self._transfers = ChannelTransfers(graph, index)
        self._step = self._op_id = 0
        self._marks: dict[int, dict[str, Any]] = {}

    @contextmanager
    def recording(self) -> Iterator[Self]:
        """Close the ring at the end of the block, with the error that the block raised."""
        try:
            yield self
        except BaseException as error:
            self.recorder.close(error)
            raise
        self.recorder.close(None)

    def begin(self, step: int) -> None:
        """Begin a step, also after one that failed."""
        self._step = step
        self._transfers.begin()

    def enter(self, op_id: int) -> None:
        """Write the operation that the rank is about to execute."""
        self._op_id = op_id
        mark = self._mark(op_id)
        self.recorder.enter(mark["plan_op"], self._step, mark["stage"], mark["micro_batch"])

    def leave(self) -> None:
        """Write that the rank is in no operation of the plan."""
        self.recorder.enter("", NONE, NONE, NONE)

    def issue_message(self, channel: Channel, buffer: Tensor | Slice) -> int:
        """Write that the next transfer of a channel is about to be posted, and return its number."""
        op_id = self._transfers.next(channel)
        ends = self._ranks[channel.src], self._ranks[channel.dst]
        name, is_send = f"{channel.communicator} {ends[0]}->{ends[1]}", self._index == channel.src
        self.recorder.group(name, ends, self._backend)
        size = int(self._graph.stop[op_id] - self._graph.start[op_id])
        tensor = int(self._graph.tensor[op_id])
        dtype = "" if tensor == NONE else self._graph.tensors[tensor].dtype
        return self.recorder.issue(
            "send" if is_send else "recv", name, ends[1] if is_send else ends[0], 0, dtype, (size,),
            size if is_send else 0, 0 if is_send else size, self._mark(op_id) | {"step": self._step},
        )  # fmt: skip

    def issue_collective(self, op: str, group: int, tensor: Tensor) -> int:
        """Write that a collective of a group of the graph is about to be issued, and return its number."""
        planned = self._graph.groups[group]
        name = f"{planned.axis}.{group}"
        self.recorder.group(name, [self._ranks[member] for member in planned.ranks], self._backend)
        size = self.arrays.numel(tensor)
        return self.recorder.issue(
            op, name, None, 0, self.arrays.dtype(tensor), (size,), size, size,
            self._mark(self._op_id) | {"step": self._step},
        )  # fmt: skip

    def world(self, world: World) -> RingWorld:
        """Return a world whose messages and collectives are written into the ring."""
        return RingWorld(world, self)

    def _mark(self, op_id: int) -> dict[str, Any]:
        """Return the text of an operation, its stage and micro-batch, and the direction of a transfer."""
        mark = self._marks.get(op_id)
        if mark is None:
            op = self._graph.ops[op_id]
            about = op if op.target is None else op.target
            mark = self._marks[op_id] = {
                "plan_op": str(op),
                "stage": about.stage,
                "micro_batch": NONE if about.micro_batch is None else about.micro_batch,
                "kind": ("F" if op.is_forward else "B") if op.kind in TRANSFER_KINDS else "",
            }
        return mark


def ring_of_process(
    watch: Callable[[], object], graph: OpGraph, index: int, ranks: Sequence[int], backend: str, arrays: Arrays
) -> PlanRing | None:
    """Return the ring of a process that its script or ``PIPEPROOF_WATCH`` watches; None without a watch.

    ``watch`` begins the watch; for the other arguments see ``PlanRing``.

    Raises:
        OSError: the ring cannot be created.
    """
    if active_recorder() is None and os.environ.get(DIRECTORY_VARIABLE):
        watch()
    recorder = active_recorder()
    return None if recorder is None else PlanRing(recorder, graph, index, ranks, backend, arrays)


class RingWorld:
    """A rank's communication, written into its ring; a ``World``."""

    def __init__(self, world: World, ring: PlanRing) -> None:
        self.rank, self.barrier = world.rank, world.barrier
        moves_slices = isinstance(world.channels, SliceChannels)
        self.channels: Channels = (RingSliceChannels if moves_slices else RingChannels)(world.channels, ring)
        self.collectives: Mapping[int, Collectives] = {
            index: (RingSliceCollectives if isinstance(each, SliceCollectives) else RingCollectives)(
                each, index, ring, each.ranks
            )
            for index, each in world.collectives.items()
        }


class MessageRecord(Protocol):
    """Record of a rank's messages, into which ``RingChannels`` write."""

    @property
    def recorder(self) -> CallSink:
        """Writer of the record."""

    def issue_message(self, channel: Channel, buffer: Tensor | Slice) -> int:
        """Write that the next transfer of a channel is about to be posted, and return its number."""


class RingTransfer:
    """A posted transfer whose wait is in the ring; a ``Transfer``."""

    def __init__(self, transfer: Transfer, number: int, recorder: CallSink) -> None:
        self.transfer, self._number, self._recorder = transfer, number, recorder
        self.buffer, self.posted_ns = transfer.buffer, transfer.posted_ns
        self.start_ns = self.end_ns = 0

    def wait(self) -> None:
        """Wait, and write when the wait begins and ends."""
        with self._recorder.waiting((self._number,)):
            self.transfer.wait()
        self._recorder.done((self._number,))
        self.start_ns, self.end_ns = self.transfer.start_ns, self.transfer.end_ns


class RingChannels:
    """A rank's channels, each post written into the ring or another record; a ``Channels``."""

    def __init__(self, channels: Channels, ring: MessageRecord) -> None:
        self._channels, self._ring, self.close = channels, ring, channels.close

    def post(self, channel: Channel, buffer: Tensor, after: Sequence[RingTransfer] = ()) -> RingTransfer:
        """Post a transfer, see ``Channels.post``."""
        return self._post(channel, buffer, after, self._channels.post)

    def _post(
        self, channel: Channel, buffer: Any, after: Sequence[RingTransfer], post: Callable[..., Transfer]
    ) -> RingTransfer:
        recorder = self._ring.recorder
        number = self._ring.issue_message(channel, buffer)
        with recorder.issuing(number):
            transfer = post(channel, buffer, [each.transfer for each in after])
        recorder.issued(number)
        return RingTransfer(transfer, number, recorder)


class RingSliceChannels(RingChannels):
    """``RingChannels`` for channels that move slices; a ``SliceChannels``."""

    def post_slice(self, channel: Channel, part: Slice, after: Sequence[RingTransfer] = ()) -> RingTransfer:
        """Post a transfer of a slice, see ``SliceChannels.post_slice``."""
        return self._post(channel, part, after, cast("SliceChannels", self._channels).post_slice)


class RingCollectives:
    """Collectives over one group, each written into the ring; a ``Collectives``."""

    def __init__(self, collectives: Any, group: int, ring: PlanRing, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._collectives, self._group, self._ring = collectives, group, ring

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensors of all members, see ``Collectives.all_gather``."""
        return self._call("all_gather", tensor, self._collectives.all_gather, dim)

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """Return the sum or maximum, see ``Collectives.reduce``."""
        return self._call("all_reduce", tensor, self._collectives.reduce, reduction)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this member's part of the sum, see ``Collectives.reduce_scatter``."""
        return self._call("reduce_scatter", tensor, self._collectives.reduce_scatter, dim)

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange rows, see ``Collectives.exchange``."""
        return self._call("all_to_all", rows, self._collectives.exchange, send, receive)

    @property
    def begun(self) -> RingBegunCollectives:
        """The collectives of a group that can be begun, written into the ring."""
        begun = cast("OverlappedCollectives", self._collectives).begun
        return RingBegunCollectives(begun, self._group, self._ring, self.ranks)

    def _call(self, op: str, tensor: Tensor, call: Callable[..., Any], *args: Any) -> Any:
        recorder = self._ring.recorder
        number = self._ring.issue_collective(op, self._group, tensor)
        with recorder.issuing(number):
            result = call(tensor, *args)
        recorder.done((number,))
        return result


class RingBegunCollectives(RingCollectives):
    """Collectives with a later wait: each returns a ``RingBegun``; an ``AsyncCollectives``."""

    def _call(self, op: str, tensor: Tensor, call: Callable[..., Any], *args: Any) -> RingBegun:
        recorder = self._ring.recorder
        number = self._ring.issue_collective(op, self._group, tensor)
        with recorder.issuing(number):
            begun = call(tensor, *args)
        recorder.issued(number)
        return RingBegun(begun, number, recorder)


class RingBegun:
    """A collective that has begun and whose wait is in the ring; a ``BegunCollective``."""

    def __init__(self, begun: BegunCollective, number: int, recorder: RingRecorder) -> None:
        self._begun, self._number, self._recorder = begun, number, recorder
        self.block = begun.block

    def wait(self) -> Tensor:
        """Wait, write when the wait begins and ends, and return the result."""
        with self._recorder.waiting((self._number,)):
            result = self._begun.wait()
        self._recorder.done((self._number,))
        return result


class RingSliceCollectives(RingCollectives):
    """``RingCollectives`` for collectives that join slices; a ``SliceCollectives``."""

    def gather_slices(self, part: Slice) -> Tensor:
        """Gather slices, see ``SliceCollectives.gather_slices``."""
        gather = cast("SliceCollectives", self._collectives).gather_slices
        return self._call("all_gather", whole_of(part)[0], lambda _: gather(part))
