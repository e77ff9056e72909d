"""Memory for messages: their own, or slots that the messages of a channel take in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pipeproof.exec.framework import Arrays, Tensor
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.optable import Channel, OpGraph
from pipeproof.specs.dtypes import dtype_bytes

Pool = tuple[Channel, bool]
"""Messages that share slots: those of one channel in one direction of the pipeline (True is forward)."""


class Slots:
    """Slots of one rank for its transfers of some kinds, ``num_slots`` for each pool.

    A slot has room for the largest message of its pool, whatever its type.
    Counting starts anew in every step.
    """

    def __init__(self, num_slots: int, graph: OpGraph, rank: int, kinds: frozenset[OpKind], arrays: Arrays) -> None:
        self._num_slots, self._arrays = num_slots, arrays
        self._counts: Counter[Pool] = Counter()
        self._slots: dict[Pool, list[Tensor]] = {}
        ids = graph.rank_ops(rank)
        mine = np.arange(ids.start, ids.stop)[graph.is_kind(kinds)[ids.start : ids.stop]]
        largest: dict[Pool, int] = {}
        for op_id in mine.tolist():
            pool = graph.channels[int(graph.channel[op_id])], graph.ops[op_id].is_forward
            item = dtype_bytes(graph.tensors[int(graph.tensor[op_id])].dtype)
            largest[pool] = max(largest.get(pool, 0), int(graph.stop[op_id] - graph.start[op_id]) * item)
        for pool, num_bytes in largest.items():
            self._slots[pool] = [arrays.zeros([num_bytes], "uint8") for _ in range(num_slots)]

    def begin(self) -> None:
        """A step starts: the next message of each pool takes its first slot."""
        self._counts.clear()

    def take(self, pool: Pool, shape: Sequence[int], dtype: str) -> Tensor:
        """The next slot of a pool, as a tensor of that shape which shares the slot's memory."""
        slot = self._slots[pool][self._counts[pool] % self._num_slots]
        self._counts[pool] += 1
        return self._arrays.shaped(slot, shape, dtype)
