"""Which framework a plan names, started in this process."""

from __future__ import annotations

import os

from pipeproof.exec.framework import Framework
from pipeproof.exec.replay import Replays
from pipeproof.specs.plan import RunSpec


def start_framework(run: RunSpec, *, computes: bool = True) -> Framework:
    """Import and start the framework of a plan, on its device; call it before anything else imports that framework.

    On a machine with several GPUs a process takes the one that ``LOCAL_RANK`` says, without it the first. One that
    does not compute (``computes``) is not asked whether kernels do what they should.

    Raises:
        RuntimeError: the device is not there, or does not compute.
    """
    if run.backend == "torch":
        from pipeproof.exec.torch.framework import TorchFramework

        return TorchFramework(run.device, int(os.environ.get("LOCAL_RANK", "0")), computes=computes)
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()  # before anything else imports paddle: quiet, on the CPU, one thread
    from pipeproof.exec.paddle.framework import PaddleFramework

    return PaddleFramework()


def start_replays(num_ops: int) -> Replays:
    """What captures and replays steps on this process's GPU; PyTorch has been started on it.

    ``num_ops`` are the operations of the graph.
    """
    from pipeproof.exec.torch.replay import TorchReplays

    return TorchReplays(num_ops)
