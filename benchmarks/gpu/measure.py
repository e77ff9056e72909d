"""Timing of steps: wall time between barriers, of all ranks together.

The same runs on a CPU, to try the code: the times are not a GPU's, and nothing is captured.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from pipeproof.exec.rank.torch.cuda_graph import captured


@dataclass(frozen=True)
class Times:
    """Number of steps: before measuring, in a series, and number of series; the best series counts."""

    warm_up: int = 2
    steps: int = 3
    series: int = 2


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step, and the largest allocation of any rank in GiB, by PyTorch's own count."""

    ms: float
    gib: float

    def ratio_to(self, other: Measured) -> str:
        """The time, and its ratio to another."""
        return f"{self.ms:8.2f} {self.ms / other.ms:6.3f}"


def timed(step: Callable[[], object], device: torch.device, times: Times) -> Measured:
    """All ranks call this with their steps."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(times.warm_up):
        step()
    best = float("inf")
    for _ in range(times.series):
        meet(device)
        start = time.perf_counter()
        for _ in range(times.steps):
            step()
        meet(device)
        best = min(best, time.perf_counter() - start)
    gib = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else 0.0
    most = torch.tensor([gib], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return Measured(best / times.steps * 1e3, float(most))


def captured_anew(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The step as one CUDA graph; on a CPU the step itself."""
    return captured(step, device) if device.type == "cuda" else step


def forget(device: torch.device) -> None:
    """Give back unused memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def meet(device: torch.device) -> None:
    """All ranks begin together, each with an idle device."""
    settle(device)
    dist.barrier()
    settle(device)


def leave() -> NoReturn:
    """End the ranks together; communicators of captured graphs, or of another library, would hold a normal exit up."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def settle(device: torch.device) -> None:
    """Wait for all that a GPU has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
