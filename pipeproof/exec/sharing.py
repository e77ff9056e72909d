"""How several processes share a GPU over NCCL: each is told to be a machine of its own. ``exec.gpus`` says why."""

from __future__ import annotations

import os
import socket


def be_a_machine(place: int) -> None:
    """Name this process, the ``place``-th of its machine, as one; before its first communicator."""
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{place}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def taken_gpu(place: int, count: int) -> int:
    """The GPU of one of two processes: one of its own, or, where there is only one, that, shared.

    Raises:
        RuntimeError: there is none.
    """
    if count == 0:
        raise RuntimeError("no GPU is to be seen here")
    if count == 1:
        be_a_machine(place)
    return place % count
