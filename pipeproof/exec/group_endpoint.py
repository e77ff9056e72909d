"""What both frameworks' endpoints have alike: calls that ``paddle.distributed`` and ``torch.distributed`` agree on."""

# ruff: noqa: D102 - what each method of an endpoint does stands once, at `Endpoint`
from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeproof.schedule.optable import Channel
from pipeproof.testing.endpoint import EDGES, Array, Handle

if TYPE_CHECKING:  # a process of the doctor needs no more of the executor than it posts with
    from pipeproof.exec.pings import Wire

PAUSE_S = 0.1
_LOOK_S = 1e-5
"""How long the host sleeps between two looks at a transfer of a device."""
CHANNELS = tuple(Channel(name, src, dst) for name, (src, dst) in EDGES.items())
"""Those that the adapter's posts are tried on, by the names of the edges."""


@dataclass(frozen=True, slots=True)
class _Waitable:
    """A transfer under way, the tensor it uses, and what holds the host until it is done."""

    request: Any
    tensor: Any
    finish: Callable[[Any], None]

    def wait(self) -> Array:
        self.finish(self.request)
        return numpy_of(self.tensor)


class GroupEndpoint(ABC):
    """A framework's own calls on a two-rank group, and the adapter's posts.

    ``library`` is the framework and ``dist`` its communication, untyped: what is under test is also how they take
    arguments that their signatures do not have. On a GPU (``on_device``), where calls return before anything is done,
    a blocking call is one that the host waits for.
    """

    def __init__(self, wire: Wire, library: Any, dist: Any, group: Any, *, on_device: bool) -> None:
        self.rank, self.wire = wire.rank, wire
        self._library, self._dist, self._group, self._on_device = library, dist, group, on_device
        self._channels = {channel.communicator: channel for channel in CHANNELS}

    def clock_ns(self) -> int:
        """The kernel's monotonic clock, which all processes of a machine share."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def pause(self) -> None:
        time.sleep(PAUSE_S)

    def send(self, array: Array, peer: int, tag: int | None = None) -> None:
        self._dist.send(self._tensor(array), dst=peer, group=self._group, **_tagged(tag))
        self.wire.arrays.synchronize()

    def recv(self, into: Array, peer: int, tag: int | None = None) -> Array:
        tensor = self._tensor(into)
        self._dist.recv(tensor, src=peer, group=self._group, **_tagged(tag))
        return numpy_of(tensor)

    def isend(self, array: Array, peer: int) -> Handle:
        tensor = self._tensor(array)
        return _Waitable(self._dist.isend(tensor, dst=peer, group=self._group), tensor, self._finish)

    def irecv(self, into: Array, peer: int) -> Handle:
        tensor = self._tensor(into)
        return _Waitable(self._dist.irecv(tensor, src=peer, group=self._group), tensor, self._finish)

    def post_send(self, array: Array, edge: str) -> Handle:
        return self._post(array, edge)

    def post_recv(self, into: Array, edge: str) -> Handle:
        return self._post(into, edge)

    def barrier(self) -> None:
        self._dist.barrier()

    def all_reduce(self, array: Array) -> Array:
        tensor = self._tensor(array)
        self._dist.all_reduce(tensor, group=self._group)
        return numpy_of(tensor)

    def broadcast(self, array: Array, root: int) -> Array:
        tensor = self._tensor(array)
        self._dist.broadcast(tensor, src=root, group=self._group)
        return numpy_of(tensor)

    def reduce_scatter(self, array: Array) -> Array:
        halves = [self._tensor(half) for half in np.split(array, 2)]
        result = self._tensor(np.zeros_like(np.split(array, 2)[0]))
        self._dist.reduce_scatter(result, halves, group=self._group)
        return numpy_of(result)

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What the framework says of itself and of this rank's device, by name."""

    def _post(self, array: Array, edge: str) -> Handle:
        transfer = self.wire.channels.post(self._channels[edge], self._tensor(array))
        return _Waitable(self._request(transfer) if self._on_device else transfer, transfer.buffer, self._finish)

    def _finish(self, request: Any) -> None:
        """Hold the host until a transfer is done.

        On a device its wait would hold the stream that all posts start behind, those of other edges too: in a plan a
        post starts behind what is computed before it, and here nothing is.
        """
        if not self._on_device:
            request.wait()
            return
        while not request.is_completed():
            time.sleep(_LOOK_S)

    @abstractmethod
    def _request(self, transfer: Any) -> Any:
        """The framework's own handle of a transfer that the adapter posted on a device."""

    @abstractmethod
    def _tensor(self, array: Array) -> Any:
        """A tensor of the framework that owns its memory, on this rank's device."""


def numpy_of(tensor: Any) -> Array:
    """The values of a tensor; the host waits for those of a device."""
    array: Array = tensor.cpu().numpy()
    return array


def _tagged(tag: int | None) -> dict[str, int]:
    """The tag as an argument, for the framework to take or to refuse."""
    return {} if tag is None else {"tag": tag}
