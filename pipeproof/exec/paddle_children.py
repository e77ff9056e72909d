"""The collectives inside an operation: issued by the layers while it runs, logged below it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import paddle

from pipeproof.exec.paddle_comm import PairwiseCollectives
from pipeproof.schedule.ops import Op, OpKind, child_of


class Host(Protocol):
    """The rank on which operations run."""

    rank: int

    def enter(self, op_id: int) -> None:
        """Say which operation is about to run."""
        ...

    def collectives_over(self, axis: str, stage: int) -> PairwiseCollectives:
        """The rank's collectives along a mesh axis; along ``pp`` those with the other copies of a stage."""
        ...

    def log_collective(self, op: Op, collectives: PairwiseCollectives, tensor: paddle.Tensor, start_ns: int) -> None:
        """Write down a collective that just ended."""
        ...


class ChildCollectives:
    """The collectives that compute issues while it runs: does them, and logs each under its parent.

    This is the ``TensorParallelCollectives`` of the stage's layers.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._parent: Op | None = None
        self._parent_id = self._index = 0

    def begin(self, op_id: int, op: Op) -> None:
        """A host operation starts: collectives from here on are its children."""
        self._parent, self._parent_id, self._index = op, op_id, 0

    def all_reduce(self, tensor: paddle.Tensor, *, label: str, reduction: str = "sum") -> paddle.Tensor:
        """The reduction over TP, in TP rank order."""
        return self.reduce_over("tp", tensor, reduction)

    def all_gather(self, tensor: paddle.Tensor, dim: int, *, label: str) -> paddle.Tensor:
        """Every TP rank's part, joined along ``dim``."""
        return self._issue(OpKind.ALL_GATHER, "tp", tensor, lambda c: paddle.concat(c.gather(tensor), axis=dim))

    def reduce_scatter(self, tensor: paddle.Tensor, dim: int, *, label: str) -> paddle.Tensor:
        """This TP rank's part along ``dim`` of the sum over TP, in TP rank order."""

        def act(collectives: PairwiseCollectives) -> paddle.Tensor:
            total = collectives.reduce(tensor, "sum")
            place = collectives.ranks.index(self._host.rank)
            return paddle.split(total, len(collectives.ranks), axis=dim)[place].contiguous()

        return self._issue(OpKind.REDUCE_SCATTER, "tp", tensor, act)

    def reduce_over(self, axis: str, tensor: paddle.Tensor, reduction: str) -> paddle.Tensor:
        """An all-reduce over any axis."""
        return self._issue(OpKind.ALL_REDUCE, axis, tensor, lambda c: c.reduce(tensor, reduction))

    def _issue(
        self,
        kind: OpKind,
        axis: str,
        tensor: paddle.Tensor,
        act: Callable[[PairwiseCollectives], paddle.Tensor],
    ) -> paddle.Tensor:
        assert self._parent is not None
        op = child_of(self._parent, self._index, kind, axis)
        self._index += 1
        self._host.enter(self._parent_id + self._index)  # children stand right after their parent
        collectives = self._host.collectives_over(axis, self._parent.stage)
        start = time.monotonic_ns()
        result = act(collectives)
        self._host.log_collective(op, collectives, tensor, start)
        return result
