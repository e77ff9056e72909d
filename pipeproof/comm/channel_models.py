"""Channel models: the assumptions on how transfers wait for each other, under which a plan is checked.

A model defines which transfers of a rank share a FIFO, when a send is done, how
connections are opened and whether a post holds the host. Fewer constraints
give a subset of the waits, so a plan without a deadlock under one model has
none under any weaker one: ``covers`` is that order, and checks go from the
strictest model down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from pipeproof.comm.backend_rows import BackendTable, Queue, SendCompletes
from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE, IntColumn
from pipeproof.schedule.derive import packed
from pipeproof.schedule.op_table import NONE, EdgeKind, OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, COMPUTE_KINDS, KINDS, RECV_KINDS, SEND_KINDS, TRANSFER_KINDS
from pipeproof.specs.axis_layout import dtype_bytes

Connections = Literal["warm", "lazy"]

QUEUES: Mapping[Queue, str] = MappingProxyType(
    {
        "device": "all communication of a rank, collectives too, on any communicator and queue",
        "rank": "all transfers of a rank",
        "direction": "all sends of a rank, and all its receives",
        "communicator": "all transfers of a rank on one communicator",
        "pair": "all transfers between two ranks",
        "directed_edge": "the sends of one channel, and its receives",
    }
)
"""The transfers that share one FIFO, strictest first. A transfer whose row names a queue is in that queue, in the order
of its channel; ``device`` includes it, too."""

_COARSER: Mapping[Queue, frozenset[Queue]] = MappingProxyType(
    {
        "device": frozenset[Queue]({"device"}),
        "rank": frozenset[Queue]({"device", "rank"}),
        "direction": frozenset[Queue]({"device", "rank", "direction"}),
        "communicator": frozenset[Queue]({"device", "rank", "communicator"}),
        "pair": frozenset[Queue]({"device", "rank", "pair"}),
        "directed_edge": frozenset(QUEUES),
    }
)
"""By queue, the stricter queues whose order contains its order."""


@dataclass(frozen=True, slots=True)
class ChannelModel:
    """One way in which a backend may execute transfers.

    Args:
        queue: the entries of a rank that follow one another; see ``QUEUES``.
        completes: when a send is done: with its receive (``rendezvous``);
            while the receives of its channel are at most ``slots`` messages
            behind; while the bytes that are sent and not yet received fit
            into ``eager_bytes`` (None: always).
        connections: ``lazy``: the first use of a channel or group blocks
            the hosts of all members until they have all come.
        host_blocks: a post holds the host until the transfer is done.
    """

    queue: Queue
    completes: SendCompletes = "rendezvous"
    slots: int = 0
    eager_bytes: int | None = None
    connections: Connections = "warm"
    host_blocks: bool = False

    def covers(self, other: ChannelModel) -> bool:
        """Return True if every wait under ``other`` is a wait under this model: no deadlock here means none there."""
        return (
            self.queue in _COARSER[other.queue]
            and _buffers_no_more(self, other)
            and (self.connections == "lazy" or other.connections == "warm")
            and (self.host_blocks or not other.host_blocks)
        )

    @property
    def completion_text(self) -> str:
        """The completion of a send as text that follows "one FIFO per rank"."""
        if self.completes == "rendezvous":
            return "at rendezvous"
        if self.completes == "slots":
            return f"with {self.slots} slot{'' if self.slots == 1 else 's'}"
        return "eager" if self.eager_bytes is None else f"eager up to {self.eager_bytes // 2**20} MiB"

    def __str__(self) -> str:
        extras = [", connections opened at first use"] if self.connections == "lazy" else []
        extras += [", posts hold the host"] if self.host_blocks else []
        return f"one FIFO per {queue_text(self.queue)} {self.completion_text}{''.join(extras)}"


def queue_text(queue: Queue) -> str:
    """A kind of queue in words."""
    return queue.replace("_", " ")


def _buffers_no_more(model: ChannelModel, other: ChannelModel) -> bool:
    if model.completes == "rendezvous":
        return True
    if other.completes == "eager" and other.eager_bytes is None:
        return True
    if model.completes != other.completes:
        return False
    if model.completes == "slots":
        return model.slots <= other.slots
    return model.eager_bytes is not None and other.eager_bytes is not None and model.eager_bytes <= other.eager_bytes


NCCL_BUFFER_BYTES = 4 * 2**20
"""NCCL's default buffer of a channel, the usual reason why a wrong order works while messages are small."""

_COMPLETIONS = (
    ChannelModel("device", "rendezvous"),
    ChannelModel("device", "slots", slots=1),
    ChannelModel("device", "eager", eager_bytes=NCCL_BUFFER_BYTES),
)

MODELS: tuple[ChannelModel, ...] = tuple(replace(model, queue=queue) for queue in QUEUES for model in _COMPLETIONS)
"""The models under which every plan is checked, strictest queue first."""


def declared_model(backend: BackendTable, connections: Connections = "warm") -> ChannelModel:
    """The model that a backend's table promises; a bounded buffer of unknown size is assumed to hold one message."""
    return ChannelModel(
        queue=backend.queue,
        completes=backend.send_completes,
        slots=1 if backend.send_completes == "slots" else 0,
        connections=connections,
        host_blocks=backend.host_blocks_on_post,
    )


def message_bytes(graph: OpGraph) -> IntColumn:
    """Bytes that each row's range holds in its tensor; 0 where a row has none."""
    sizes = np.array([*(dtype_bytes(tensor.dtype) for tensor in graph.tensors), 0], dtype=np.int64)
    return (graph.stop - graph.start) * sizes[graph.tensor]  # NONE is the last place


def awaited_receives(graph: OpGraph, model: ChannelModel) -> tuple[IntColumn, IntColumn]:
    """(sends, the receive that must end before each is done) under slots or an eager buffer.

    Sends that wait for no receive, or for a missing one, are left out.
    """
    sends, receive = _awaited(graph, model)
    return sends[receive != NONE], receive[receive != NONE]


def awaited_by_sends(graph: OpGraph, model: ChannelModel) -> dict[int, int]:
    """``awaited_receives`` as a mapping by send; ``NONE`` is a missing receive: the send is then never done."""
    sends, receive = _awaited(graph, model)
    return dict(zip(sends.tolist(), receive.tolist(), strict=True))


def _awaited(graph: OpGraph, model: ChannelModel) -> tuple[IntColumn, IntColumn]:
    sends = np.flatnonzero(graph.is_kind(SEND_KINDS))
    sends = sends[np.argsort(graph.channel[sends], kind="stable")]  # of one rank, so FIFO order within a channel
    if model.completes == "slots":
        earlier = np.arange(len(sends)) - model.slots
    elif model.completes == "rendezvous" or model.eager_bytes is None:
        return sends[:0], sends[:0]
    else:  # the last j for which messages j..k take more bytes than there is room for
        before = np.concatenate([[0], np.cumsum(message_bytes(graph)[sends])])
        earlier = np.searchsorted(before, before[1:] - model.eager_bytes, side="left") - 1
    awaits = earlier >= 0
    awaits[awaits] = graph.channel[sends[earlier[awaits]]] == graph.channel[sends[awaits]]
    return sends[awaits], graph.match[sends[earlier[awaits]]]


# Order of a rank's operations under a channel model: the events that each operation has to follow.
#
# Each operation has two events: *post*, when it is under way, and *done*, when
# it has finished. The constraints of one rank alone on posts are here.
# ``verify.deadlock`` proves with them that all events happen, ``sim`` computes
# their times:
#
# - rows of one rank with a common batch are one call, an *entry*, at the
#   position of its last row; any other row is an entry of its own, and so is
#   each computation of a batch that has only computations. An entry's posts
#   follow the dones of all members of the entry before it, in every order below;
#   its members have no order among themselves;
# - the compute queue is also the order in which the host issues. Its entries
#   follow each other. A transfer on its default queue follows the entry of the
#   compute queue before it;
# - operations on the ``host`` queue, and a transfer whose post holds the host,
#   hold everything that the rank issues later;
# - entries of a queue of another name follow each other;
# - a part of a computation, and a collective between two parts, also follow the
#   previous one of the same computation, which may be on another queue;
# - transfers follow the previous one on their channel end and, on default
#   queues, on the model's FIFO; with one FIFO for the device, all communication
#   of the rank is one order;
# - a transfer also follows the transfer of the previous message on its channel.
#   Messages are in program order, so this adds a constraint only for a transfer
#   that is *early*: the call with the previous message is closed after it. The
#   two then follow each other. This holds for every backend: the transfer that
#   is issued first is first on the wire, and otherwise the peer would get each
#   message for the other.


def calls_of(graph: OpGraph) -> IntColumn:
    """Return by operation the number of its call on its rank, which is its batch; NONE if it is issued by itself.

    A batch of only computations is not a call: they overlap, and the host issues
    them one by one.
    """
    batched = graph.batch != NONE
    others = batched & ~graph.is_kind(COMPUTE_KINDS)
    if not (batched & ~others).any():
        return graph.batch
    batch = packed(graph.rank, graph.batch)
    return np.where(batched & np.isin(batch, batch[others]), graph.batch, NONE)


def post(op_id: int) -> int:
    """The event "this operation is under way" as an integer."""
    return 2 * op_id


def done(op_id: int) -> int:
    """The event "this operation has finished" as an integer."""
    return 2 * op_id + 1


@dataclass
class Host:
    """State of one rank's host: the events that its next entry has to follow."""

    issued: list[int] = field(default_factory=list)
    """Events of the compute queue's last entry, for operations in its order."""
    held: list[int] = field(default_factory=list)
    """Events of the last entry that held the host, for all operations."""
    last: dict[Hashable, list[int]] = field(default_factory=dict)
    """Events of the last entry of each queue and FIFO."""


class EntryOrder:
    """The entries of each rank of a graph, under a channel model."""

    def __init__(self, graph: OpGraph, model: ChannelModel) -> None:
        self.graph, self.model = graph, model
        codes = graph.kind.tolist()
        sends, transfers, collectives = (
            [kind in kinds for kind in KINDS] for kinds in (SEND_KINDS, TRANSFER_KINDS, COLLECTIVE_KINDS)
        )
        self._is_send: list[bool] = [sends[code] for code in codes]
        self._is_transfer: list[bool] = [transfers[code] for code in codes]
        self._is_collective: list[bool] = [collectives[code] for code in codes]
        self._queue: list[int] = graph.queue.tolist()
        self._channel: list[int] = graph.channel.tolist()
        self._peer: list[int] = graph.peer.tolist()
        self._group: list[int] = graph.group.tolist()
        self._rank: list[int] = graph.rank.tolist()
        self._part_before: list[int] = graph.part_before.tolist()
        self._call: dict[int, list[int]] = {}
        calls: dict[tuple[int, int], list[int]] = defaultdict(list)
        number = calls_of(graph)
        for op_id in np.flatnonzero(number != NONE).tolist():
            call = calls[self._rank[op_id], int(number[op_id])]
            call.append(op_id)
            self._call[op_id] = call
        self._ahead = dict(self._early_transfers()) if self._call else {}
        """By early transfer, the transfer of the previous message."""

    def _early_transfers(self) -> Iterator[tuple[int, int]]:
        last: dict[Hashable, int] = {}
        for op_id in filter(self.is_transfer, range(self.graph.num_ops)):
            end = self._end(op_id)
            before = last.get(end)
            if before is not None and self.members(before)[-1] > self.members(op_id)[-1]:
                yield op_id, before
            last[end] = op_id

    def members(self, op_id: int) -> Sequence[int]:
        """The rows of an operation's entry."""
        return self._call.get(op_id) or (op_id,)

    def entries(self, rank: int) -> Iterator[tuple[Sequence[int], list[int]]]:
        """(members, events that their posts follow) of each entry of a rank, in the order in which they are issued."""
        host = Host()
        for op_id in self.graph.rank_ops(rank):
            entry = self.members(op_id)
            if op_id == entry[-1]:
                yield entry, self._follows(entry, host)

    def _follows(self, entry: Sequence[int], host: Host) -> list[int]:
        dones = [done(op_id) for op_id in entry]
        before: list[int] = []
        goes_with_host = holds_host = by_default = False
        orders: dict[Hashable, None] = {}
        for op_id in entry:
            goes_with_host = goes_with_host or self.goes_with_host(op_id)
            holds_host = holds_host or self._holds_host(op_id)
            by_default = by_default or self._queue[op_id] == NONE
            orders.update(dict.fromkeys(self.orders(op_id)))
            if self._part_before[op_id] != NONE:
                before.append(done(self._part_before[op_id]))
            if op_id in self._ahead:
                before += map(done, self.members(self._ahead[op_id]))
        if goes_with_host or by_default:
            before += host.issued
        before += host.held
        for order in orders:
            before += host.last.get(order, ())
            host.last[order] = dones
        if goes_with_host:
            host.issued = dones
        if holds_host:
            host.held = dones
        return before

    def goes_with_host(self, op_id: int) -> bool:
        """Return True if an operation is part of the order in which its host issues."""
        return self._queue[op_id] in (COMPUTE_QUEUE, HOST_QUEUE) or self._holds_host(op_id)

    def _holds_host(self, op_id: int) -> bool:
        return self._queue[op_id] == HOST_QUEUE or (self.model.host_blocks and self._is_transfer[op_id])

    def is_transfer(self, op_id: int) -> bool:
        """Return True if an operation is a send or a receive."""
        return self._is_transfer[op_id]

    def is_call(self, op_id: int) -> bool:
        """Return True if an operation is a collective of several ranks."""
        return self._is_collective[op_id] and self._group[op_id] != NONE

    def orders(self, op_id: int) -> Sequence[Hashable]:
        """The orders of its rank, in addition to the host's, that include an operation."""
        queue = self._queue[op_id]
        named: Sequence[Hashable] = () if queue in (NONE, COMPUTE_QUEUE, HOST_QUEUE) else (("queue", queue),)
        on_device: Sequence[Hashable] = ("device",) if self.model.queue == "device" else ()
        if not self._is_transfer[op_id]:
            return (*named, *on_device) if self.is_call(op_id) else named
        fifo = self._fifo(op_id) if queue == NONE else ()
        return (self._end(op_id), *named, *fifo, *on_device)

    def _end(self, op_id: int) -> Hashable:
        """The end of a channel that a transfer uses."""
        return self._channel[op_id], self._is_send[op_id]

    def _fifo(self, op_id: int) -> Sequence[Hashable]:
        """The order of a transfer on its default queue, if it is more than its end of a channel."""
        match self.model.queue:
            case "rank":
                return ("rank",)
            case "direction":
                return (("direction", self._is_send[op_id]),)
            case "communicator":
                return (("communicator", self.graph.channels[self._channel[op_id]].communicator),)
            case "pair":
                return (("pair", self._peer[op_id]),)
            case _:
                return ()


def completed_sends(graph: OpGraph, rank: int) -> dict[int, tuple[int, ...]]:
    """By wait for a receive of a rank, the sends of that rank that have ended by then; ids of the graph's operations.

    Omits sends that the plan has already waited for, and sends whose completion is unknown.
    """
    wait_of = {int(graph.waits_for[op_id]): op_id for op_id in range(graph.num_ops) if graph.waits_for[op_id] != NONE}
    own = graph.rank_ops(rank)
    sent: dict[int, list[tuple[int, int]]] = defaultdict(list)
    received: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for send, receive in graph.edges[EdgeKind.MATCH].tolist():
        if (
            graph.ops[send].kind not in SEND_KINDS
            or graph.ops[receive].kind not in RECV_KINDS
            or receive not in wait_of
        ):
            continue
        if send in own:
            sent[int(graph.rank[receive])].append((wait_of[receive], send))
        elif receive in own:
            received[int(graph.rank[send])].append((send, wait_of[receive]))
    completed: dict[int, tuple[int, ...]] = {}
    for peer, messages in received.items():
        ours, position = sorted(sent.get(peer, [])), 0
        for posted, wait in sorted(messages):
            complete_sends = []
            while position < len(ours) and ours[position][0] < posted:
                send = ours[position][1]
                if send < wait < wait_of.get(send, NONE):  # a deadlocked plan may order the send after its proof
                    complete_sends.append(send)
                position += 1
            if complete_sends:
                completed[wait] = (*completed.get(wait, ()), *complete_sends)
    return completed
