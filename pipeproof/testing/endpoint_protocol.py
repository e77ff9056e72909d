"""Protocol of a backend for the conformance suite: two endpoints, and a world that runs code on both.

No inheritance is needed: a class with these methods is an endpoint. Arrays are
numpy's; every call that fills an array returns its content, so a backend with
its own tensors only has to convert. A call that the backend does not support
raises any exception.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

EDGES = {"forward": (0, 1), "backward": (1, 0), "second": (0, 1)}
"""Directed edges of posts: name to (sender, receiver). ``second`` is parallel to ``forward``."""


class Handle(Protocol):
    """A transfer in flight."""

    def wait(self) -> Array:
        """Block until the transfer is done; return the content of its array, or raise its error."""


class Endpoint(Protocol):
    """One of two ranks of a backend, numbered 0 and 1."""

    @property
    def rank(self) -> int:
        """This rank."""

    def clock_ns(self) -> int:
        """Time of a monotonic clock that both ranks share, in nanoseconds."""

    def pause(self) -> None:
        """Delay this rank until the other is visibly ahead (a tenth of a second is enough)."""

    def send(self, array: Array, peer: int) -> None:
        """The backend's blocking send."""

    def recv(self, into: Array, peer: int) -> Array:
        """The backend's blocking receive into a buffer that holds ``into`` before."""

    def post_send(self, array: Array, edge: str) -> Handle:
        """Post a send like a plan's SEND, over one of ``EDGES``."""

    def post_recv(self, into: Array, edge: str) -> Handle:
        """Post a receive like a plan's RECV, over one of ``EDGES``."""

    def barrier(self) -> None:
        """The backend's barrier over both ranks."""

    def all_gather(self, array: Array) -> list[Array]:
        """Return the inputs of both ranks, in rank order."""


Body = Callable[[Endpoint], Any]
"""Body of a probe on each rank: a module-level function, which a process can import by name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a body on one rank.

    ``value`` is its return value; ``detail`` names the exception, or the signal
    or status that ended the rank.
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
"""Creates a new world; leaving the context ends all its ranks, also blocked and dead ones."""


def array(*values: float, dtype: str = "float32") -> Array:
    """A one-dimensional array."""
    return np.array(values, dtype=dtype)
