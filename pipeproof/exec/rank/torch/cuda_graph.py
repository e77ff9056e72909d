"""A rank's step captured as a CUDA graph, with its communication, and replayed; progress of the GPU in a step."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return a function that replays everything that ``work`` launches on the GPU; nothing is computed now.

    All ranks capture the same step at the same time. ``work`` has run before, so that kernels are loaded and
    connections are open; its shapes and memory do not change, it reads no values, and it waits for all its transfers.
    Other threads (NCCL's watchdog) are not affected.

    Raises:
        RuntimeError: ``work`` reads a value or allocates on the host, which cannot be captured.
    """
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device), capture_error_mode="thread_local"):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


class TorchReplays:
    """Capture on the current GPU, and its progress; an ``exec.rank.step_replay.Replays``.

    The GPU writes the number of each operation that it reaches to the host's memory.
    """

    def __init__(self, num_ops: int) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._numbers = torch.arange(num_ops, device=self._device)
        self._word = torch.full([1], -1, dtype=torch.int64, pin_memory=True)
        self._seen = self._word.numpy()

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of ``work``, see ``captured``."""
        return captured(work, self._device)

    def write(self, op_id: int) -> None:
        """Launch a copy of eight bytes, which is captured like other work."""
        self._word.copy_(self._numbers[op_id : op_id + 1], non_blocking=True)

    def read(self) -> int:
        """Return the last number; the GPU may already be further."""
        return int(self._seen[0])


class TorchProgress:
    """Progress of the current GPU among ``num_ops`` operations; an ``exec.rank.step_replay.DeviceProgress``.

    The compute stream copies the pair (step, operation), sixteen bytes, to pinned memory of the host.
    """

    def __init__(self, num_ops: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._pairs = torch.full([num_ops, 2], -1, dtype=torch.int64, device=device)
        self._pairs[:, 1] = torch.arange(num_ops, device=device)
        self._word = torch.full([2], -1, dtype=torch.int64, pin_memory=True)
        self._seen = self._word.numpy()

    def begin(self, step: int) -> None:
        """Set the step, after the writes of the previous step."""
        self._pairs[:, 0].fill_(step)

    def write(self, op_id: int) -> None:
        """Launch the copy; the host does not wait."""
        self._word.copy_(self._pairs[op_id], non_blocking=True)

    def read(self) -> tuple[int, int]:
        """Return the last pair; the GPU may already be further."""
        return int(self._seen[0]), int(self._seen[1])
