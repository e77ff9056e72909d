"""Blocks: short runs of rows that a program repeats, once per micro-batch, written out as columns.

The rows around a forward of stage 3 (its receive, the wait, the
collectives inside it, its send) are the same for every micro-batch. A *block*
is that run of rows, written once; a program is a sequence of (block,
work item: a micro-batch, or one split of its sequences). Expanding it is indexing,
so a plan of a million operations costs as many Python steps as it has distinct
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeproof.schedule.columns import NONE, Columns, IntColumn, Row, columns_of

ANY, ANY_OTHER = -2, -3
"""Placeholders for the micro-batch of a row in a block: the first, or the second, of its use. ``ANY`` as a
row's batch is that of the use, too."""


@dataclass(slots=True)
class Blocks:
    """The distinct blocks of all ranks, and the program of each rank as uses of them."""

    _rows: list[Row] = field(default_factory=list)
    _first: list[int] = field(default_factory=lambda: [0])
    _block: list[int] = field(default_factory=list)
    _work_item: list[int] = field(default_factory=list)
    _marked: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Origin, second work item and batch of the uses that have any."""
    _programs: list[int] = field(default_factory=lambda: [0])
    num_splits: int = 0
    """Number of sequence splits; 0 if sequences are not split."""

    def add(self, rows: Sequence[Row]) -> int:
        """A new block; the number to use it by."""
        self._rows += rows
        self._first.append(len(self._rows))
        return len(self._first) - 2

    def use(
        self, block: int, work_item: int = NONE, origin: int = NONE, *, other: int = NONE, batch: int = NONE
    ) -> None:
        """Append one use of a block to the program of the present rank; ``other`` is its second work item."""
        if origin != NONE or other != NONE or batch != NONE:
            self._marked[len(self._block)] = origin, other, batch
        self._block.append(block)
        self._work_item.append(work_item)

    def end_rank(self) -> None:
        """End the program of the present rank; later uses belong to the next rank."""
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
        """Origin, second work item and batch of each use, ``NONE`` where it has none; shape [3, n]."""
        marks = np.full((3, len(self._block)), NONE, dtype=np.int64)
        if self._marked:
            marks[:, list(self._marked)] = np.array(list(self._marked.values()), dtype=np.int64).T
        return marks
