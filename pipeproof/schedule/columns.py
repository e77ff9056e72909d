"""The op table before derivations: rows as people write them, and the same rows as columns.

A row describes one operation of one rank. Columns are numpy arrays with one entry per row, all int64: a column has the
index of a name in a separate table. Templates of rows are repeated by indexing (``Columns.take``), which is how a large
plan is lowered without a Python object per operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeproof.diagnostics.finding import Location
from pipeproof.schedule.ops import AXES, KIND_CODE, KINDS, TARGET_KINDS, UPDATE_KINDS, Op

IntColumn = NDArray[np.int64]

NONE = -1
"""In an integer column: this row has no such value."""

COMPUTE_QUEUE, HOST_QUEUE = 0, 1
QUEUES = ("compute", "host")
"""The queues that every rank has: where it computes, which is also the order in which its host issues, and the host
itself. Any other name is one more queue (a CUDA stream) of the rank that uses it."""

REDUCTIONS = ("", "sum", "max", "avg", "overwrite")
"""Known reductions, first in every table: equal rows then make equal columns."""

COMMUNICATORS = ("forward", "backward")
"""The communicators of transfers that name none: one for each direction."""

READ, WRITE, FREE = 0, 1, 2
"""The modes of an access to a buffer."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row before it has an id. Users and tests write, drop, double and swap these.

    ``peer`` is the other rank of a transfer; ``tensor`` indexes the graph's
    tensors; ``start`` and ``stop`` are the half-open range of that tensor's
    flattened elements that the operation reads (send, slice, gather) or
    writes (recv), or 0 and the element count that a collective puts in;
    ``group`` indexes the graph's groups.

    ``reduction`` is ``sum``, ``max`` or ``avg``; on a backward ``overwrite``
    means that the gradient is written, not added. ``scale`` is a factor in
    symbols (``1/dp``, ``2/3``). ``shift`` is by how many elements the range
    moves from one TP rank to the next, in a graph whose ranks represent many.

    ``queue`` is where the operation runs, ``""`` for the default: a transfer
    has a queue of its own per rank and channel end and is posted by the
    compute queue, everything else runs on ``compute``. Operations on a queue
    of another name have no order to the compute queue except through WAITs. A
    WAIT on ``host`` holds everything that the rank issues after it. Rows of a
    rank with the same ``batch`` are one call: one entry of their queue, with
    no order among them.

    ``reads``, ``writes`` and ``frees`` name buffers of the rank (``name@1`` of
    rank 1), in addition to those that the kind of the operation implies. ``origin`` is an
    index into the reader's list of locations in the source file.
    """

    op: Op
    peer: int = NONE
    tensor: int = NONE
    start: int = 0
    stop: int = 0
    group: int = NONE
    reduction: str = ""
    shift: int = 0
    communicator: str = ""
    queue: str = ""
    batch: int = NONE
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    frees: tuple[str, ...] = ()
    scale: str = ""
    origin: int = NONE

    def place(self, origins: Sequence[Location]) -> Location | None:
        """The location of a row that was read."""
        return None if self.origin == NONE else origins[self.origin]


class NameTable:
    """Names by the order in which they are first asked for."""

    def __init__(self, *names: str) -> None:
        self._codes = {name: code for code, name in enumerate(names)}

    def code(self, name: str) -> int:
        """The code of ``name``, which is added if it is new."""
        return self._codes.setdefault(name, len(self._codes))

    def names(self) -> tuple[str, ...]:
        """All names, in order of their codes."""
        return tuple(self._codes)


COLUMN_NAMES = (
    "kind", "stage", "work_item", "target_kind", "index", "axis", "peer", "tensor", "start", "stop", "shift",
    "group", "reduction", "communicator", "queue", "batch", "scale", "origin",
)  # fmt: skip
"""The columns that a row fills, in canonical order."""


@dataclass(frozen=True, eq=False)
class Columns:
    """Rows of all ranks as arrays by column name; ``offsets[r] : offsets[r + 1]`` are the rows of rank r.

    ``accesses`` has shape [n, 3]: row, buffer, READ | WRITE | FREE.
    ``unusual`` holds the operations that the columns cannot express (a wait for a child collective). ``work_item`` is
    the micro-batch or, if sequences are split into ``num_splits`` (not 0), micro-batch * num_splits + split.
    """

    values: Mapping[str, IntColumn]
    offsets: IntColumn
    accesses: IntColumn
    reductions: tuple[str, ...]
    communicators: tuple[str, ...]
    queues: tuple[str, ...]
    scales: tuple[str, ...]
    buffers: tuple[str, ...]
    unusual: Mapping[int, Op] = field(default_factory=dict)
    num_splits: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows over all ranks."""
        return int(self.offsets[-1])

    def equals(self, other: Columns) -> bool:
        """Return True if both hold the same rows; ``origin`` is not compared."""
        return (
            np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.accesses, other.accesses)
            and all(
                np.array_equal(column, other.values[name]) for name, column in self.values.items() if name != "origin"
            )
            and (self.reductions, self.communicators, self.queues, self.scales, self.buffers, self.unusual)
            == (other.reductions, other.communicators, other.queues, other.scales, other.buffers, other.unusual)
            and self.num_splits == other.num_splits
        )

    def take(self, rows: IntColumn, offsets: IntColumn, **changed: IntColumn) -> Columns:
        """The columns of ``rows`` (indices into these, repeats allowed), in new ranks, with some columns replaced.

        Raises:
            ValueError: these rows have accesses or operations that are not in columns.
        """
        if len(self.accesses) or self.unusual:
            raise ValueError("rows with buffers of their own, or waits for child collectives, cannot be repeated")
        values = {name: changed[name] if name in changed else column[rows] for name, column in self.values.items()}
        return replace(self, values=values, offsets=offsets)

    def repeated(self, values: Mapping[str, IntColumn], ranks: Sequence[int], offsets: IntColumn) -> Columns:
        """Columns with the rows of ``ranks`` (repeats allowed) one after the other; ``values`` has their entries."""
        accesses: list[IntColumn] = []
        unusual: dict[int, Op] = {}
        for rank, start in zip(ranks, offsets.tolist(), strict=False):
            first, end = self.offsets[rank : rank + 2].tolist()
            if len(self.accesses):
                op = self.accesses[:, 0]
                accesses.append(self.accesses[(op >= first) & (op < end)] + [start - first, 0, 0])
            unusual |= {row + start - first: op for row, op in self.unusual.items() if first <= row < end}
        joined = np.concatenate(accesses) if accesses else self.accesses
        return replace(self, values=values, offsets=offsets, accesses=joined, unusual=unusual)


def columns_of(rows_by_rank: Sequence[Iterable[Row]], num_splits: int | None = None) -> Columns:
    """Rows of each rank as columns; without ``num_splits``, sequences are split as in the rows.

    Raises:
        ValueError: some operations of micro-batches name a split, and some do not.
    """
    if num_splits is None:
        rows_by_rank = [list(rows) for rows in rows_by_rank]
        splits = (row.op.split for rows in rows_by_rank for row in rows)
        num_splits = 1 + max((split for split in splits if split is not None), default=-1)
    reductions, communicators = NameTable(*REDUCTIONS), NameTable(*COMMUNICATORS)
    queues, scales, buffers = NameTable(*QUEUES), NameTable(""), NameTable()
    values: list[tuple[int, ...]] = []
    accesses: list[tuple[int, int, int]] = []
    unusual: dict[int, Op] = {}
    offsets = [0]
    for rows in rows_by_rank:
        for row in rows:
            op = row.op
            if not _fits_columns(op):
                unusual[len(values)] = op
            for mode, names in ((READ, row.reads), (WRITE, row.writes), (FREE, row.frees)):
                accesses += [(len(values), buffers.code(name), mode) for name in names]
            values.append(
                (
                    KIND_CODE[op.kind],
                    op.stage,
                    work_item_of(op, num_splits),
                    NONE if op.target is None else KIND_CODE[op.target.kind],
                    _index_of(op),
                    _axis_code(op),
                    row.peer,
                    row.tensor,
                    row.start,
                    row.stop,
                    row.shift,
                    row.group,
                    reductions.code(row.reduction),
                    communicators.code(row.communicator) if row.communicator else NONE,
                    queues.code(row.queue) if row.queue else NONE,
                    row.batch,
                    scales.code(row.scale),
                    row.origin,
                )
            )
        offsets.append(len(values))
    table = np.array(values, dtype=np.int64).reshape(-1, len(COLUMN_NAMES))
    return Columns(
        values={name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(COLUMN_NAMES)},
        offsets=np.array(offsets, dtype=np.int64),
        accesses=np.array(accesses, dtype=np.int64).reshape(-1, 3),
        reductions=reductions.names(),
        communicators=communicators.names(),
        queues=queues.names(),
        scales=scales.names(),
        buffers=buffers.names(),
        unusual=unusual,
        num_splits=num_splits,
    )


def work_item_of(op: Op, num_splits: int) -> int:
    """The work item of an operation; ``NONE`` for an operation of a whole step.

    A negative micro-batch represents any work item, in rows that are yet to be filled in.

    Raises:
        ValueError: the operation names no split, and sequences are split.
    """
    if op.micro_batch is None:
        return NONE
    if op.micro_batch < 0 or not num_splits:
        return op.micro_batch
    if op.split is None:
        raise ValueError(f"{op} names no split of its sequences, and other operations do")
    return op.micro_batch * num_splits + op.split


def _axis_code(op: Op) -> int:
    """The axis of the operation, or of the operation that it waits for or frees."""
    named = op.target if op.kind in TARGET_KINDS and op.target is not None else op
    return NONE if named.axis is None else AXES.index(named.axis)


def _index_of(op: Op) -> int:
    """The index of a child or the other stage of a transfer, also for a WAIT or FREE of one."""
    named = op.target if op.kind in TARGET_KINDS and op.target is not None and op.target.target is None else op
    return NONE if named.index is None else named.index


def _fits_columns(op: Op) -> bool:
    """Return True if ``op_from_columns`` restores the operation."""
    target = op.target
    if target is None:
        return True
    if op.kind in TARGET_KINDS:
        return target.target is None
    return target.axis is None or target.axis == op.axis


def op_from_columns(
    kind: int, stage: int, work_item: int, target_kind: int, index: int, axis: int, *, num_splits: int
) -> Op:
    """The operation of one row."""
    op_kind = KINDS[kind]
    batch, split = work_of(work_item, num_splits)
    axis_name = None if axis == NONE else AXES[axis]
    number = None if index == NONE else index
    if target_kind == NONE:
        return Op(op_kind, stage, batch, index=number, axis=axis_name, split=split)
    parent_kind = KINDS[target_kind]
    if op_kind in TARGET_KINDS:
        target = Op(parent_kind, stage, batch, index=number, axis=axis_name, split=split)
        return Op(op_kind, stage, batch, target=target, split=split)
    parent_axis = axis_name if parent_kind in UPDATE_KINDS else None
    parent = Op(parent_kind, stage, batch, axis=parent_axis, split=split)
    return Op(op_kind, stage, batch, target=parent, index=index, axis=axis_name, split=split)


def work_of(work_item: int, num_splits: int) -> tuple[int | None, int | None]:
    """(micro-batch, split) of a work item; None for a missing value."""
    if work_item == NONE:
        return None, None
    return divmod(work_item, num_splits) if num_splits else (work_item, None)


def work_item_text(work_item: int, num_splits: int) -> str:
    """A work item as operations name it: ``3``, or ``3.s1``."""
    micro_batch, split = work_of(work_item, num_splits)
    return f"{micro_batch}" if split is None else f"{micro_batch}.s{split}"


def rank_column(offsets: IntColumn) -> IntColumn:
    """The rank of each row."""
    lengths = np.array([stop - start for start, stop in pairwise(offsets.tolist())], dtype=np.int64)
    return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)


# Blocks: short runs of rows that a program repeats, once per micro-batch, written out as columns.
#
# The rows around a forward of stage 3 (its receive, the wait, the
# collectives inside it, its send) are the same for every micro-batch. A *block*
# is that run of rows, written once; a program is a sequence of (block,
# work item: a micro-batch, or one split of its sequences). Expanding it is indexing,
# so a plan of a million operations costs as many Python steps as it has distinct
# blocks.


ANY, ANY_OTHER = -2, -3
"""Placeholders in a block's row for the first or second micro-batch of its use. ``ANY`` as a row's batch means the
use's batch."""


@dataclass(slots=True)
class Blocks:
    """The distinct blocks of all ranks, and the program of each rank as uses of them."""

    _rows: list[Row] = field(default_factory=list)
    _first: list[int] = field(default_factory=lambda: [0])
    _block: list[int] = field(default_factory=list)
    _work_item: list[int] = field(default_factory=list)
    _marked: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Origin, second work item and batch of the uses that have any of these."""
    _programs: list[int] = field(default_factory=lambda: [0])
    num_splits: int = 0
    """Number of sequence splits; 0 if sequences are not split."""

    def add(self, rows: Sequence[Row]) -> int:
        """Add a new block; return its number for ``use``."""
        self._rows += rows
        self._first.append(len(self._rows))
        return len(self._first) - 2

    def use(
        self, block: int, work_item: int = NONE, origin: int = NONE, *, other: int = NONE, batch: int = NONE
    ) -> None:
        """Append one use of a block to the program of the current rank; ``other`` is its second work item."""
        if origin != NONE or other != NONE or batch != NONE:
            self._marked[len(self._block)] = origin, other, batch
        self._block.append(block)
        self._work_item.append(work_item)

    def end_rank(self) -> None:
        """End the program of the current rank; later uses belong to the next rank."""
        self._programs.append(len(self._block))

    def expand(self) -> Columns:
        """The rows of all ranks as columns. Linear in rows, without Python work per row."""
        template = columns_of([self._rows], self.num_splits)
        first = np.array(self._first, dtype=np.int64)
        block = np.array(self._block, dtype=np.int64)
        length = np.diff(first)[block]
        ends = np.concatenate([[0], np.cumsum(length)])
        rows = np.arange(ends[-1]) + np.repeat(first[block] - ends[:-1], length)
        written = template.values["work_item"][rows]
        work_item = np.where(written == ANY, np.repeat(np.array(self._work_item, dtype=np.int64), length), written)
        origin, other, batch = (np.repeat(column, length) for column in self._marks())
        own_batch = template.values["batch"][rows]
        return template.take(
            rows,
            ends[np.array(self._programs, dtype=np.int64)],
            work_item=np.where(written == ANY_OTHER, other, work_item),
            batch=np.where(own_batch == ANY, batch, own_batch),
            origin=origin,
        )

    def _marks(self) -> IntColumn:
        """Origin, second work item and batch of each use, ``NONE`` if it has none; shape [3, n]."""
        marks = np.full((3, len(self._block)), NONE, dtype=np.int64)
        if self._marked:
            marks[:, list(self._marked)] = np.array(list(self._marked.values()), dtype=np.int64).T
        return marks
