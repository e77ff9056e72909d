"""Sharing of a GPU by several processes over NCCL, see ``exec.launch.gpu_assignment``."""

from __future__ import annotations

import os
import socket


def set_own_host_id(local_rank: int) -> None:
    """Make NCCL take this process for a machine of its own; call before the first communicator."""
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{local_rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def shared_gpu(local_rank: int, num_gpus: int, num_processes: int = 2) -> int:
    """Return the GPU of one of a machine's processes, which share GPUs where there are fewer than processes.

    Raises:
        RuntimeError: the machine has no visible GPU.
    """
    if num_gpus == 0:
        raise RuntimeError("no GPU is visible here")
    if num_gpus < num_processes:
        set_own_host_id(local_rank)
    return local_rank % num_gpus
