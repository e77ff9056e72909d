"""Messages between two ranks over NCCL, each a batch of one.

A batch uses the communicator of its process group. For a message outside of a batch PyTorch makes another communicator,
or warns that it is serialized with all other messages of its group, which here are those of one channel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_TAG = 0


def post_send(backend: Any, buffer: torch.Tensor, member: int) -> Any:
    """Send a contiguous buffer to a member of the backend's group; returns PyTorch's handle at once."""
    backend._start_coalescing()  # noqa: SLF001 - `batch_isend_irecv` does this, behind checks that cost more than it
    backend.send([buffer], member, _TAG)
    return backend._end_coalescing()  # noqa: SLF001


def post_recv(backend: Any, buffer: torch.Tensor, member: int) -> Any:
    """Receive into a contiguous buffer from a member of the backend's group; returns PyTorch's handle at once."""
    backend._start_coalescing()  # noqa: SLF001
    backend.recv([buffer], member, _TAG)
    return backend._end_coalescing()  # noqa: SLF001


class BatchedMessages:
    """Replacement of ``torch.distributed`` for ``exec.rank.group_channels`` on one GPU.

    Groups of channels have two members, and ``src`` or ``dst`` is the other one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def isend(self, buffer: torch.Tensor, *, dst: int, group: dist.ProcessGroup) -> Any:
        """Send to the rank ``dst``."""
        return post_send(group._get_backend(self._device), buffer, 1 - group.rank())  # noqa: SLF001

    def irecv(self, buffer: torch.Tensor, *, src: int, group: dist.ProcessGroup) -> Any:
        """Receive from the rank ``src``."""
        return post_recv(group._get_backend(self._device), buffer, 1 - group.rank())  # noqa: SLF001

    def send(self, buffer: torch.Tensor, *, dst: int, group: dist.ProcessGroup) -> None:
        """Send, and have the current stream wait."""
        self.isend(buffer, dst=dst, group=group).wait()

    def recv(self, buffer: torch.Tensor, *, src: int, group: dist.ProcessGroup) -> None:
        """Receive, and have the current stream wait."""
        self.irecv(buffer, src=src, group=group).wait()

    def all_reduce(self, tensor: torch.Tensor, *, group: dist.ProcessGroup) -> None:
        """Add up over the group."""
        dist.all_reduce(tensor, group=group)
