"""The TCP connections of gloo backends, so that a rank that waits in gloo can be woken.

``ProcessGroupGloo.abort`` wakes nobody (PyTorch 2.13): who waits for a message waits until its time limit. Shutting
the connection down ends the wait at once, with an error, on both of its ends.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection by its descriptor. The addresses show whether the descriptor has since been used for another."""

    descriptor: int
    addresses: tuple[Any, Any]

    @property
    def local_address(self) -> str:
        """The host part of this end's address."""
        return str(self.addresses[0][0])

    def shut_down(self) -> None:
        """End the connection for both of its ends, unless it has ended."""
        if _addresses(self.descriptor) == self.addresses:
            with socket.socket(fileno=os.dup(self.descriptor)) as end:
                end.shutdown(socket.SHUT_RDWR)


def connections_of(make: Callable[[], _T]) -> tuple[_T, tuple[Connection, ...]]:
    """The result of a call, and the connections that the process has since then."""
    before = _connections()
    made = make()
    return made, tuple(each for each in _connections() if each not in before)


def _connections() -> list[Connection]:
    found = ((int(name), _addresses(int(name))) for name in os.listdir("/dev/fd"))  # noqa: PTH208 - no Path per file
    return [Connection(descriptor, addresses) for descriptor, addresses in found if addresses is not None]


def _addresses(descriptor: int) -> tuple[Any, Any] | None:
    """Both addresses of a connected socket; None for any other descriptor."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):  # else a failing socket() would leave the copy open
            return None
        with socket.socket(fileno=os.dup(descriptor)) as end:
            return end.getsockname(), end.getpeername()
    except OSError:  # closed meanwhile, or one that listens
        return None
