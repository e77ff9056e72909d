"""Endpoint process of the doctor for PyTorch: ``python -m pipeproof.exec.rank.torch.endpoint FD DEVICE``.

``exec.rank.group_endpoint`` describes its messages over the connection FD.
"""

# ruff: noqa: D102 - `Endpoint` documents the methods
from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from pipeproof.diagnostics.units import size_text
from pipeproof.exec.rank.gpu_assignment import num_gpus, shared_gpu
from pipeproof.exec.rank.group_endpoint import CHANNELS, GroupEndpoint, numpy_of, serve
from pipeproof.testing.endpoint_protocol import Array


class TorchEndpoint(GroupEndpoint):
    """PyTorch's own calls on a two-rank group, over gloo or NCCL, and the adapter's posts; an ``Endpoint``."""

    def __init__(self, rank: int, device: Any) -> None:
        import torch
        import torch.distributed as dist

        from pipeproof.exec.rank.torch.arrays import TorchArrays
        from pipeproof.exec.rank.torch.comm import connect

        self._device, on_device = device, device.type == "cuda"
        world = connect(rank, 2, device, CHANNELS, (), lambda _: None)
        super().__init__(world, TorchArrays(device), torch, dist, dist.new_group([0, 1]), on_device=on_device)
        if on_device:  # NCCL connects at first use, which takes as long as many messages
            self.all_gather(np.zeros(1, np.float32))
            self._exchange_tokens()
        dist.barrier()

    def all_gather(self, array: Array) -> list[Array]:
        tensor = self._tensor(array)
        parts = [self._library.empty_like(tensor) for _ in range(2)]
        self._dist.all_gather(parts, tensor, group=self._group)
        return [numpy_of(part) for part in parts]

    def _require_kernels(self) -> None:
        from pipeproof.stages.torch.runtime import require_kernels

        require_kernels(self._device)

    def _device_facts(self) -> dict[str, str]:
        cuda = self._library.cuda
        about = cuda.get_device_properties(self._device)
        return {
            "cuda": str(self._library.version.cuda),
            "nccl": ".".join(map(str, cuda.nccl.version())),
            "device": f"{self._device} {about.name}, {size_text(about.total_memory)}",
            "gpus": str(cuda.device_count()),
        }

    def _exchange_tokens(self) -> None:
        token, peer = np.zeros(1, np.float32), 1 - self.rank
        for sender in (0, 1):
            if self.rank == sender:
                self.send(token, peer)
            else:
                self.recv(token, peer)

    def _tensor(self, array: Array) -> Any:
        return self._library.from_numpy(np.array(array)).to(self._device)


def main(arguments: list[str]) -> None:
    """Serve bodies until the connection closes, which ends the process."""
    (fd, kind), rank = arguments, int(os.environ["RANK"])
    device: Any = None

    def start() -> None:
        nonlocal device
        from pipeproof.stages.torch.runtime import start_torch

        if kind == "cpu":
            device = start_torch(kind)
            return
        device = start_torch(kind, shared_gpu(rank, num_gpus("torch")), computes=False)

    serve([fd], start, lambda: TorchEndpoint(rank, device))


if __name__ == "__main__":
    main(sys.argv[1:])
