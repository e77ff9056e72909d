"""Which framework a plan names, started in this process."""

from __future__ import annotations

from pipeproof.exec.clock import Clock, HostClock, Timing
from pipeproof.exec.framework import Arrays, Framework, World
from pipeproof.exec.gpus import take_gpu
from pipeproof.exec.kept import WriteByPaddle
from pipeproof.exec.pings import HostPingClock, PingClock
from pipeproof.exec.progress import DeviceProgress
from pipeproof.exec.replay import Replays
from pipeproof.specs.plan import RunSpec


def start_framework(run: RunSpec, *, computes: bool = True, share_gpus: bool = False) -> Framework:
    """Import and start the framework of a plan, on its device; call it before anything else imports that framework.

    On a machine with several GPUs a process takes that of its place among the machine's processes, or, where they
    share (``share_gpus``), its share of one. One that does not compute (``computes``) is not asked whether kernels do
    what they should.

    Raises:
        RuntimeError: the device is not there, or does not compute.
    """
    gpu = take_gpu(run, share_gpus=share_gpus) if run.device == "gpu" else None
    if run.backend == "torch":
        from pipeproof.exec.torch.framework import TorchFramework

        return TorchFramework(run.device, gpu or 0, computes=computes)
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle(gpu, computes=computes)  # before anything else imports paddle: quiet, on its device, one thread
    from pipeproof.exec.paddle.framework import PaddleFramework

    return PaddleFramework(run.device, computes=computes)


def paddle_writer() -> WriteByPaddle:
    """What has Paddle, which has been started in this process, write a rank's part of a state."""
    from pipeproof.exec.paddle.flex import write_flex_part

    return write_flex_part


def timed(run: RunSpec, world: World) -> tuple[World, Clock]:
    """A world whose transfers have the time of their end, and the clock that dates what is carried out in it."""
    if run.backend == "torch":
        from pipeproof.exec.torch.timing import timed as timed_torch

        return timed_torch(world)
    return world, HostClock()


def timing_of(run: RunSpec, clock: Clock) -> Timing:
    """What there is to say of a rank's times at the end of its steps."""
    if run.backend == "torch":
        from pipeproof.exec.torch.timing import timing_of as timing_of_torch

        return timing_of_torch(clock)
    return Timing()


def start_ping_clock(run: RunSpec, arrays: Arrays) -> PingClock:
    """What times round trips in this process, whose framework has been started."""
    if run.backend == "torch" and run.device == "gpu":
        from pipeproof.exec.torch.ping_clock import CudaPingClock

        return CudaPingClock()
    if run.device == "gpu":
        import paddle

        return HostPingClock(paddle.device.cuda.synchronize)
    return HostPingClock(arrays.synchronize)


def start_progress(run: RunSpec, num_ops: int) -> DeviceProgress | None:
    """What tells how far this process's GPU has come, where its host runs ahead of one; PyTorch has been started on it.

    ``num_ops`` are the operations of the graph.
    """
    if run.device == "cpu" or run.backend != "torch":
        return None
    from pipeproof.exec.torch.progress import TorchProgress

    return TorchProgress(num_ops)


def start_replays(num_ops: int) -> Replays:
    """What captures and replays steps on this process's GPU; PyTorch has been started on it.

    ``num_ops`` are the operations of the graph.
    """
    from pipeproof.exec.torch.replay import TorchReplays

    return TorchReplays(num_ops)
