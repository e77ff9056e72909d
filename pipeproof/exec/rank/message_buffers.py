"""Buffers of messages: slots that the messages of a channel share, and slices for backends that move parts of a tensor.

Paddle's process groups on NCCL send and receive slices; Fleet's ``partial`` transport consists of such calls. On a
backend without them, the slice is copied out, sent as a tensor, and joined by an all-gather.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from pipeproof.exec.rank.framework_protocol import Arrays, Tensor, Transfer
from pipeproof.schedule.op_table import Channel, OpGraph
from pipeproof.schedule.ops import OpKind
from pipeproof.specs.axis_layout import dtype_bytes

Pool = tuple[Channel, bool]
"""A channel and a pipeline direction (True is forward), whose messages share slots."""


class Slots:
    """Slots of one rank for its transfers of some kinds, ``num_slots`` for each pool, used round-robin.

    A slot has room for the largest message of its pool of any type. Each step starts with the first slot.
    """

    def __init__(self, num_slots: int, graph: OpGraph, rank: int, kinds: frozenset[OpKind], arrays: Arrays) -> None:
        self._num_slots, self._arrays = num_slots, arrays
        self._counts: Counter[Pool] = Counter()
        self._slots: dict[Pool, list[Tensor]] = {}
        self.users: dict[tuple[Pool, int], list[int]] = {}
        """Transfers of this step by their slot, in order."""
        ids = graph.rank_ops(rank)
        transfers = np.arange(ids.start, ids.stop)[graph.is_kind(kinds)[ids.start : ids.stop]]
        largest: dict[Pool, int] = {}
        for op_id in transfers.tolist():
            pool = graph.channels[int(graph.channel[op_id])], graph.ops[op_id].is_forward
            item = dtype_bytes(graph.tensors[int(graph.tensor[op_id])].dtype)
            largest[pool] = max(largest.get(pool, 0), int(graph.stop[op_id] - graph.start[op_id]) * item)
        for pool, num_bytes in largest.items():
            self._slots[pool] = [arrays.zeros([num_bytes], "uint8") for _ in range(num_slots)]

    def begin(self) -> None:
        """Begin a step: the next message of each pool takes the first slot."""
        self._counts.clear()
        self.users.clear()

    def take(self, op_id: int, pool: Pool, shape: Sequence[int], dtype: str) -> Tensor:
        """Return the next slot of a pool for a transfer, as a tensor that shares the slot's memory."""
        index = self._counts[pool] % self._num_slots
        self._counts[pool] += 1
        self.users.setdefault((pool, index), []).append(op_id)
        return self._arrays.shaped(self._slots[pool][index], shape, dtype)


@dataclass(frozen=True, slots=True)
class Slice:
    """The ``index``-th of ``num_slices`` equal ranges of a contiguous tensor, flattened."""

    whole: Tensor
    num_slices: int
    index: int


@runtime_checkable
class SliceChannels(Protocol):
    """Channels that move slices."""

    def post_slice(self, channel: Channel, part: Slice, after: Sequence[Transfer] = ()) -> Transfer:
        """Post a transfer of the slice only, see ``Channels.post``; the transfer's buffer is the slice."""


@runtime_checkable
class SliceCollectives(Protocol):
    """Collectives that join slices."""

    def gather_slices(self, part: Slice) -> Tensor:
        """Gather the slices of all members into this member's whole tensor and return it."""


def whole_of(buffer: Tensor) -> tuple[Tensor, int]:
    """Return the whole tensor of a transfer's buffer, and the number of its slices."""
    return (buffer.whole, buffer.num_slices) if isinstance(buffer, Slice) else (buffer, 1)
