"""One of two processes that the doctor probes Paddle's gloo with: ``python -m pipeproof.exec.paddle.endpoint FD``.

What it says over the connection FD stands at ``exec.endpoint_process``.
"""

# ruff: noqa: D102 - what each method of an endpoint does stands once, at `Endpoint`
from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeproof.exec.endpoint_process import serve
from pipeproof.schedule.optable import Channel
from pipeproof.stages.paddle.runtime import start_paddle
from pipeproof.testing.endpoint import EDGES, Array, Handle

PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class _Waitable:
    """A transfer under way: how to wait for it, and the tensor it uses."""

    wait_for: Callable[[], object]
    tensor: Any

    def wait(self) -> Array:
        self.wait_for()
        return _numpy(self.tensor)


class PaddleEndpoint:
    """Paddle's own calls on a two-rank gloo group, and the adapter's posts; an ``Endpoint``."""

    def __init__(self, rank: int) -> None:
        import paddle
        import paddle.distributed as dist

        from pipeproof.exec.paddle.comm import connect

        # Untyped, for what is under test is also how Paddle takes arguments that its signatures do not have.
        self._paddle: Any = paddle
        self._dist: Any = dist
        self.rank = rank
        self._channels = {name: Channel(name, src, dst) for name, (src, dst) in EDGES.items()}
        self._posts = connect(rank, tuple(self._channels.values()), (), lambda _: None).channels
        self._group = self._dist.new_group([0, 1], backend="gloo")
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
        return _Waitable(self._dist.isend(tensor, dst=peer, group=self._group).wait, tensor)

    def irecv(self, into: Array, peer: int) -> Handle:
        tensor = self._tensor(into)
        return _Waitable(self._dist.irecv(tensor, src=peer, group=self._group).wait, tensor)

    def post_send(self, array: Array, edge: str) -> Handle:
        return self._post(array, edge)

    def post_recv(self, into: Array, edge: str) -> Handle:
        return self._post(into, edge)

    def barrier(self) -> None:
        self._dist.barrier()

    def all_gather(self, array: Array) -> list[Array]:
        parts: list[Any] = []
        self._dist.all_gather(parts, self._tensor(array), group=self._group)
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
        result = self._paddle.zeros_like(halves[0])
        self._dist.reduce_scatter(result, halves, group=self._group)
        return _numpy(result)

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        parts: list[Any] = []
        self._dist.alltoall(parts, [self._tensor(array) for array in arrays], group=self._group)
        return [_numpy(part) for part in parts]

    def partial_send(self, array: Array, peer: int, num_slices: int, index: int) -> None:
        tensor = self._tensor(array)
        self._group.process_group.send_partial(tensor, peer, num_slices, index).wait()

    def partial_recv(self, into: Array, peer: int, num_slices: int, index: int) -> Array:
        tensor = self._tensor(into)
        self._group.process_group.recv_partial(tensor, peer, num_slices, index).wait()
        return _numpy(tensor)

    def _post(self, array: Array, edge: str) -> Handle:
        transfer = self._posts.post(self._channels[edge], self._tensor(array))
        return _Waitable(transfer.wait, transfer.buffer)

    def _tensor(self, array: Array) -> Any:
        return self._paddle.to_tensor(array)


def _tagged(tag: int | None) -> dict[str, int]:
    """The tag as an argument, for Paddle to take or to refuse."""
    return {} if tag is None else {"tag": tag}


def _numpy(tensor: Any) -> Array:
    array: Array = tensor.numpy()
    return array


def main(arguments: list[str]) -> None:
    """Serve bodies until the connection closes, which ends the process."""
    serve(arguments, start_paddle, lambda: PaddleEndpoint(int(os.environ["PADDLE_TRAINER_ID"])))


if __name__ == "__main__":
    main(sys.argv[1:])
