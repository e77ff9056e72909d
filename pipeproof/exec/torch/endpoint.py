"""One of two processes that the doctor probes PyTorch's gloo with: ``python -m pipeproof.exec.torch.endpoint FD``.

What it says over the connection FD stands at ``exec.endpoint_process``.
"""

# ruff: noqa: D102 - what each method of an endpoint does stands once, at `Endpoint`
from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeproof.exec.endpoint_process import serve
from pipeproof.schedule.optable import Channel
from pipeproof.testing.endpoint import EDGES, Array, Handle

PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class _Waitable:
    """A transfer under way, and the tensor it uses."""

    transfer: Any
    tensor: Any

    def wait(self) -> Array:
        self.transfer.wait()
        return _numpy(self.tensor)


class TorchEndpoint:
    """PyTorch's own calls on a two-rank gloo group, and the adapter's posts; an ``Endpoint``."""

    def __init__(self, rank: int) -> None:
        import torch
        import torch.distributed as dist

        from pipeproof.exec.torch.comm import connect

        # Untyped, for what is under test is also how PyTorch takes arguments that its signatures do not have.
        self._torch: Any = torch
        self._dist: Any = dist
        self.rank = rank
        self._channels = {name: Channel(name, src, dst) for name, (src, dst) in EDGES.items()}
        device = torch.device("cpu")
        self._posts = connect(rank, 2, device, tuple(self._channels.values()), (), lambda _: None).channels
        self._group = self._dist.new_group([0, 1])
        self._dist.barrier()

    def clock_ns(self) -> int:
        """The kernel's monotonic clock, which all processes of a machine share."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def pause(self) -> None:
        time.sleep(PAUSE_S)

    def send(self, array: Array, peer: int, tag: int | None = None) -> None:
        self._dist.send(self._tensor(array), dst=peer, group=self._group, **_tagged(tag))

    def recv(self, into: Array, peer: int, tag: int | None = None) -> Array:
        tensor = self._tensor(into)
        self._dist.recv(tensor, src=peer, group=self._group, **_tagged(tag))
        return _numpy(tensor)

    def isend(self, array: Array, peer: int) -> Handle:
        tensor = self._tensor(array)
        return _Waitable(self._dist.isend(tensor, dst=peer, group=self._group), tensor)

    def irecv(self, into: Array, peer: int) -> Handle:
        tensor = self._tensor(into)
        return _Waitable(self._dist.irecv(tensor, src=peer, group=self._group), tensor)

    def post_send(self, array: Array, edge: str) -> Handle:
        return self._post(array, edge)

    def post_recv(self, into: Array, edge: str) -> Handle:
        return self._post(into, edge)

    def barrier(self) -> None:
        self._dist.barrier()

    def all_gather(self, array: Array) -> list[Array]:
        tensor = self._tensor(array)
        parts = [self._torch.empty_like(tensor) for _ in range(2)]
        self._dist.all_gather(parts, tensor, group=self._group)
        return [_numpy(part) for part in parts]

    def all_reduce(self, array: Array) -> Array:
        tensor = self._tensor(array)
        self._dist.all_reduce(tensor, group=self._group)
        return _numpy(tensor)

    def broadcast(self, array: Array, root: int) -> Array:
        tensor = self._tensor(array)
        self._dist.broadcast(tensor, src=root, group=self._group)
        return _numpy(tensor)

    def reduce_scatter(self, array: Array) -> Array:
        halves = [self._tensor(half) for half in np.split(array, 2)]
        result = self._torch.zeros_like(halves[0])
        self._dist.reduce_scatter(result, halves, group=self._group)
        return _numpy(result)

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        parts = [self._tensor(array) for array in arrays]
        results = [self._torch.zeros_like(part) for part in parts]
        self._dist.all_to_all(results, parts, group=self._group)
        return [_numpy(result) for result in results]

    def partial_send(self, array: Array, peer: int, num_slices: int, index: int) -> None:
        raise NotImplementedError("PyTorch has no partial send")

    def partial_recv(self, into: Array, peer: int, num_slices: int, index: int) -> Array:
        raise NotImplementedError("PyTorch has no partial receive")

    def _post(self, array: Array, edge: str) -> Handle:
        transfer = self._posts.post(self._channels[edge], self._tensor(array))
        return _Waitable(transfer, transfer.buffer)

    def _tensor(self, array: Array) -> Any:
        return self._torch.from_numpy(np.array(array))


def _tagged(tag: int | None) -> dict[str, int]:
    """The tag as an argument, for PyTorch to take or to refuse."""
    return {} if tag is None else {"tag": tag}


def _numpy(tensor: Any) -> Array:
    array: Array = tensor.numpy()
    return array


def _start() -> None:
    from pipeproof.stages.torch.runtime import start_torch

    start_torch("cpu")


def main(arguments: list[str]) -> None:
    """Serve bodies until the connection closes, which ends the process."""
    serve(arguments, _start, lambda: TorchEndpoint(int(os.environ["RANK"])))


if __name__ == "__main__":
    main(sys.argv[1:])
