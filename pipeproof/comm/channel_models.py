"""How transfers wait for each other: the channel models under which a plan is judged.

A model says which transfers of a rank share a FIFO, when a send is done, how
connections are opened and whether a post holds the host. Fewer constraints
give a subset of the waits, so a plan without a deadlock under one model has
none under any weaker one: ``covers`` is that order, and judging goes from the
strictest down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from pipeproof.comm.capabilities import BackendTable, Queue, SendCompletes

Connections = Literal["warm", "lazy"]

QUEUES: Mapping[Queue, str] = MappingProxyType(
    {
        "device": "all communication of a rank, collectives too, whatever its communicator and queue",
        "rank": "all transfers of a rank",
        "direction": "all sends of a rank, and all its receives",
        "communicator": "all transfers of a rank on one communicator",
        "pair": "all transfers between two ranks",
        "directed_edge": "the sends of one channel, and its receives",
    }
)
"""What shares one FIFO, strictest first. A transfer whose row names a queue stands in that one instead, in the order
of its channel; ``device`` takes it in, too."""

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
    """One way in which a backend may carry transfers out.

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
        """Whether every wait under ``other`` is one under this model, so that no deadlock here means none there."""
        return (
            self.queue in _COARSER[other.queue]
            and _buffers_no_more(self, other)
            and (self.connections == "lazy" or other.connections == "warm")
            and (self.host_blocks or not other.host_blocks)
        )

    @property
    def completion_text(self) -> str:
        """When a send is done, in words that follow "one FIFO per rank"."""
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


def _buffers_no_more(mine: ChannelModel, other: ChannelModel) -> bool:
    if mine.completes == "rendezvous":
        return True
    if other.completes == "eager" and other.eager_bytes is None:
        return True
    if mine.completes != other.completes:
        return False
    if mine.completes == "slots":
        return mine.slots <= other.slots
    return mine.eager_bytes is not None and other.eager_bytes is not None and mine.eager_bytes <= other.eager_bytes


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
"""The models under which every plan is judged, strictest queue first."""


def declared_model(backend: BackendTable, connections: Connections = "warm") -> ChannelModel:
    """What a backend's table promises. Of a bounded buffer whose size it does not say, one message is counted on."""
    return ChannelModel(
        queue=backend.queue,
        completes=backend.send_completes,
        slots=1 if backend.send_completes == "slots" else 0,
        connections=connections,
        host_blocks=backend.host_blocks_on_post,
    )
