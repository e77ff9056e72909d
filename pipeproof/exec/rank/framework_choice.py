"""Choice of the plan's framework; the start of the framework, its clocks and its progress in this process."""

from __future__ import annotations

from pipeproof.exec.rank.checkpointing import PaddleWriter
from pipeproof.exec.rank.framework_protocol import Arrays, Framework, World
from pipeproof.exec.rank.gpu_assignment import choose_gpu
from pipeproof.exec.rank.idle_messages import HostPingClock, PingClock
from pipeproof.exec.rank.op_log import Clock, HostClock, Timing
from pipeproof.exec.rank.step_replay import DeviceProgress, Replays
from pipeproof.specs.plan_sections import RunSpec


def start_framework(run: RunSpec, *, computes: bool = True, share_gpus: bool = False) -> Framework:
    """Import and start a plan's framework on its device; call this before anything else imports that framework.

    On a machine with several GPUs a process takes the GPU of its local rank; with ``share_gpus`` several processes may
    share one. Without ``computes`` kernels are not tested.

    Raises:
        RuntimeError: the device is missing or does not compute.
    """
    gpu = choose_gpu(run, share_gpus=share_gpus) if run.device == "gpu" else None
    if run.backend == "torch":
        from pipeproof.exec.rank.torch.framework import TorchFramework

        return TorchFramework(run.device, gpu or 0, computes=computes, deterministic=run.deterministic)
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle(gpu, computes=computes)  # before anything else imports paddle: quiet, on its device, one thread
    from pipeproof.exec.rank.paddle.framework import PaddleFramework

    return PaddleFramework(run.device, computes=computes)


def paddle_writer() -> PaddleWriter:
    """Return the function with which Paddle, already started in this process, writes a rank's part of a state."""
    from pipeproof.exec.rank.paddle.framework import write_flex_part

    return write_flex_part


def timed(run: RunSpec, world: World) -> tuple[World, Clock]:
    """Return the world with timed transfers, and the clock of its operations."""
    if run.backend == "torch":
        from pipeproof.exec.rank.torch.op_timing import timed as timed_torch

        return timed_torch(world)
    return world, HostClock()


def timing_of(run: RunSpec, clock: Clock) -> Timing:
    """Return the clock and memory peaks of a rank at the end of its steps."""
    if run.backend == "torch":
        from pipeproof.exec.rank.torch.op_timing import timing_of as timing_of_torch

        return timing_of_torch(clock)
    return Timing()


def start_ping_clock(run: RunSpec, arrays: Arrays) -> PingClock:
    """Return the clock of round trips in this process, whose framework has been started."""
    if run.backend == "torch" and run.device == "gpu":
        from pipeproof.exec.rank.torch.op_timing import CudaPingClock

        return CudaPingClock()
    if run.device == "gpu":
        import paddle

        return HostPingClock(paddle.device.cuda.synchronize)
    return HostPingClock(arrays.synchronize)


def start_progress(run: RunSpec) -> DeviceProgress | None:
    """Return the progress of this process's GPU if its host runs ahead of it (PyTorch on a GPU, already started)."""
    if run.device == "cpu" or run.backend != "torch":
        return None
    from pipeproof.exec.rank.torch.cuda_graph import TorchProgress

    return TorchProgress()


def start_replays() -> Replays:
    """Return the capture and replay of steps on this process's GPU, on which PyTorch has been started."""
    from pipeproof.exec.rank.torch.cuda_graph import TorchReplays

    return TorchReplays()
