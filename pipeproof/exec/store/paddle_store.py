"""Paddle's store as a ``Store``.

Paddle's client cannot ask whether a key exists, and ``get`` blocks without a limit. So each value has a counter next to
it: adding zero to the counter reads it at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import collective
from paddle.distributed.communication.group import Group as PaddleGroup

from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.launcher_table import PADDLE, value_of
from pipeproof.exec.store.rendezvous import LOOPBACK, address_towards, interface_towards, reserved_ports
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.stages.paddle.runtime import quiet_native

_FIRST_POLL_S, _LONGEST_POLL_S = 0.0002, 0.005


class PaddleStore:
    """A part of a store; a ``Store``. Threads of one process may share it: none of its calls waits inside.

    ``client`` is a ``TCPStore`` of Paddle, or has its calls ``set``, ``get`` and ``add``.
    """

    def __init__(self, client: Any, prefix: str, lock: threading.Lock | None = None) -> None:
        self.client, self._prefix, self._lock = client, prefix, lock or threading.Lock()

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
        return self.add(f"{key}#") > 0

    def remove(self, key: str) -> None:
        """Discount a value: ``get`` then waits for the next; only the process that reads a key calls this."""
        self.add(f"{key}#", -1)

    def add(self, key: str, amount: int = 0) -> int:
        """Add to a counter that all ranks share, and return its sum."""
        with self._calls():
            return int(self.client.add(self._prefix + key, amount))

    def part(self, prefix: str) -> PaddleStore:
        """The same store with a prefix of all keys."""
        return PaddleStore(self.client, self._prefix + prefix, self._lock)

    def of_thread(self) -> PaddleStore:
        """The same store, which threads may share."""
        return self

    def reserve_group_ids(self, count: int) -> int:
        """Return the first of some process group ids that are unique in the world."""
        with self._calls():
            return _FIRST_GROUP_ID + int(self.client.add("pipeproof/group ids", count)) - count

    @contextlib.contextmanager
    def _calls(self) -> Iterator[None]:
        """Call Paddle's client, which only one thread may use at a time."""
        with self._lock:
            try:
                yield
            except (RuntimeError, ValueError) as error:
                raise ConnectionError(str(error)) from error


_FIRST_GROUP_ID = 1_000_000
"""Far above the ids from ``paddle.distributed.new_group``."""


class Alone:
    """The client of a job of one rank, for which Paddle has no store."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._values[key] = value

    def get(self, key: str) -> bytes:
        """Return a value."""
        return self._values[key].encode()

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its sum."""
        total = int(self._values.get(key, "0")) + amount
        self._values[key] = str(total)
        return total


def send_at_once(ports: Collection[int]) -> None:
    """Let this process's sockets of stores at some ports send small messages at once.

    Paddle's client and server write a message in several pieces; Linux delays the second piece by 40 ms.
    """
    for end in _network_sockets():
        with contextlib.suppress(OSError):  # one that is not connected
            if end.getsockname()[1] in ports or end.getpeername()[1] in ports:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def refuse_other_hosts(host: str, port: int) -> None:
    """Let this process's store at a port accept only connections from this host, if ``host`` is the loopback address.

    Paddle's store listens at all addresses, and has no option for another. So the listening socket is bound to the
    loopback interface afterwards. A kernel that forbids it (Linux before 5.7 without root) leaves the store as it is.
    """
    if host != LOOPBACK or sys.platform != "linux":
        return
    for end in _network_sockets():
        with contextlib.suppress(OSError):
            if end.getsockname()[1] == port and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                name = (interface_towards(host) or "").encode()
                end.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)


def _network_sockets() -> Iterator[socket.socket]:
    """Copies of this process's IPv4 and IPv6 sockets, each open until the iterator advances."""
    folder = Path("/proc/self/fd")
    for path in [*folder.iterdir()] if folder.is_dir() else ():  # only Linux has such a list
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6):
                        yield end


def process_store(host: str, port: int, num_ranks: int, prefix: str, *, is_first: bool) -> PaddleStore:
    """The store at which Paddle's processes find each other, over a connection of its own; rank 0 serves it.

    Paddle reads the address from its variables, which name this store. On rank 0 it listens at all addresses until all
    ranks are connected, then only at loopback if that is the address (``refuse_other_hosts``).

    Raises:
        ConnectionError: nobody serves the store, or the port is taken.
    """
    if num_ranks == 1:
        return PaddleStore(Alone(), prefix)
    try:
        if is_first:
            with quiet_native():
                paddle.base.core.create_or_get_global_tcp_store()
        client: Any = paddle.base.core.TCPStore(host, port, False, num_ranks)  # noqa: FBT003 - not the master
    except (RuntimeError, ValueError, OSError) as error:
        raise ConnectionError(str(error)) from error
    send_at_once({port})
    refuse_other_hosts(host, port)
    return PaddleStore(client, prefix)


_COUNTS: Counter[str] = Counter()
"""Pipelines of each group that this process has made: all members make them in one order."""


def store_of(ranks: Sequence[int]) -> PaddleStore:
    """A part of the world's store for the next pipeline of some global ranks, over a connection of its own.

    Raises:
        PipelineError: Paddle's distributed environment has no store.
    """
    name = ".".join(map(str, ranks))
    _COUNTS[name] += 1
    prefix = f"pipeproof/{name}/{_COUNTS[name]}/"
    if len(ranks) == 1:
        return PaddleStore(Alone(), prefix)
    host, port = store_address()
    client: Any = paddle.base.core.TCPStore(host, port, False, dist.get_world_size())  # noqa: FBT003 - not the master
    send_at_once({port})
    return PaddleStore(client, prefix)


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


def gloo_pairs(wanted: Sequence[tuple[int, ...]], first_id: int, agreement: Agreement) -> dict[int, PaddleGroup]:
    """Make the groups of pairs that have this rank, by their position in ``wanted``; they have ids from ``first_id``.

    Each has a store of its own. Paddle's gloo writes the addresses of a group's members only under their numbers in the
    group: in a store that several groups share, a member that comes early reads an address of an earlier group, and is
    refused or waits forever.

    Raises:
        PipelineError: a rank cannot connect; every rank raises it.
    """
    index = agreement.rank
    stores: dict[int, Any] = {}
    groups: dict[int, PaddleGroup] = {}

    def serve() -> dict[str, tuple[str, int]]:
        own, addresses = address_towards(*store_address()), dict[str, tuple[str, int]]()
        for position, (first, _) in enumerate(wanted):
            if first == index:
                with reserved_ports(1) as (port,):
                    stores[position] = _store(own, port, serves=True)
                refuse_other_hosts(own, port)
                addresses[str(position)] = own, port
        return addresses

    reports = agreement.gather("group stores", serve)
    addresses = {int(position): (str(host), int(port)) for own in reports for position, (host, port) in own.items()}

    def find() -> None:
        for position, (_, second) in enumerate(wanted):
            if second == index:
                stores[position] = _store(*addresses[position], serves=False)

    agreement.gather("group stores, found", find)

    def make() -> None:
        send_at_once({port for _, port in addresses.values()})
        for position, ranks in enumerate(wanted):  # one order on all ranks: the first remaining pair can be made
            if index in ranks:
                groups[position] = process_group(ranks, index, "gloo", stores[position], first_id + position)

    agreement.gather("groups", make)
    return groups


def process_group(ranks: tuple[int, ...], index: int, backend: str, store: Any, group_id: int) -> PaddleGroup:
    """A process group of some ranks of the pipeline, which no function of ``paddle.distributed`` knows.

    Raises:
        NotImplementedError: Paddle has no groups for the backend.
    """
    member, name = ranks.index(index), f"pipeproof.{group_id}"
    with quiet_native():
        made = collective._new_process_group_impl(  # noqa: SLF001 - the one place that knows the devices' backends
            backend, store, member, len(ranks), name, pg_options=None, group_id=group_id
        )
    if made is None:
        raise NotImplementedError(f"Paddle has no process groups for its backend {backend}")
    return PaddleGroup(member, group_id, list(ranks), pg=made, name=name)


def _store(host: str, port: int, *, serves: bool) -> Any:
    return paddle.base.core.TCPStore(host, port, serves, 1)
