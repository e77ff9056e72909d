"""What both frameworks' endpoints have alike: calls that ``paddle.distributed`` and ``torch.distributed`` agree on."""

# ruff: noqa: D102 - what each method of an endpoint does stands once, at `Endpoint`
from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeproof.schedule.optable import Channel
from pipeproof.testing.endpoint import EDGES, Array, Handle

if TYPE_CHECKING:  # a process of the doctor needs no more of the executor than it posts with
    from pipeproof.exec.framework import Channels

PAUSE_S = 0.1
CHANNELS = tuple(Channel(name, src, dst) for name, (src, dst) in EDGES.items())
"""Those that the adapter's posts are tried on, by the names of the edges."""


@dataclass(frozen=True, slots=True)
class _Waitable:
    """A transfer under way, and the tensor it uses."""

    transfer: Any
    tensor: Any

    def wait(self) -> Array:
        self.transfer.wait()
        return numpy_of(self.tensor)


class GroupEndpoint(ABC):
    """A framework's own calls on a two-rank gloo group, and the adapter's posts.

    ``library`` is the framework and ``dist`` its communication, untyped: what is under test is also how they take
    arguments that their signatures do not have.
    """

    def __init__(self, rank: int, library: Any, dist: Any, group: Any, posts: Channels) -> None:
        self.rank = rank
        self._library, self._dist, self._group, self._posts = library, dist, group, posts
        self._channels = {channel.communicator: channel for channel in CHANNELS}

    def clock_ns(self) -> int:
        """The kernel's monotonic clock, which all processes of a machine share."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def pause(self) -> None:
        time.sleep(PAUSE_S)

    def send(self, array: Array, peer: int, tag: int | None = None) -> None:
        self._dist.send(self._tensor(array), dst=peer, group=self._group, **_tagged(tag))

    def recv(self, into: Array, peer: int, tag: int | None = None) -> Array:
        tensor = self._tensor(into)
        self._dist.recv(tensor, src=peer, group=self._group, **_tagged(tag))
        return numpy_of(tensor)

    def isend(self, array: Array, peer: int) -> Handle:
        tensor = self._tensor(array)
        return _Waitable(self._dist.isend(tensor, dst=peer, group=self._group), tensor)

    def irecv(self, into: Array, peer: int) -> Handle:
        tensor = self._tensor(into)
        return _Waitable(self._dist.irecv(tensor, src=peer, group=self._group), tensor)

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
        result = self._library.zeros_like(halves[0])
        self._dist.reduce_scatter(result, halves, group=self._group)
        return numpy_of(result)

    def _post(self, array: Array, edge: str) -> Handle:
        transfer = self._posts.post(self._channels[edge], self._tensor(array))
        return _Waitable(transfer, transfer.buffer)

    @abstractmethod
    def _tensor(self, array: Array) -> Any:
        """A tensor of the framework that owns its memory."""


def numpy_of(tensor: Any) -> Array:
    """The values of a tensor on the CPU."""
    array: Array = tensor.numpy()
    return array


def _tagged(tag: int | None) -> dict[str, int]:
    """The tag as an argument, for the framework to take or to refuse."""
    return {} if tag is None else {"tag": tag}
