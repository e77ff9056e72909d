"""Collectives inside an operation: layers issue them while it runs, and the log has them below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pipeproof.exec.rank.framework_protocol import Arrays, Collectives, Tensor
from pipeproof.exec.rank.op_log import HOST_QUEUE, LogEntry, Traffic
from pipeproof.schedule.ops import Op, OpKind, child_of
from pipeproof.stages.common.experts import Used
from pipeproof.stages.describe.layer import COUNTS_DTYPE


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that a layer asks for: ``act`` calls it on a group's collectives, asynchronous or not."""

    kind: OpKind
    axis: str
    tensor: Tensor
    act: Callable[[Any], Any]
    weight: str = ""
    traffic: Traffic = ()
    """Rows sent to and received from each member, of an all-to-all of tokens."""
    traffic_of: Callable[[Tensor], Traffic] | None = None
    """For an all-to-all of counts, from its result, at the end of the step: the rows that the counts announce."""


class Issuer(Protocol):
    """Issuer of the collectives of the operations that are under way."""

    def issue(self, calls: Sequence[Call]) -> list[Tensor]:
        """Issue collectives one after the other; return their results."""

    def announce(self, call: Call, use: Callable[[Tensor], Used]) -> Callable[[], Used]:
        """Issue a collective; return a function that returns ``use`` of its result."""


class Host(Protocol):
    """Rank on which operations run."""

    rank: int

    def enter(self, op_id: int) -> None:
        """Report the operation that is about to run."""

    def now(self) -> int:
        """Return the time on the clock of its log."""

    def collectives_over(self, axis: str, stage: int, weight: str = "") -> Collectives:
        """Return the collectives along a mesh axis; along ``pp`` they connect the holders of a stage's weight."""

    def begin_entry(self, queue: str, text: str) -> LogEntry:
        """Append an entry that starts now to its log."""

    def fill_in(self, entry: LogEntry, collectives: Collectives, call: Call, result: Tensor) -> None:
        """Complete the entry of a collective that has ended."""


class ChildCollectives:
    """Collectives of a stage's layers (``StageCollectives``), each logged below its parent operation."""

    def __init__(self, host: Host, arrays: Arrays) -> None:
        self._host, self._arrays = host, arrays
        self._parent: Op | None = None
        self._parent_id = self._index = 0
        self._issuer: Issuer | None = None
        self._texts: dict[tuple[int, OpKind, str], str] = {}

    def begin(self, op_id: int, op: Op) -> None:
        """Begin a host operation: the following collectives are its children."""
        self._parent, self._parent_id, self._index = op, op_id, 0

    @contextmanager
    def issued_by(self, issuer: Issuer) -> Iterator[None]:
        """Within the context another issuer, which knows their parents, issues the collectives."""
        self._issuer = issuer
        try:
            yield
        finally:
            self._issuer = None

    def all_reduce(self, tensor: Tensor, *, label: str, reduction: str = "sum") -> Tensor:
        """Return the reduction over TP ranks, in their order."""
        return self.reduce_over("tp", tensor, reduction)

    def all_gather(self, tensor: Tensor, dim: int, *, label: str, axis: str = "tp") -> Tensor:
        """Return the parts of all TP or context-parallel ranks, joined along ``dim``."""
        return self._issue(_gather(axis, tensor, dim))

    def all_gather_each(self, tensors: Sequence[Tensor], *, labels: Sequence[str], axis: str) -> list[Tensor]:
        """Return the parts of all ranks of several tensors, joined along dim 0; in an overlapped pair all are begun."""
        return self._issue_each([_gather(axis, each, 0) for each in tensors])

    def reduce_scatter(self, tensor: Tensor, dim: int, *, label: str, axis: str = "tp") -> Tensor:
        """Return this rank's part along ``dim`` of the sum over TP or context-parallel ranks, in their order."""
        return self._issue(_scatter(axis, tensor, dim))

    def reduce_scatter_each(self, tensors: Sequence[Tensor], *, labels: Sequence[str], axis: str) -> list[Tensor]:
        """Return this rank's parts along dim 0 of the sums of several tensors; in an overlapped pair all are begun."""
        return self._issue_each([_scatter(axis, each, 0) for each in tensors])

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str) -> Tensor:
        """Exchange ``send[m]`` and ``receive[m]`` rows with each EP rank m."""
        return self._issue(self._exchange(tensor, send, receive))

    def announce(
        self, counts: Tensor, sizes: Sequence[int], use: Callable[[Tensor], Used], *, label: str
    ) -> Callable[[], Used]:
        """Exchange counts, ``sizes[m]`` with each EP rank m; return a function that returns ``use`` of them.

        In an overlapped pair that function runs the other computation first.
        """
        call = self._exchange(counts, sizes, sizes)
        if self._issuer is not None:
            return self._issuer.announce(call, use)
        used = use(self._issue_child(call))
        return lambda: used

    def sum_scattered(self, axis: str, flat: Tensor) -> Tensor:
        """Return this rank's part of the sum of a flat tensor over an axis, in rank order."""
        return self._issue(_scatter(axis, flat, 0))

    def gathered(self, axis: str, flat: Tensor) -> Tensor:
        """Return the flat tensors of all ranks along an axis, joined in rank order."""
        return self._issue(_gather(axis, flat, 0))

    def reduce_over(self, axis: str, tensor: Tensor, reduction: str, weight: str = "") -> Tensor:
        """Return the all-reduce over an axis; over ``pp`` among the holders of ``weight``."""
        return self._issue(Call(OpKind.ALL_REDUCE, axis, tensor, lambda c: c.reduce(tensor, reduction), weight))

    def _exchange(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int]) -> Call:
        def announced(received: Tensor) -> Traffic:
            return tuple(zip(self._sums(tensor, send), self._sums(received, receive), strict=True))

        of_counts = self._arrays.dtype(tensor) == COUNTS_DTYPE
        return Call(
            OpKind.ALL_TO_ALL,
            "ep",
            tensor,
            lambda c: c.exchange(tensor, send, receive),
            traffic=() if of_counts else tuple(zip(send, receive, strict=True)),
            traffic_of=announced if of_counts else None,
        )

    def _issue(self, call: Call) -> Tensor:
        (result,) = self._issue_each([call])
        return result

    def _issue_each(self, calls: Sequence[Call]) -> list[Tensor]:
        if self._issuer is not None:
            return self._issuer.issue(calls)
        return [self._issue_child(call) for call in calls]

    def _issue_child(self, call: Call) -> Tensor:
        """Issue a collective below the operation that runs, and let it end."""
        assert self._parent is not None
        key = self._parent_id + self._index + 1, call.kind, call.axis  # children follow their parent in the graph
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = str(child_of(self._parent, self._index, call.kind, call.axis))
        self._index += 1
        self._host.enter(key[0])
        collectives = self._host.collectives_over(call.axis, self._parent.stage, call.weight)
        entry = self._host.begin_entry(HOST_QUEUE, text)
        result = call.act(collectives)
        entry.end_ns = self._host.now()
        self._host.fill_in(entry, collectives, call, result)
        return result

    def _sums(self, counts: Tensor, sizes: Sequence[int]) -> list[int]:
        parts = np.split(self._arrays.to_numpy(counts), np.cumsum(sizes)[:-1])
        return [int(part.sum()) for part in parts]


def _gather(axis: str, tensor: Tensor, dim: int) -> Call:
    return Call(OpKind.ALL_GATHER, axis, tensor, lambda c: c.all_gather(tensor, dim))


def _scatter(axis: str, tensor: Tensor, dim: int) -> Call:
    return Call(OpKind.REDUCE_SCATTER, axis, tensor, lambda c: c.reduce_scatter(tensor, dim))
