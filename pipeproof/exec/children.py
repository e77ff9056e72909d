"""The collectives inside an operation: issued by the layers while it runs, logged below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pipeproof.exec.framework import Arrays, Collectives, Tensor
from pipeproof.exec.oplog import Traffic
from pipeproof.schedule.ops import Op, OpKind, child_of
from pipeproof.stages.describe.layers import COUNTS_DTYPE


class Host(Protocol):
    """The rank on which operations run."""

    rank: int

    def enter(self, op_id: int) -> None:
        """Say which operation is about to run."""
        ...

    def now(self) -> int:
        """The time on the clock of its log."""
        ...

    def collectives_over(self, axis: str, stage: int, weight: str = "") -> Collectives:
        """The rank's collectives along a mesh axis; along ``pp`` those with the other holders of a stage's weight."""
        ...

    def log_collective(self, op: Op, collectives: Collectives, tensor: Tensor, start_ns: int, traffic: Traffic) -> None:
        """Write down a collective that just ended; ``traffic`` is empty but for an all-to-all."""
        ...


class ChildCollectives:
    """The collectives that compute issues while it runs: does them, and logs each under its parent.

    This is the ``StageCollectives`` of the stage's layers.
    """

    def __init__(self, host: Host, arrays: Arrays) -> None:
        self._host, self._arrays = host, arrays
        self._parent: Op | None = None
        self._parent_id = self._index = 0

    def begin(self, op_id: int, op: Op) -> None:
        """A host operation starts: collectives from here on are its children."""
        self._parent, self._parent_id, self._index = op, op_id, 0

    def all_reduce(self, tensor: Tensor, *, label: str, reduction: str = "sum") -> Tensor:
        """The reduction over TP, in TP rank order."""
        return self.reduce_over("tp", tensor, reduction)

    def all_gather(self, tensor: Tensor, dim: int, *, label: str, axis: str = "tp") -> Tensor:
        """Every rank's part, joined along ``dim``; over TP, or context-parallel ranks."""
        return self._issue(OpKind.ALL_GATHER, axis, tensor, lambda c: c.all_gather(tensor, dim))

    def reduce_scatter(self, tensor: Tensor, dim: int, *, label: str, axis: str = "tp") -> Tensor:
        """This rank's part along ``dim`` of the sum over TP, or context-parallel ranks, in their order."""
        return self._issue(OpKind.REDUCE_SCATTER, axis, tensor, lambda c: c.reduce_scatter(tensor, dim))

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str) -> Tensor:
        """Rows to every EP rank, and from every EP rank, as many as ``send`` and ``receive`` say."""

        def traffic_of(result: Tensor) -> Traffic:
            if self._arrays.dtype(tensor) == COUNTS_DTYPE:  # the rows that it announces
                send_rows, receive_rows = self._sums(tensor, send), self._sums(result, receive)
                return tuple(zip(send_rows, receive_rows, strict=True))
            return tuple(zip(send, receive, strict=True))

        return self._issue(
            OpKind.ALL_TO_ALL, "ep", tensor, lambda c: c.exchange(tensor, send, receive), traffic_of=traffic_of
        )

    def sum_scattered(self, axis: str, flat: Tensor) -> Tensor:
        """This rank's part of the sum of a flat tensor over an axis, in rank order."""
        return self._issue(OpKind.REDUCE_SCATTER, axis, flat, lambda c: c.reduce_scatter(flat, 0))

    def gathered(self, axis: str, flat: Tensor) -> Tensor:
        """The flat tensors of all ranks along an axis, one behind the other."""
        return self._issue(OpKind.ALL_GATHER, axis, flat, lambda c: c.all_gather(flat, 0))

    def reduce_over(self, axis: str, tensor: Tensor, reduction: str, weight: str = "") -> Tensor:
        """An all-reduce over any axis; over ``pp`` among those that hold the weight that is named."""
        return self._issue(OpKind.ALL_REDUCE, axis, tensor, lambda c: c.reduce(tensor, reduction), weight)

    def _issue(
        self,
        kind: OpKind,
        axis: str,
        tensor: Tensor,
        act: Callable[[Collectives], Tensor],
        weight: str = "",
        traffic_of: Callable[[Tensor], Traffic] = lambda _: (),
    ) -> Tensor:
        assert self._parent is not None
        op = child_of(self._parent, self._index, kind, axis)
        self._index += 1
        self._host.enter(self._parent_id + self._index)  # children stand right after their parent
        collectives = self._host.collectives_over(axis, self._parent.stage, weight)
        start = self._host.now()
        result = act(collectives)
        self._host.log_collective(op, collectives, tensor, start, traffic_of(result))
        return result

    def _sums(self, counts: Tensor, sizes: Sequence[int]) -> list[int]:
        parts = np.split(self._arrays.to_numpy(counts), np.cumsum(sizes)[:-1])
        return [int(part.sum()) for part in parts]
