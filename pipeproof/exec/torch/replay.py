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
        RuntimeError: something in ``work`` cannot be captured: it reads a value, or allocates on the host.
    """
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


class TorchReplays:
    """Captures on the current GPU, and how far it has come; an ``exec.replay.Replays``.

    The number of the operation stands in the host's memory, where the GPU writes it as it comes by.
    """

    def __init__(self, num_ops: int) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._numbers = torch.arange(num_ops, device=self._device)
        self._word = torch.full([1], -1, dtype=torch.int64, pin_memory=True)
        self._seen = self._word.numpy()

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """As ``captured``."""
        return captured(work, self._device)

    def write(self, op_id: int) -> None:
        """A copy of eight bytes, which is captured like any other."""
        self._word.copy_(self._numbers[op_id : op_id + 1], non_blocking=True)

    def read(self) -> int:
        """As it stands; the GPU may be further by now."""
        return int(self._seen[0])
