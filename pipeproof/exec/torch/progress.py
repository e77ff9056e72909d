"""Where a GPU is, written by itself: an ``exec.progress.DeviceProgress``."""

from __future__ import annotations

import torch


class TorchProgress:
    """The current GPU's place among ``num_ops`` operations: a copy of sixteen bytes for each, on the compute stream.

    The pair (step, operation) stands in the host's memory, pinned, where the GPU writes it as it comes by.
    """

    def __init__(self, num_ops: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._pairs = torch.full([num_ops, 2], -1, dtype=torch.int64, device=device)
        self._pairs[:, 1] = torch.arange(num_ops, device=device)
        self._word = torch.full([2], -1, dtype=torch.int64, pin_memory=True)
        self._seen = self._word.numpy()

    def begin(self, step: int) -> None:
        """Behind what the step before has written."""
        self._pairs[:, 0].fill_(step)

    def write(self, op_id: int) -> None:
        """Asynchronous; the host goes on."""
        self._word.copy_(self._pairs[op_id], non_blocking=True)

    def read(self) -> tuple[int, int]:
        """As it stands; the GPU may be further by now."""
        return int(self._seen[0]), int(self._seen[1])
