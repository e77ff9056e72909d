"""PyTorch's stores as a ``Store``, and a job's store at the address that its launcher names."""

from __future__ import annotations

import errno
import functools
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from pipeproof.exec.store.rendezvous import is_loopback_name

CONNECT_TIMEOUT = timedelta(minutes=30)
"""Timeout of the backend. A watchdog's is shorter and knows the operation."""
_MEET_TIMEOUT = timedelta(minutes=2)
"""Longest wait for the process that serves a store: if it has ended, nobody comes."""


class TorchStore:
    """A ``torch.distributed`` store; a ``Store``."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        with _network_errors():
            self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> str:
        """Wait for a value.

        Raises:
            TimeoutError: nobody wrote it in time.
        """
        try:
            with _network_errors():
                self._store.wait([key], timedelta(seconds=timeout_s))
                return str(self._store.get(key).decode())
        except dist.DistStoreError as error:
            raise TimeoutError(str(error)) from None

    def has(self, key: str) -> bool:
        """Return True if a value was written."""
        with _network_errors():
            return bool(self._store.check([key]))

    def remove(self, key: str) -> None:
        """Remove a value: ``get`` then waits for the next."""
        with _network_errors():
            self._store.delete_key(key)

    def add(self, key: str, amount: int = 0) -> int:
        """Add to a counter that all ranks share, and return its sum."""
        with _network_errors():
            return int(self._store.add(key, amount))

    def of_thread(self) -> TorchStore:
        """The same store through another connection: a wait blocks its connection for other threads."""
        usual = self._store.timeout
        self._store.set_timeout(_MEET_TIMEOUT)  # the connection inherits it, and is tried again until then
        try:
            with _network_errors():
                made = self._store.clone()
        finally:
            self._store.set_timeout(usual)
        made.set_timeout(usual)
        return TorchStore(made)

    def part(self, prefix: str) -> TorchStore:
        """The same store with a prefix of all keys."""
        return TorchStore(dist.PrefixStore(prefix, self._store))

    @property
    def of_groups(self) -> dist.Store:
        """The store as PyTorch has it, for process groups."""
        return self._store


@contextmanager
def _network_errors() -> Iterator[None]:
    """Raise ConnectionError where the process that holds the store has ended."""
    try:
        yield
    except (dist.DistNetworkError, socket.gaierror) as error:
        raise ConnectionError(str(error)) from None


@functools.cache
def process_store() -> TorchStore:
    """The store of this process's job, by ``MASTER_ADDR``, ``MASTER_PORT`` and ``RANK``; made once.

    Rank 0 serves it unless torchrun's agent does. It listens only at the named address. It listens at all addresses if
    the named address belongs to no interface of this host (behind translated addresses), or if it is this host's name
    at its loopback interface while other hosts have ranks.

    Raises:
        ConnectionError: nobody serves the store in time, or the port is taken.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # one for each connection of the store and of gloo
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the soft limit is often 1,024
    has_other_hosts = os.environ.get("LOCAL_WORLD_SIZE") not in (None, os.environ.get("WORLD_SIZE"))
    with _network_errors():
        end = _listening(host, port, has_other_hosts=has_other_hosts).detach() if serves else None
        made = dist.TCPStore(
            host, port, is_master=serves, timeout=_MEET_TIMEOUT, wait_for_workers=False, master_listen_fd=end
        )
        made.set_timeout(CONNECT_TIMEOUT)
    return TorchStore(made)


def _listening(host: str, port: int, *, has_other_hosts: bool) -> socket.socket:
    """A socket that listens at the address; PyTorch alone would listen at all addresses of the host."""
    address_infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    is_unreachable = has_other_hosts and is_loopback_name(host)
    addresses = [] if is_unreachable else [(family, address) for family, _, _, _, address in address_infos]
    for family, address in [*addresses, (socket.AF_INET, ("", port))]:
        end = socket.socket(family, socket.SOCK_STREAM)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            end.bind(address)
            end.listen(socket.SOMAXCONN)
        except OSError as error:
            end.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise ConnectionError(f"rank 0 cannot serve the store at {host}:{port}: {error.strerror}") from None
        else:
            return end
    raise ConnectionError(f"{host} has no address")
