"""Scales of gradients on their way to earlier stages: what I, SEND_B and RECV_B multiply by.

The gradient of a loss goes from the stage of the loss to the stage before,
and so on to the first stage. A scale on this way is a factor of everything
that the stages behind it add for that micro-batch. The way is that of the
data: from the rank that computes a stage, by the message that it sends, to
the rank that receives it, or to the stage before on the same rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import OpKind
from pipeproof.verify.gradients.coefficient import ONE, Coefficient

TRAVELLING = frozenset({OpKind.BACKWARD_INPUT, OpKind.SEND_BACKWARD, OpKind.RECV_BACKWARD})
"""Kinds whose scale multiplies the gradient that goes to the stage before."""

_Table = tuple[IntColumn, IntColumn]
"""Sorted keys of (rank, stage, work item), and the row of each."""


@dataclass(frozen=True, eq=False)
class TravellingScales:
    """The ways of the gradients of a graph; ``values`` are its scales by their codes."""

    graph: OpGraph
    values: Mapping[int, Coefficient]
    _downward: dict[tuple[int, bytes], list[tuple[IntColumn, tuple[Coefficient, ...]]]] = field(default_factory=dict)

    def at(self, forwards: IntColumn, stage: int) -> tuple[IntColumn, tuple[Coefficient, ...]]:
        """(an index for each forward, products by index) of the scales from the forwards' stage down to ``stage``."""
        top = int(self.graph.stage[forwards[0]])
        key = top, forwards.tobytes()
        if key not in self._downward:
            self._downward[key] = list(self._products(forwards, top))
        return self._downward[key][top - stage]

    def rows(self, forward: int, stage: int) -> Iterator[tuple[int, Coefficient]]:
        """(row, its scale) of the scaled rows between the stage of a forward and ``stage``."""
        rank, item = self.graph.rank[[forward]], self.graph.work_item[[forward]]
        for here in range(int(self.graph.stage[forward]), stage, -1):
            steps = self._steps(rank, here, item)
            for row in steps[:, 0].tolist():
                if row != NONE and self.graph.scale[row]:
                    yield row, self._value(int(self.graph.scale[row]))
            rank = self._next_rank(rank, steps)

    def _products(self, forwards: IntColumn, top: int) -> Iterator[tuple[IntColumn, tuple[Coefficient, ...]]]:
        """The products at stage ``top``, which are 1, and at each stage before it."""
        rank, item = self.graph.rank[forwards], self.graph.work_item[forwards]
        code = np.zeros(len(forwards), dtype=np.int64)
        products: tuple[Coefficient, ...] = (ONE,)
        for stage in range(top, -1, -1):
            yield code, products
            steps = self._steps(rank, stage, item)
            scales = np.where(steps != NONE, self.graph.scale[steps], 0)
            if scales.any():
                seen, code = np.unique(np.stack([code, *scales], axis=1), axis=0, return_inverse=True)
                code = code.ravel()
                products = tuple(self._product(products[first], *others) for first, *others in seen.tolist())
            rank = self._next_rank(rank, steps)

    def _product(self, start: Coefficient, *codes: int) -> Coefficient:
        for code in codes:
            start *= self._value(code)
        return start

    def _value(self, code: int) -> Coefficient:
        return self.values.get(code, ONE)

    def _steps(self, rank: IntColumn, stage: int, item: IntColumn) -> IntColumn:
        """The I, the send and the receive by which gradients leave a stage, shape [3, n]; NONE where there is none."""
        key = self._key(rank, np.full_like(rank, stage), item)
        sends = _find(self._sends, key)
        return np.stack([_find(self._inputs, key), sends, self._received(sends)])

    def _next_rank(self, rank: IntColumn, steps: IntColumn) -> IntColumn:
        return np.where(steps[2] != NONE, self.graph.rank[steps[2]], rank)

    def _received(self, sends: IntColumn) -> IntColumn:
        return np.where(sends != NONE, self.graph.match[sends], NONE)

    @cached_property
    def _inputs(self) -> _Table:
        rows = np.flatnonzero(self.graph.is_kind(frozenset({OpKind.BACKWARD_INPUT})))
        return self._table(rows, self.graph.scale[rows] == 0)

    @cached_property
    def _sends(self) -> _Table:
        """One of several messages for one stage and micro-batch: one that changes the gradient."""
        graph = self.graph
        rows = np.flatnonzero(graph.is_kind(frozenset({OpKind.SEND_BACKWARD})))
        received = self._received(rows)
        scales = np.stack([graph.scale[rows], np.where(received != NONE, graph.scale[received], 0)], axis=1)
        pairs, pair = np.unique(scales, axis=0, return_inverse=True)
        neutral = np.array([self._product(ONE, *codes) == ONE for codes in pairs.tolist()], dtype=bool)
        return self._table(rows, neutral[pair.ravel()])

    def _table(self, rows: IntColumn, last: BoolColumn) -> _Table:
        """Rows by their keys; of equal keys the first row, one of ``last`` only where all are."""
        keys = self._key(self.graph.rank[rows], self.graph.stage[rows], self.graph.work_item[rows])
        order = np.lexsort((rows, last, keys))
        unique, first = np.unique(keys[order], return_index=True)
        return unique, rows[order][first]

    def _key(self, rank: IntColumn, stage: IntColumn, item: IntColumn) -> IntColumn:
        num_stages, num_items = (int(column.max(initial=0)) + 2 for column in (self.graph.stage, self.graph.work_item))
        return (rank * num_stages + stage) * num_items + item


def _find(table: _Table, keys: IntColumn) -> IntColumn:
    """The row of each key; NONE where there is none."""
    known, rows = table
    if not len(known):
        return np.full(len(keys), NONE, dtype=np.int64)
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[place] == keys, rows[place], NONE)
