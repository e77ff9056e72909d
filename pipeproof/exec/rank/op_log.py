"""Op log of a rank, and the clocks of its times.

The adapter writes an entry when it acts, with the values that it sees then (the tensor's element count and dtype, the
communicator's ranks), not with the values of the plan. So the comparison of the log with the graph is a real test.

A host that waits for its operations reads its own clock. A host that runs ahead of a GPU only knows when it issued an
operation: the GPU then passes a marker, whose time is known at the end of the step. So ``now`` may return the number of
a marker, and ``timed_entries`` replaces the numbers by times.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeproof.schedule.op_table import NONE, Channel, OpGraph
from pipeproof.schedule.ops import TRANSFER_KINDS, OpKind
from pipeproof.stages.describe.layer import COUNTS_DTYPE

HOST_QUEUE = "compute"


@dataclass(slots=True)  # not frozen: a rank makes one for each operation, and a frozen one takes four times as long
class LogEntry:
    """One executed operation.

    ``queue`` is ``compute``, the channel's text, or the queue of a collective that runs while its rank computes.
    ``ranks`` are the members of the communicator (empty for compute); ``numel`` and ``dtype`` describe its tensor (0
    and "" for compute). Times are the machine's monotonic clock in nanoseconds; a transfer was posted at ``posted_ns``
    and starts when its channel reaches it, and so does a collective on a queue of its own. For an all-to-all,
    ``traffic`` has the rows sent to and received from each member; for an all-to-all of counts, the rows that the
    counts announce. A whole backward has the input gradient at ``split_ns``, and computes weight gradients after it.
    """

    step: int
    queue: str
    op: str
    start_ns: int
    end_ns: int
    ranks: tuple[int, ...] = ()
    numel: int = 0
    dtype: str = ""
    posted_ns: int = 0
    traffic: Traffic = ()
    split_ns: int = 0


Traffic = tuple[tuple[int, int], ...]
"""Rows sent to and received from each member of a group."""


def collective_dtype(graph: OpGraph, op_id: int, dtype: str, weight_dtype: str | None) -> str:
    """Type of a collective's elements: its own, ``weight_dtype`` for gradients and weights, else ``dtype``."""
    if graph.tensor[op_id] != NONE:
        return graph.tensors[int(graph.tensor[op_id])].dtype
    return weight_dtype if weight_dtype and _is_of_weights(graph, op_id) else dtype


def _is_of_weights(graph: OpGraph, op_id: int) -> bool:
    """Return True for a collective of gradients or weights: below their sum or gather, or the norm's (no parent)."""
    parent = int(graph.parent[op_id])
    if parent == NONE:
        return graph.ops[op_id].kind is OpKind.ALL_REDUCE
    return graph.ops[parent].kind in (OpKind.REDUCE_GRAD, OpKind.GATHER_WEIGHT)


def log_queue(graph: OpGraph, op_id: int) -> str:
    """Queue of an operation in the log: its channel, the queue that a collective of a part runs on, or ``compute``."""
    if graph.ops[op_id].kind in TRANSFER_KINDS:
        return str(graph.channels[int(graph.channel[op_id])])
    return graph.queues[int(graph.queue[op_id])] if graph.part_before[op_id] != NONE else HOST_QUEUE


def op_ids_of(graph: OpGraph, rank: int, entries: Sequence[LogEntry]) -> list[int | None]:
    """Return the graph's operation for each entry of a rank's log, None for an entry that the graph does not have.

    An operation may be several messages with a wait for each: the k-th entry of a step with a text on a queue is the
    k-th in the graph.
    """
    ids: dict[tuple[str, str], list[int]] = {}
    for op_id in graph.rank_ops(rank):
        ids.setdefault((log_queue(graph, op_id), str(graph.ops[op_id])), []).append(op_id)
    counts: Counter[tuple[int, str, str]] = Counter()
    op_ids: list[int | None] = []
    for entry in entries:
        index, planned = counts[entry.step, entry.queue, entry.op], ids.get((entry.queue, entry.op), [])
        counts[entry.step, entry.queue, entry.op] += 1
        op_ids.append(planned[index] if index < len(planned) else None)
    return op_ids


class ChannelTransfers:
    """Transfers of the ``index``-th rank: the k-th post to a channel in a step is the channel's k-th in the graph."""

    def __init__(self, graph: OpGraph, index: int) -> None:
        self._op_ids: dict[Channel, list[int]] = {}
        for op_id in graph.rank_ops(index):
            if graph.ops[op_id].kind in TRANSFER_KINDS:
                self._op_ids.setdefault(graph.channels[int(graph.channel[op_id])], []).append(op_id)
        self._posts: Counter[Channel] = Counter()

    def begin(self) -> None:
        """Begin a step, also after one that failed."""
        self._posts.clear()

    def next(self, channel: Channel) -> int:
        """Return the operation of the next post to a channel; after the last post of a step, the first one's."""
        op_ids, position = self._op_ids[channel], self._posts[channel]
        self._posts[channel] = position + 1
        return op_ids[position % len(op_ids)]


def moves_rows(kind: OpKind, dtype: str) -> bool:
    """Return True for an all-to-all of rows, whose number depends on exchanged counts."""
    return kind is OpKind.ALL_TO_ALL and dtype != COUNTS_DTYPE


ClockName = Literal["host", "device"]


class Clock(Protocol):
    """Clock of operations."""

    def begin(self) -> None:
        """Begin a step; markers of the previous step are no longer needed."""

    def now(self) -> int:
        """Return the time in nanoseconds, or the number of a marker that ``timed_entries`` replaces."""

    def end_of(self, block: Callable[[], object]) -> int:
        """Return the time at which the work that ``block`` waits for ends; 0 if only a waiting host knows it."""

    def timed_entries(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        """Return a step's entries with all times in nanoseconds of the host's monotonic clock."""


class HostClock:
    """The machine's monotonic clock, one for all processes; a ``Clock``."""

    def begin(self) -> None:
        """Do nothing."""

    def now(self) -> int:
        """Return nanoseconds."""
        return time.monotonic_ns()

    def end_of(self, block: Callable[[], object]) -> int:
        """Return 0: the host does not wait."""
        return 0

    def timed_entries(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        """Return the entries unchanged."""
        return entries


@dataclass(frozen=True, slots=True)
class Timing:
    """Clock of a rank's times, and its accuracy in comparison with other ranks.

    ``device`` is the GPU's name; ``allocated_bytes`` and ``reserved_bytes`` are the allocator's peaks in the last step.
    On a CPU they are empty and 0.
    """

    clock: ClockName = "host"
    accuracy_ns: int = 0
    device: str = ""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
