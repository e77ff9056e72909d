"""Which GPU each process of a machine takes, and how several processes share one.

NCCL refuses two ranks of a communicator on one GPU of one machine. Processes
that each name themselves a machine of their own (``NCCL_HOSTID``) may share: NCCL
then connects them by sockets, so what comes of it is right and slow, and no time
that is taken there means anything.
"""

from __future__ import annotations

import os
from importlib import import_module

from pipeproof.exec.codes import DEVICE_MISSING
from pipeproof.exec.sharing import be_a_machine
from pipeproof.specs.finding import Finding, Severity
from pipeproof.specs.plan import RunSpec
from pipeproof.stages.paddle.runtime import SELECTED_GPUS
from pipeproof.verify.subject import Subject

_NAMES = {"paddle": "Paddle", "torch": "PyTorch"}


def local_rank() -> int:
    """This process's place among those of its machine, 0 for one that no launcher started."""
    for name in ("LOCAL_RANK", "PADDLE_LOCAL_RANK", "PADDLE_TRAINER_ID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def num_gpus(backend: str) -> int:
    """How many GPUs the framework sees; asking starts nothing on them."""
    return int(import_module(f"pipeproof.exec.{backend}.device").num_gpus())


def take_gpu(run: RunSpec, *, share_gpus: bool) -> int:
    """The number of the GPU that this process takes, among those that the framework sees.

    Without ``share_gpus`` it is that of the local rank, or the one that Paddle's launcher names. With it, ranks are
    dealt out over all GPUs, and NCCL is told by the environment to take each process for a machine; so this comes
    before the first communicator.

    Raises:
        RuntimeError: GPUs are to be shared, and there is none.
    """
    place = local_rank()
    if share_gpus:
        be_a_machine(place)
        count = num_gpus(run.backend)
        if count == 0:
            raise RuntimeError(f"{_NAMES[run.backend]} sees no GPU here")
        return place % count
    if run.backend == "paddle" and "PADDLE_LOCAL_RANK" in os.environ and (selected := os.environ.get(SELECTED_GPUS)):
        return int(selected.split(",")[0])
    return place


def missing_gpus(subject: Subject, *, share_gpus: bool) -> Finding | None:
    """Why the plan's processes cannot have the GPUs that they need here; None where they can."""
    run = subject.plan.spec.run
    if run.device != "gpu":
        if not share_gpus:
            return None
        return Finding(
            "PP106",
            Severity.ERROR,
            "--share-gpus: run.device is cpu, and CPUs are shared anyway",
            location=subject.locate("run", "device"),
            help="leave the option out, or use `device: gpu`",
        )
    needed, found = int(os.environ.get("LOCAL_WORLD_SIZE", subject.graph.num_ranks)), num_gpus(run.backend)
    if found >= needed or (share_gpus and found):
        return None
    name = _NAMES[run.backend]
    machine = f"a machine with as many GPUs as ranks and a build of {name} for them"
    share = ", or --share-gpus: several ranks on one GPU, right and slow" if found else ""
    return Finding(
        DEVICE_MISSING.code,
        Severity.ERROR,
        f"run.device is gpu, and {name} sees {found} GPU{'' if found == 1 else 's'} here for {needed} ranks",
        location=subject.locate("run", "device"),
        help=f"use `device: cpu`, or {machine}{share}",
    )


def sharing_line(subject: Subject) -> str:
    """What to say beside the result of processes that share GPUs."""
    ranks, count = subject.graph.num_ranks, num_gpus(subject.plan.spec.run.backend)
    gpus = "1 GPU" if count == 1 else f"{count} GPUs"
    return f"{ranks} ranks share {gpus}, and NCCL connects them by sockets: times mean nothing here"
