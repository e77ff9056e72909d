"""Rendezvous of a job's processes on one machine: ports, environment, rank 0's store."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


def wait_until(condition: Callable[[], bool], limit_s: float = math.inf) -> bool:
    """Return True once a condition holds, False after ``limit_s`` seconds; the condition is read at least once."""
    ends, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


QUIET = {"GLOG_minloglevel": "3", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
"""Variables that silence the frameworks' log output; errors stay."""

LOOPBACK = "127.0.0.1"
"""Address at which the ranks of a run on one host meet."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable that names the network interface at which gloo listens."""


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Yield different ports that the system gives only to a process that names them.

    A job uses its ports seconds later. Until then gloo of another job could get such a port to wait for a peer; it
    takes the first process that connects for its peer, and both jobs fail ("Connection refused"). So sockets stay bound
    to the ports: the system then does not give them to a process that asks for any port. Rank 0's store can still
    listen, because it sets SO_REUSEADDR, and on Linux it may then share a port on which nobody listens. On other
    systems the ports are only free.

    Raises:
        OSError: the loopback interface is missing, or too few of its ports are free.
    """
    _require_loopback()
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            _bind(holder)
        ports = [holder.getsockname()[1] for holder in holders]
        for holder in holders:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if not all(_lets_listen(port) for port in ports):
            stack.close()
        yield ports


def _require_loopback() -> None:
    """Connect to this process: without loopback the ranks of a run would wait for each other until their limit."""
    with socket.socket() as store, socket.socket() as peer:
        _bind(store)
        store.listen()
        peer.settimeout(_CONNECT_S)
        try:
            peer.connect(store.getsockname())
        except OSError as error:
            raise OSError(
                error.errno,
                f"processes cannot connect to each other at {LOOPBACK} ({error.strerror or error}): is the loopback "
                "interface up (`ip link set lo up`), and is it in this network namespace?",
            ) from error


_CONNECT_S = 10.0
"""Longest time for a connection of this process to itself."""


def _bind(holder: socket.socket) -> None:
    """Bind a socket to a free port of the loopback address."""
    try:
        holder.bind((LOOPBACK, 0))
    except OSError as error:
        text = f"no port of {LOOPBACK} is free ({error.strerror}); Linux gives ports of `net.ipv4.ip_local_port_range`"
        raise OSError(error.errno, text) from error


def _lets_listen(port: int) -> bool:
    """Return True if a store could listen on the port now."""
    with socket.socket() as store, contextlib.suppress(OSError):
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", port))
        store.listen()
        return True
    return False


def rank_environment(backend: str, rank: int, num_ranks: int, ports: list[int], device: str = "cpu") -> dict[str, str]:
    """Environment of one rank's process, with which its framework finds its peers.

    ``ports[0]`` is the port of rank 0's store; the others are the ranks' endpoints, which Paddle needs. The process
    finds its modules where this one does, and with ``python -P`` only there.
    """
    variables = framework_variables(backend, rank, num_ranks, (LOOPBACK, ports[0]), device)
    interface = interface_towards(LOOPBACK)
    if interface is not None:  # gloo would listen at the address of the host's name, which other hosts reach
        variables[GLOO_INTERFACE] = interface
    if backend == "torch":
        return {**process_environment(), **variables, "LOCAL_RANK": str(rank)}
    endpoints = [f"{LOOPBACK}:{port}" for port in ports[1:]]
    return {
        **process_environment(),
        **variables,
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
    }


def framework_variables(
    backend: str, rank: int, num_ranks: int, master: tuple[str, int], device: str
) -> dict[str, str]:
    """Variables from which a framework learns its rank, the number of ranks, and where rank 0's store listens.

    Paddle takes the store's address from PyTorch's variables, if the environment has them, rather than from its own.
    """
    host, port = master
    store = {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    if backend == "torch":
        return {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), **store}
    return {
        **store,
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(num_ranks),
        "PADDLE_MASTER": f"{host}:{port}",
        "PADDLE_DISTRI_BACKEND": "nccl" if device == "gpu" else "gloo",
    }


def environment_rank() -> int:
    """Rank of this process by its environment, for either framework."""
    return int(os.environ["PADDLE_TRAINER_ID"] if "PADDLE_TRAINER_ID" in os.environ else os.environ["RANK"])


def process_environment() -> dict[str, str]:
    """Environment of a quiet child process with this process's import path."""
    return {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}


def await_store(address: str, timeout_s: float = 60.0) -> None:
    """Wait until rank 0's store listens; Paddle's client would sleep three seconds after a first refusal.

    An unknown name may become known later, as names in Kubernetes do once the pod runs.

    Raises:
        RuntimeError: nothing listens at ``address`` (host:port) within ``timeout_s``.
    """
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        time.sleep(0.02)
    raise RuntimeError(f"no store at {address} within {timeout_s:.0f} s: did rank 0 start?")


def address_towards(host: str, port: int, family: socket.AddressFamily = socket.AF_UNSPEC) -> str:
    """Address of this host on its route to another, which reaches it there. Nothing is sent.

    Raises:
        OSError: the other host's name is unknown, or there is no route to it.
    """
    family, *_, address = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Network interface of this host on its route to another; None if it is unknown. Nothing is sent."""
    if sys.platform != "linux":
        return None
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        own = socket.inet_aton(address_towards(host, 1, socket.AF_INET))
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24] == own:
                    return name
    return None


def is_loopback_name(host: str) -> bool:
    """Return True if a name other than ``localhost`` has loopback addresses alone, as Debian gives a host its own name.

    Other hosts do not reach this one there.
    """
    with contextlib.suppress(OSError):
        addresses = {str(address[0]) for *_, address in socket.getaddrinfo(host, None)}
        are_loopback = all(ipaddress.ip_address(address).is_loopback for address in addresses)
        return are_loopback and host not in {"localhost", *addresses}
    return False


ANOTHER_HOST = "192.0.2.1"
"""An address that no host has (RFC 5737): the route to it is the route to any other host."""
_SIOCGIFADDR = 0x8915
"""From Linux's bits/ioctls.h: the address of an interface."""
