"""What the conformance suite asks of a backend: two endpoints, and a world that runs code on both.

Nothing here needs inheriting: a class with these methods is an endpoint.
Arrays are numpy's; every call that fills an array returns what it then holds,
so that a backend with tensors of its own only has to convert. A call that the
backend lacks raises, whatever the exception.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

EDGES = {"forward": (0, 1), "backward": (1, 0), "second": (0, 1)}
"""The directed edges that posts go over: name to (sender, receiver). ``second`` runs beside ``forward``."""


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> Array:
        """Block until it is done; returns what its array holds then, or raises what the transfer raised."""


class Endpoint(Protocol):
    """One of two ranks of a backend, numbered 0 and 1."""

    @property
    def rank(self) -> int:
        """This rank."""

    def clock_ns(self) -> int:
        """A monotonic clock that both ranks share, in nanoseconds."""

    def pause(self) -> None:
        """Hold this rank back, so long that the other is visibly ahead (a tenth of a second will do)."""

    def send(self, array: Array, peer: int, tag: int | None = None) -> None:
        """The backend's blocking send; raises if a tag is given and the backend takes none."""

    def recv(self, into: Array, peer: int, tag: int | None = None) -> Array:
        """The backend's blocking receive into a buffer that holds ``into`` before."""

    def isend(self, array: Array, peer: int) -> Handle:
        """The backend's asynchronous send, as far as it is one."""

    def irecv(self, into: Array, peer: int) -> Handle:
        """The backend's asynchronous receive, as far as it is one."""

    def post_send(self, array: Array, edge: str) -> Handle:
        """Post a send as a plan's SEND does, over one of ``EDGES``."""

    def post_recv(self, into: Array, edge: str) -> Handle:
        """Post a receive as a plan's RECV does, over one of ``EDGES``."""

    def barrier(self) -> None:
        """The backend's barrier over both ranks."""

    def all_gather(self, array: Array) -> list[Array]:
        """What both ranks put in, in rank order."""

    def all_reduce(self, array: Array) -> Array:
        """The sum of what both ranks put in."""

    def broadcast(self, array: Array, root: int) -> Array:
        """What ``root`` put in."""

    def reduce_scatter(self, array: Array) -> Array:
        """This rank's half of the sum of what both ranks put in."""

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        """What each rank put in for this one, in rank order; ``arrays[r]`` goes to rank r."""

    def partial_send(self, array: Array, peer: int, num_slices: int, index: int) -> None:
        """Send slice ``index`` of ``num_slices`` equal ones of the array, by the backend's own call."""

    def partial_recv(self, into: Array, peer: int, num_slices: int, index: int) -> Array:
        """Receive slice ``index`` of ``num_slices`` into a buffer that holds ``into`` before."""


Body = Callable[[Endpoint], Any]
"""What a probe does on each rank: a module-level function, so that it can travel to a process by name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a body on one rank.

    ``value`` is what it returned; ``detail`` says what was raised, or which
    signal or status ended the rank.
    """

    kind: Literal["returned", "raised", "blocked", "died"]
    value: Any = None
    detail: str = ""


class World(Protocol):
    """Two connected ranks."""

    def run(self, body: Body, timeout_s: float) -> tuple[Outcome, Outcome]:
        """Run ``body`` on both ranks at once; a rank not done in time is ``blocked``.

        After an outcome that is ``blocked`` or ``died`` the world is not used again.
        """


MakeWorld = Callable[[], AbstractContextManager[World]]
"""Makes a fresh world; leaving the context ends whatever is left of it, blocked and dead ranks included."""


def array(*values: float, dtype: str = "float32") -> Array:
    """A one-dimensional array."""
    return np.array(values, dtype=dtype)
