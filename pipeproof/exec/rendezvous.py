"""How the processes of one job find each other on one machine: ports, environment, rank 0's store."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from secrets import SystemRandom

QUIET = {"GLOG_minloglevel": "3", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
"""Keeps the frameworks' chatter out of what its processes print; its errors stay."""


_LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 15_000


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different, from outside the range of which the system gives any.

    A job uses them seconds later. Meanwhile a port of that range may come to be where gloo, in another job, waits for
    one peer: it takes the first that connects for it, so that both jobs fail ("Connection refused").
    """
    with contextlib.ExitStack() as stack:
        return list(islice(_bound_ports(stack), count))


def _bound_ports(stack: contextlib.ExitStack) -> Iterator[int]:
    """Ports to which sockets are bound until ``stack`` ends, without end."""
    try:
        above = int(_LOCAL_PORTS.read_text(encoding="ascii").split()[0])
    except OSError:  # not on Linux
        above = 32_768
    outside = range(_LOWEST_PORT, above)
    for port in chain(SystemRandom().sample(outside, len(outside)), repeat(0)):
        candidate = stack.enter_context(socket.socket())
        with contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            yield candidate.getsockname()[1]


def rank_environment(backend: str, rank: int, num_ranks: int, ports: list[int], device: str = "cpu") -> dict[str, str]:
    """The whole environment of one rank's process, by which its framework finds its peers.

    ``ports[0]`` is rank 0's store, the others are the ranks' endpoints, which
    Paddle wants to know. The process finds its modules where this one does,
    and with ``python -P`` only there.
    """
    if backend == "torch":
        return {
            **process_environment(),
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports[0]),
        }
    endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
    return {
        **process_environment(),
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(num_ranks),
        "PADDLE_MASTER": f"127.0.0.1:{ports[0]}",
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "nccl" if device == "gpu" else "gloo",
    }


def environment_rank() -> int:
    """The rank of a process that has the environment of one, of whatever framework."""
    return int(os.environ["PADDLE_TRAINER_ID"] if "PADDLE_TRAINER_ID" in os.environ else os.environ["RANK"])


def process_environment() -> dict[str, str]:
    """The environment of a quiet child process that imports what this one can."""
    return {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}


def await_store(address: str, timeout_s: float = 60.0) -> None:
    """Wait until rank 0's store listens: Paddle's own client would sleep three seconds after a first refusal.

    Raises:
        RuntimeError: nothing listens at ``address`` (host:port) within ``timeout_s``.
    """
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"no store at {address} within {timeout_s:.0f} s: did rank 0 start?")
