"""How the processes of one job find each other on one machine: ports, environment, rank 0's store."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

QUIET = {"GLOG_minloglevel": "3", "PYTHONWARNINGS": "ignore"}
"""Keeps Paddle's chatter out of what its processes print; its errors stay."""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for candidate in sockets:
            candidate.bind(("127.0.0.1", 0))
        return [candidate.getsockname()[1] for candidate in sockets]


def rank_environment(rank: int, num_ranks: int, ports: list[int]) -> dict[str, str]:
    """The whole environment of one rank's process, by which Paddle finds its peers.

    ``ports[0]`` is rank 0's store, the others are the ranks' endpoints. The
    process finds its modules where this one does, and with ``python -P`` only
    there.
    """
    endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
    return {
        **process_environment(),
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(num_ranks),
        "PADDLE_MASTER": f"127.0.0.1:{ports[0]}",
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "gloo",
    }


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
