"""Assignment of a machine's GPUs to its processes, and sharing of one GPU by several processes.

NCCL refuses two ranks of a communicator on one GPU of one machine. Processes with different host ids (``NCCL_HOSTID``)
may share a GPU: NCCL then connects them by sockets, so results are correct, but slow, and times mean nothing.
"""

from __future__ import annotations

import os
import socket

from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.exec.store.launcher_table import PADDLE, TORCHRUN, value_of
from pipeproof.exec.store.run_codes import DEVICE_MISSING
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.stages.paddle.runtime import SELECTED_GPUS, start_paddle
from pipeproof.verify.subject import Subject


def set_own_host_id(local_rank: int) -> None:
    """Make NCCL treat this process as a separate machine; call before the first communicator."""
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{local_rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def shared_gpu(local_rank: int, num_gpus: int, num_processes: int = 2) -> int:
    """Return the GPU of one of a machine's processes; they share GPUs if there are fewer GPUs than processes.

    Raises:
        RuntimeError: the machine has no visible GPU.
    """
    if num_gpus == 0:
        raise RuntimeError("no GPU is visible here")
    if num_gpus < num_processes:
        set_own_host_id(local_rank)
    return local_rank % num_gpus


_NAMES = {"paddle": "Paddle", "torch": "PyTorch"}


def local_rank() -> int:
    """Rank of this process among the processes of its machine, 0 if no launcher started it."""
    return value_of(TORCHRUN.local_rank + PADDLE.local_rank, os.environ) or 0


def num_gpus(backend: str) -> int:
    """Number of GPUs that the framework sees; the query starts nothing on them."""
    if backend == "torch":
        import torch

        return int(torch.cuda.device_count())
    start_paddle()  # the first import must be quiet and on one thread
    import paddle

    return int(paddle.device.cuda.device_count())


def choose_gpu(run: RunSpec, *, share_gpus: bool) -> int:
    """Return the index of this process's GPU among those that the framework sees.

    Without ``share_gpus`` it is the local rank, or the index that Paddle's launcher names. With it, ranks are assigned
    to the GPUs round-robin, and the environment makes NCCL treat each process as a machine; call this before the first
    communicator.

    Raises:
        RuntimeError: GPUs are to be shared, and there is none.
    """
    index = local_rank()
    if share_gpus:
        set_own_host_id(index)
        count = num_gpus(run.backend)
        if count == 0:
            raise RuntimeError(f"{_NAMES[run.backend]} sees no GPU here")
        return index % count
    if run.backend == "paddle" and "PADDLE_LOCAL_RANK" in os.environ and (selected := os.environ.get(SELECTED_GPUS)):
        return int(selected.split(",")[0])
    return index


def missing_gpus(subject: Subject, *, share_gpus: bool) -> Finding | None:
    """Return a finding if this machine has too few GPUs for the plan's processes; else None."""
    run = subject.plan.spec.run
    if run.device != "gpu":
        if not share_gpus:
            return None
        return Finding(
            "PP106",
            Severity.ERROR,
            "--share-gpus: run.device is cpu, and CPUs are always shared",
            location=subject.locate("run", "device"),
            help="leave the option out, or use `device: gpu`",
        )
    local_ranks = value_of(TORCHRUN.local_world_size + PADDLE.local_world_size, os.environ)
    needed, count = local_ranks or subject.graph.num_ranks, num_gpus(run.backend)
    if count >= needed or (share_gpus and count):
        return None
    name = _NAMES[run.backend]
    machine = f"a machine with as many GPUs as ranks and a build of {name} for them"
    share = ", or --share-gpus: several ranks on one GPU, correct but slow" if count else ""
    return DEVICE_MISSING.finding(
        f"run.device is gpu, and {name} sees {count} GPU{'' if count == 1 else 's'} here for {needed} ranks",
        location=subject.locate("run", "device"),
        help=f"use `device: cpu`, or {machine}{share}",
    )


def shared_gpus_text(subject: Subject) -> str:
    """Remark on the result of processes that share GPUs."""
    ranks, count = subject.graph.num_ranks, num_gpus(subject.plan.spec.run.backend)
    gpus = "1 GPU" if count == 1 else f"{count} GPUs"
    return f"{ranks} ranks share {gpus}, and NCCL connects them by sockets: times mean nothing here"
