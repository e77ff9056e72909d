"""One of two processes that the doctor probes Paddle's gloo with: ``python -m pipeproof.exec.paddle.endpoint FD``.

What it says over the connection FD stands at ``exec.endpoint_process``.
"""

# ruff: noqa: D102 - what each method of an endpoint does stands once, at `Endpoint`
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from pipeproof.exec.endpoint_process import serve
from pipeproof.exec.group_endpoint import CHANNELS, GroupEndpoint, numpy_of
from pipeproof.stages.paddle.runtime import start_paddle
from pipeproof.testing.endpoint import Array


class PaddleEndpoint(GroupEndpoint):
    """Paddle's own calls on a two-rank gloo group, and the adapter's posts; an ``Endpoint``."""

    def __init__(self, rank: int) -> None:
        import paddle
        import paddle.distributed as dist

        from pipeproof.exec.paddle.comm import connect

        posts = connect(rank, CHANNELS, (), lambda _: None).channels
        super().__init__(rank, paddle, dist, dist.new_group([0, 1], backend="gloo"), posts)
        dist.barrier()

    def all_gather(self, array: Array) -> list[Array]:
        parts: list[Any] = []
        self._dist.all_gather(parts, self._tensor(array), group=self._group)
        return [numpy_of(part) for part in parts]

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        parts: list[Any] = []
        self._dist.alltoall(parts, [self._tensor(array) for array in arrays], group=self._group)
        return [numpy_of(part) for part in parts]

    def partial_send(self, array: Array, peer: int, num_slices: int, index: int) -> None:
        tensor = self._tensor(array)
        self._group.process_group.send_partial(tensor, peer, num_slices, index).wait()

    def partial_recv(self, into: Array, peer: int, num_slices: int, index: int) -> Array:
        tensor = self._tensor(into)
        self._group.process_group.recv_partial(tensor, peer, num_slices, index).wait()
        return numpy_of(tensor)

    def _tensor(self, array: Array) -> Any:
        return self._library.to_tensor(array)


def main(arguments: list[str]) -> None:
    """Serve bodies until the connection closes, which ends the process."""
    serve(arguments, start_paddle, lambda: PaddleEndpoint(int(os.environ["PADDLE_TRAINER_ID"])))


if __name__ == "__main__":
    main(sys.argv[1:])
