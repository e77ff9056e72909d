"""Channel models: the assumptions on how transfers wait for each other, under which a plan is checked.

A model defines which transfers of a rank share a FIFO, when a send is done, how
connections are opened and whether a post holds the host. Fewer constraints
give a subset of the waits, so a plan without a deadlock under one model has
none under any weaker one: ``covers`` is that order, and checks go from the
strictest model down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from pipeproof.comm.backend_rows import BackendTable, Queue, SendCompletes
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import SEND_KINDS
from pipeproof.specs.dtypes import dtype_bytes

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
"""The queues whose order contains that of each one."""


@dataclass(frozen=True, slots=True)
class ChannelModel:
    """One way in which a backend may execute transfers.

    Args:
        queue: which entries of a rank go one after the other; see ``QUEUES``.
        completes: when a send is done: with its receive (``rendezvous``);
            while the receives of its channel are at most ``slots`` messages
            behind; while the bytes that are sent and not yet received fit
            into ``eager_bytes`` (None: always).
        connections: ``lazy``: the first use of a channel or group is a
            meeting of its members that holds their hosts.
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

MODELS: tuple[ChannelModel, ...] = (
    ChannelModel("device", "rendezvous"),
    ChannelModel("device", "slots", slots=1),
    ChannelModel("device", "eager", eager_bytes=NCCL_BUFFER_BYTES),
    ChannelModel("rank", "rendezvous"),
    ChannelModel("rank", "slots", slots=1),
    ChannelModel("rank", "eager", eager_bytes=NCCL_BUFFER_BYTES),
    ChannelModel("direction", "rendezvous"),
    ChannelModel("direction", "slots", slots=1),
    ChannelModel("direction", "eager", eager_bytes=NCCL_BUFFER_BYTES),
    ChannelModel("communicator", "rendezvous"),
    ChannelModel("communicator", "slots", slots=1),
    ChannelModel("communicator", "eager", eager_bytes=NCCL_BUFFER_BYTES),
    ChannelModel("pair", "rendezvous"),
    ChannelModel("pair", "slots", slots=1),
    ChannelModel("pair", "eager", eager_bytes=NCCL_BUFFER_BYTES),
    ChannelModel("directed_edge", "rendezvous"),
    ChannelModel("directed_edge", "slots", slots=1),
    ChannelModel("directed_edge", "eager", eager_bytes=NCCL_BUFFER_BYTES),
)
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
    """(sends, the receive that must be over before each is done) under slots or an eager buffer.

    Sends that wait for no receive, or for one that is missing, are left out.
    """
    sends, receive = _awaited(graph, model)
    return sends[receive != NONE], receive[receive != NONE]


def awaited_by_sends(graph: OpGraph, model: ChannelModel) -> dict[int, int]:
    """The same as a mapping by send; ``NONE`` represents a missing receive, so that the send is never done."""
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
