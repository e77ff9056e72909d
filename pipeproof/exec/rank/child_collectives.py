"""Collectives inside an operation: layers issue them while it runs, and the log has them below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pipeproof.exec.rank.framework_protocol import Arrays, Collectives, Tensor
from pipeproof.exec.rank.op_log import Traffic
from pipeproof.schedule.ops import Op, OpKind, child_of
from pipeproof.stages.describe.layer import COUNTS_DTYPE


class Host(Protocol):
    """Rank on which operations run."""

    rank: int

    def enter(self, op_id: int) -> None:
        """Report the operation that is about to run."""
        ...

    def now(self) -> int:
        """Return the time on the clock of its log."""
        ...

    def collectives_over(self, axis: str, stage: int, weight: str = "") -> Collectives:
        """Return the collectives along a mesh axis; along ``pp`` those of the holders of a stage's weight."""
        ...

    def log_collective(self, op: Op, collectives: Collectives, tensor: Tensor, start_ns: int, traffic: Traffic) -> None:
        """Log a collective that just ended; ``traffic`` is empty except for an all-to-all."""
        ...


class ChildCollectives:
    """Collectives of a stage's layers (``StageCollectives``), each logged below its parent operation."""

    def __init__(self, host: Host, arrays: Arrays) -> None:
        self._host, self._arrays = host, arrays
        self._parent: Op | None = None
        self._parent_id = self._index = 0

    def begin(self, op_id: int, op: Op) -> None:
        """Begin a host operation: the following collectives are its children."""
        self._parent, self._parent_id, self._index = op, op_id, 0

    def all_reduce(self, tensor: Tensor, *, label: str, reduction: str = "sum") -> Tensor:
        """Return the reduction over TP ranks, in their order."""
        return self.reduce_over("tp", tensor, reduction)

    def all_gather(self, tensor: Tensor, dim: int, *, label: str, axis: str = "tp") -> Tensor:
        """Return the parts of all TP or context-parallel ranks, joined along ``dim``."""
        return self._issue(OpKind.ALL_GATHER, axis, tensor, lambda c: c.all_gather(tensor, dim))

    def reduce_scatter(self, tensor: Tensor, dim: int, *, label: str, axis: str = "tp") -> Tensor:
        """Return this rank's part along ``dim`` of the sum over TP or context-parallel ranks, in their order."""
        return self._issue(OpKind.REDUCE_SCATTER, axis, tensor, lambda c: c.reduce_scatter(tensor, dim))

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str) -> Tensor:
        """Exchange ``send[m]`` and ``receive[m]`` rows with each EP rank m."""

        def traffic_of(result: Tensor) -> Traffic:
            if self._arrays.dtype(tensor) == COUNTS_DTYPE:  # the rows that the counts announce
                send_rows, receive_rows = self._sums(tensor, send), self._sums(result, receive)
                return tuple(zip(send_rows, receive_rows, strict=True))
            return tuple(zip(send, receive, strict=True))

        return self._issue(
            OpKind.ALL_TO_ALL, "ep", tensor, lambda c: c.exchange(tensor, send, receive), traffic_of=traffic_of
        )

    def sum_scattered(self, axis: str, flat: Tensor) -> Tensor:
        """Return this rank's part of the sum of a flat tensor over an axis, in rank order."""
        return self._issue(OpKind.REDUCE_SCATTER, axis, flat, lambda c: c.reduce_scatter(flat, 0))

    def gathered(self, axis: str, flat: Tensor) -> Tensor:
        """Return the flat tensors of all ranks along an axis, joined in rank order."""
        return self._issue(OpKind.ALL_GATHER, axis, flat, lambda c: c.all_gather(flat, 0))

    def reduce_over(self, axis: str, tensor: Tensor, reduction: str, weight: str = "") -> Tensor:
        """Return the all-reduce over an axis; over ``pp`` among the holders of ``weight``."""
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
        self._host.enter(self._parent_id + self._index)  # children follow their parent in the graph
        collectives = self._host.collectives_over(axis, self._parent.stage, weight)
        start = self._host.now()
        result = act(collectives)
        self._host.log_collective(op, collectives, tensor, start, traffic_of(result))
        return result

    def _sums(self, counts: Tensor, sizes: Sequence[int]) -> list[int]:
        parts = np.split(self._arrays.to_numpy(counts), np.cumsum(sizes)[:-1])
        return [int(part.sum()) for part in parts]
