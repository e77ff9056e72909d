"""The key-value store of a pipeline: a part of the one with which Paddle's processes found each other.

Paddle's client has no question whether a key exists, and ``get`` blocks without a limit. So each value has a counter
next to it: adding zero to the counter reads it at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist

from pipeproof.exec.launch.launcher_table import PADDLE, value_of
from pipeproof.exec.train.train_errors import PipelineError

_COUNTS: Counter[str] = Counter()
"""Pipelines of each group that this process has made: all members make them in one order."""
_FIRST_POLL_S, _LONGEST_POLL_S = 0.0002, 0.005


class PaddleStore:
    """A part of a store; an ``agreement.Store``. Threads of one process may share it: no call of it waits inside.

    ``client`` is a ``TCPStore`` of Paddle, or has its calls ``set``, ``get`` and ``add``.
    """

    def __init__(self, client: Any, prefix: str) -> None:
        self.client, self._prefix, self._lock = client, prefix, threading.Lock()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        with self._calls():
            self.client.set(self._prefix + key, value)
            self.client.add(f"{self._prefix}{key}#", 1)

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for a value.

        Raises:
            TimeoutError: nobody wrote it in time.
        """
        ends, pause = time.monotonic() + timeout_s, _FIRST_POLL_S
        while not self.has(key):
            if time.monotonic() > ends:
                raise TimeoutError(key)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_S)
        with self._calls():
            return str(self.client.get(self._prefix + key).decode())

    def has(self, key: str) -> bool:
        """Return True if a value was written."""
        return self.count(f"{key}#") > 0

    def count(self, key: str, amount: int = 0) -> int:
        """Add to a counter that all ranks share, and return its sum."""
        with self._calls():
            return int(self.client.add(self._prefix + key, amount))

    def reserve_group_ids(self, count: int) -> int:
        """Return the first of some ids of process groups that nobody else in the world has."""
        with self._calls():
            return _FIRST_GROUP_ID + int(self.client.add("pipeproof/group ids", count)) - count

    @contextlib.contextmanager
    def _calls(self) -> Iterator[None]:
        """Call Paddle's client, which may be used by one thread at a time.

        Raises:
            ConnectionError: the store has gone.
        """
        with self._lock:
            try:
                yield
            except (RuntimeError, ValueError) as error:
                raise ConnectionError(str(error)) from error


_FIRST_GROUP_ID = 1_000_000
"""Far above the ids that ``paddle.distributed.new_group`` counts."""


class _Alone:
    """The store of a pipeline of one rank."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, "0")) + amount
        self._values[key] = str(total)
        return total


def store_of(ranks: Sequence[int]) -> PaddleStore:
    """A part of the world's store for the next pipeline of some global ranks, over a connection of its own.

    Raises:
        PipelineError: Paddle's distributed environment has no store.
    """
    name = ".".join(map(str, ranks))
    _COUNTS[name] += 1
    prefix = f"pipeproof/{name}/{_COUNTS[name]}/"
    if len(ranks) == 1:
        return PaddleStore(_Alone(), prefix)
    host, port = store_address()
    client: Any = paddle.base.core.TCPStore(host, port, False, dist.get_world_size())  # noqa: FBT003 - not the master
    send_at_once({port})
    return PaddleStore(client, prefix)


def send_at_once(ports: Collection[int]) -> None:
    """Let this process's sockets of stores at some ports send small messages at once.

    Paddle's client and server write a message in several pieces, of which Linux holds the second back for 40 ms.
    """
    folder = Path("/proc/self/fd")
    for path in [*folder.iterdir()] if folder.is_dir() else ():  # elsewhere than on Linux the store is slow
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                _hasten(int(path.name), ports)


def _hasten(descriptor: int, ports: Collection[int]) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as end:
        if end.family not in (socket.AF_INET, socket.AF_INET6):
            return
        if end.getsockname()[1] in ports or end.getpeername()[1] in ports:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def store_address() -> tuple[str, int]:
    """Host and port at which rank 0's store listens, as ``init_parallel_env`` finds them.

    Raises:
        PipelineError: the environment does not have them, or has no valid ones.
    """
    try:
        host, port = value_of(PADDLE.master_host, os.environ), value_of(PADDLE.master_port, os.environ)
    except ValueError as error:
        raise PipelineError(str(error)) from error
    if host is None or port is None:
        raise PipelineError("there is no PADDLE_MASTER: start the script with `python -m paddle.distributed.launch`")
    return host, port


def address_near() -> str:
    """This host's address on its route to the store, where other ranks reach it. Nothing is sent."""
    near = store_address()
    family = socket.getaddrinfo(*near, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(near)
        return str(probe.getsockname()[0])
