"""A second stream of a GPU, whose work waits only for what the rank's own stream had launched at one point."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


class TorchSideStream:
    """A ``SideStream`` of one device; on a CPU there is none.

    One for all pairs of a rank, because the allocator has memory of its own for each stream. Its few small kernels come
    before those of computations that wait for a multiprocessor.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def follow(self) -> None:
        """Let its next work wait for all that the current stream has launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def launching(self) -> AbstractContextManager[object]:
        """Within the context work is launched on it."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor, which was made within the context, until the current stream does not read it."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._stream.device))
