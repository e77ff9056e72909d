"""What times a rank's operations with PyTorch, and what it says of them."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeproof.exec.clock import Clock, HostClock, Timing
from pipeproof.exec.framework import World
from pipeproof.exec.torch.comm import TorchChannels, TorchWorld
from pipeproof.exec.torch.device_clock import DeviceChannels, DeviceClock
from pipeproof.exec.torch.watched import WatchedChannels


def timed(world: World) -> tuple[World, Clock]:
    """The world with transfers whose ends are known, and the clock that its operations are dated by.

    ``world`` is what ``connect`` made.
    """
    assert isinstance(world, TorchWorld)
    assert isinstance(world.channels, TorchChannels)
    if world.device.type == "cpu":
        return replace(world, channels=WatchedChannels(world.channels)), HostClock()
    clock = DeviceClock(world.device)
    return replace(world, channels=DeviceChannels(world.channels, clock, world.device)), clock


def timing_of(clock: Clock) -> Timing:
    """What is known at the end of the steps: of memory, the most in the last step."""
    if not isinstance(clock, DeviceClock):
        return Timing()
    return Timing(
        "device",
        clock.accuracy_ns,
        torch.cuda.get_device_name(),
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
    )
