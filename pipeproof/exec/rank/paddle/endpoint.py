"""Endpoint process of the doctor for Paddle: ``python -m pipeproof.exec.rank.paddle.endpoint FD DEVICE``.

``exec.rank.group_endpoint`` describes its messages over the connection FD.
"""

# ruff: noqa: D102 - `Endpoint` documents the methods
from __future__ import annotations

import os
import sys
from typing import Any

from pipeproof.diagnostics.units import size_text
from pipeproof.exec.rank.gpu_assignment import num_gpus, shared_gpu
from pipeproof.exec.rank.group_endpoint import CHANNELS, GroupEndpoint, numpy_of, serve
from pipeproof.stages.paddle.runtime import require_kernels, start_paddle
from pipeproof.testing.endpoint_protocol import Array

_GROUP_ID = 2_000
"""Larger than the ids of channels' groups."""


class PaddleEndpoint(GroupEndpoint):
    """Paddle's own calls on a two-rank group, over gloo or NCCL, and the adapter's posts; an ``Endpoint``."""

    def __init__(self, rank: int, device: str) -> None:
        import paddle
        import paddle.distributed as dist

        from pipeproof.exec.rank.paddle import comm, nccl
        from pipeproof.exec.rank.paddle.arrays import PaddleArrays

        on_device = device == "gpu"
        world: Any
        if on_device:
            world = nccl.connect(rank, 2, CHANNELS, (), lambda _: None, computes=False)
            group = dist.new_group([0, 1], backend="nccl")
        else:
            world = comm.connect(rank, CHANNELS, (), lambda _: None)
            group = comm.connected_pairs(rank, 2, [(0, 1)], _GROUP_ID)[0]
        super().__init__(world, PaddleArrays(), paddle, dist, group, on_device=on_device)
        world.barrier()

    def all_gather(self, array: Array) -> list[Array]:
        parts: list[Any] = []
        self._dist.all_gather(parts, self._tensor(array), group=self._group)
        return [numpy_of(part) for part in parts]

    def _require_kernels(self) -> None:
        require_kernels()

    def _device_facts(self) -> dict[str, str]:
        cuda, about = self._library.device.cuda, self._library.device.cuda.get_device_properties()
        return {
            "cuda": str(self._library.version.cuda()),
            "device": f"{self._library.device.get_device()} {about.name}, {size_text(about.total_memory)}",
            "gpus": str(cuda.device_count()),
        }

    def _tensor(self, array: Array) -> Any:
        return self._library.to_tensor(array)


def main(arguments: list[str]) -> None:
    """Serve bodies until the connection closes, which ends the process."""
    (fd, kind), rank = arguments, int(os.environ["PADDLE_TRAINER_ID"])

    def start() -> None:
        if kind == "cpu":
            start_paddle()
            return
        start_paddle(shared_gpu(rank, num_gpus("paddle")), computes=False)

    serve([fd], start, lambda: PaddleEndpoint(rank, kind))


if __name__ == "__main__":
    main(sys.argv[1:])
