"""A rank's step captured as a CUDA graph, communication included, and replayed: no work of the host is left in it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays everything that ``work`` launches on the GPU; ``work`` itself computes nothing now.

    All ranks capture the same step at the same time. ``work`` has run before, so that kernels are loaded and
    connections open; it keeps to shapes and memory that do not change, reads nothing back, and waits for all that it
    posts. Other threads (NCCL's own watchdog) go on as they do.

    Raises:
        RuntimeError: something in ``work`` cannot be captured: it reads a value, or copies from the host.
    """
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay
