"""One of two processes that the doctor probes PyTorch's gloo with: ``python -m pipeproof.exec.torch.endpoint FD``.

What it says over the connection FD stands at ``exec.endpoint_process``.
"""

# ruff: noqa: D102 - what each method of an endpoint does stands once, at `Endpoint`
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeproof.exec.endpoint_process import serve
from pipeproof.exec.group_endpoint import CHANNELS, GroupEndpoint, numpy_of
from pipeproof.testing.endpoint import Array


class TorchEndpoint(GroupEndpoint):
    """PyTorch's own calls on a two-rank gloo group, and the adapter's posts; an ``Endpoint``."""

    def __init__(self, rank: int) -> None:
        import torch
        import torch.distributed as dist

        from pipeproof.exec.torch.comm import connect

        posts = connect(rank, 2, torch.device("cpu"), CHANNELS, (), lambda _: None).channels
        super().__init__(rank, torch, dist, dist.new_group([0, 1]), posts)
        dist.barrier()

    def all_gather(self, array: Array) -> list[Array]:
        tensor = self._tensor(array)
        parts = [self._library.empty_like(tensor) for _ in range(2)]
        self._dist.all_gather(parts, tensor, group=self._group)
        return [numpy_of(part) for part in parts]

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        parts = [self._tensor(array) for array in arrays]
        results = [self._library.zeros_like(part) for part in parts]
        self._dist.all_to_all(results, parts, group=self._group)
        return [numpy_of(result) for result in results]

    def partial_send(self, array: Array, peer: int, num_slices: int, index: int) -> None:
        raise NotImplementedError("PyTorch has no partial send")

    def partial_recv(self, into: Array, peer: int, num_slices: int, index: int) -> Array:
        raise NotImplementedError("PyTorch has no partial receive")

    def _tensor(self, array: Array) -> Any:
        return self._library.from_numpy(np.array(array))


def _start() -> None:
    from pipeproof.stages.torch.runtime import start_torch

    start_torch("cpu")


def main(arguments: list[str]) -> None:
    """Serve bodies until the connection closes, which ends the process."""
    serve(arguments, _start, lambda: TorchEndpoint(int(os.environ["RANK"])))


if __name__ == "__main__":
    main(sys.argv[1:])
