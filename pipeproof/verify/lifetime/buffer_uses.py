"""Uses of buffers: the buffers that each operation reads, writes and frees.

Rows may name buffers of their rank (``recv[0]``), or of another rank
(``symmetric@1``: one-sided access to memory of rank 1). In addition, the kind
of an operation implies its uses of the tensors of its stage and micro-batch,
which are fresh in every step:

- a receive writes the tensor for its stage; a forward, or a backward, reads it,
  after the gather if slices arrive;
- a forward writes its output and its kept activations, a backward the gradient
  of its input; sends read these, after the slice if slices are sent;
- between two stages of one rank the second reads the result of the first; so do all consumers of a direct edge there;
- backwards read the kept activations and the input of the forward, and add to
  the stage's gradient, which reductions and scalings change and the optimizer reads;
- ``UNSHARD`` writes the stage's whole weights, ``RESHARD`` frees them, and
  ``GATHER_WEIGHT`` reads and writes them, or only writes if the program releases weights;
- ``OFFLOAD`` copies the kept activations into host memory, and ``RELOAD`` copies
  them into other memory of the device, from which backwards then read;
- ``FREE(x)`` frees the buffers that x reads and writes; for a copy, only those that it reads.

An operation uses its buffers from its start to its done; a collective uses
memory of another rank until that rank's member is done. Gradients, weights and
named buffers last from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, COPY_KINDS, KIND_CODE, OpKind
from pipeproof.stages.describe.boundary import DirectEdge
from pipeproof.verify.lifetime.tensor_buffers import (
    FREES,
    GRADIENT,
    INPUT_GRAD,
    KEPT,
    OUTPUT,
    READS,
    WRITES,
    StageTensors,
)


@dataclass(frozen=True, eq=False)
class Uses:
    """Uses of buffers, one entry per (buffer, operation), by buffer and then program order.

    ``mode`` has the bits READS, WRITES and FREES. Buffers are numbers: first
    the tensors of one micro-batch, then from ``first_persistent`` gradients and
    weights, then from ``first_named`` the buffers that rows name. ``names`` holds
    these by position: ``(rank, name)``. A use lasts from the start of ``op`` to the
    done of ``end``, which is another operation only if a collective uses memory of
    another rank.
    """

    buffer: IntColumn
    op: IntColumn
    end: IntColumn
    mode: IntColumn
    first_persistent: int
    first_named: int
    names: Sequence[tuple[int, str]]
    tensors: StageTensors

    def __len__(self) -> int:
        return len(self.op)

    @cached_property
    def last_change(self) -> tuple[IntColumn, IntColumn]:
        """For each use, the first use of its buffer, and the last write or free before it (else NONE)."""
        if not len(self):
            return self.buffer, self.buffer
        index = np.arange(len(self))
        begins = np.maximum.accumulate(np.where(np.diff(self.buffer, prepend=NONE) != 0, index, 0))
        changed = np.maximum.accumulate(np.where(self.changes, index, NONE))
        last = np.concatenate([[NONE], changed[:-1]])
        return begins, np.where(last >= begins, last, NONE)

    @property
    def reads(self) -> BoolColumn:
        """Mask of the uses that read their buffer."""
        return np.asarray((self.mode & READS) != 0)

    @cached_property
    def changes(self) -> BoolColumn:
        """Mask of the uses that write or free their buffer."""
        return np.asarray((self.mode & (WRITES | FREES)) != 0)

    def at(self, places: IntColumn) -> Uses:
        """The uses at these indices, in this order."""
        buffer, op, end, mode = (column[places] for column in (self.buffer, self.op, self.end, self.mode))
        return replace(self, buffer=buffer, op=op, end=end, mode=mode)

    @cached_property
    def shared(self) -> set[int]:
        """Buffers that collectives of several ranks share: each member uses its part."""
        return set(self.buffer[self.end != self.op].tolist())

    @property
    def is_kept(self) -> BoolColumn:
        """Mask of the uses of activations that a forward keeps for its backward."""
        return self.tensors.is_named(self.buffer, KEPT)

    @property
    def is_made(self) -> BoolColumn:
        """Mask of the uses of a stage's output, or of the gradient of its input."""
        return self.tensors.is_named(self.buffer, OUTPUT, INPUT_GRAD)

    @property
    def is_gradient(self) -> BoolColumn:
        """Mask of the uses of a stage's gradient (not of a named buffer)."""
        persistent = (self.buffer >= self.first_persistent) & (self.buffer < self.first_named)
        return np.asarray(persistent & ((self.buffer - self.first_persistent) % 2 == GRADIENT))

    def name_of(self, buffer: int) -> tuple[int, str] | None:
        """The rank and name of a buffer that rows name, else None."""
        return None if buffer < self.first_named else self.names[buffer - self.first_named]


def uses_of(graph: OpGraph, direct: Sequence[DirectEdge] = ()) -> Uses:
    """All uses of a graph's buffers, with the direct edges of its plan. Linear in rows, but for one sort."""
    tensors = StageTensors(graph, direct)
    flow = list(tensors.flow())
    first_persistent = tensors.num_buffers
    first_named = first_persistent + tensors.num_persistent
    named, names = _named(graph, first_named)
    parts = [(buffer, op, np.full(len(op), bits)) for buffer, op, bits in flow]
    parts.append(named)
    parts.append(_freed(graph, parts))
    parts += [(buffer + first_persistent, op, np.full(len(op), bits)) for buffer, op, bits in tensors.persistent()]
    buffer, op, mode = _merged([np.concatenate(columns) for columns in zip(*parts, strict=True)], graph.num_ops)
    end = _ends(graph, buffer, op, first_named, names)
    return Uses(buffer, op, end, mode, first_persistent, first_named, names, tensors)


def _named(graph: OpGraph, first: int) -> tuple[tuple[IntColumn, IntColumn, IntColumn], list[tuple[int, str]]]:
    """Uses of buffers that rows name, numbered from ``first``, and the numbers' meaning."""
    accesses = graph.accesses
    rank = graph.rank[accesses.op]
    numbers: dict[tuple[int, str], int] = {}
    pairs, inverse = np.unique(rank * (len(graph.buffers) + 1) + accesses.buffer, return_inverse=True)
    number = np.empty(len(pairs), dtype=np.int64)
    for i, pair in enumerate(pairs.tolist()):
        own_rank, code = divmod(pair, len(graph.buffers) + 1)
        number[i] = numbers.setdefault(_where(graph.buffers[code], own_rank, graph.num_ranks), len(numbers))
    buffer = number[inverse] + first
    return (buffer, accesses.op, 1 << accesses.mode), list(numbers)


def _ends(
    graph: OpGraph, buffer: IntColumn, op: IntColumn, first_named: int, names: Sequence[tuple[int, str]]
) -> IntColumn:
    """The operation whose done ends each use: the user itself, or the member on the buffer's rank."""
    named = np.flatnonzero(buffer >= first_named)
    if not len(named):
        return op
    holder = np.array([rank for rank, _ in names], dtype=np.int64)[buffer[named] - first_named]
    end = op.copy()
    abroad = graph.is_kind(COLLECTIVE_KINDS)[op[named]] & (holder != graph.rank[op[named]])
    for index, rank in zip(named[abroad].tolist(), holder[abroad].tolist(), strict=True):
        members = graph.members_of(int(op[index]))
        end[index] = next((member for member in members if graph.rank[member] == rank), op[index])
    return end


def _where(name: str, own_rank: int, num_ranks: int) -> tuple[int, str]:
    """The rank that holds a buffer: the row's own, or ``rank`` for ``name@rank``."""
    base, _, at = name.rpartition("@")
    if base and at.isdecimal() and int(at) < num_ranks:
        return int(at), base
    return own_rank, name


def _freed(
    graph: OpGraph, parts: Sequence[tuple[IntColumn, IntColumn, IntColumn]]
) -> tuple[IntColumn, IntColumn, IntColumn]:
    """Buffers that each FREE(x) frees: all buffers of x, or only the original if x is a copy."""
    frees = np.flatnonzero(graph.kind == KIND_CODE[OpKind.FREE])
    target = _targets(graph, frees)
    frees, target = frees[target != NONE], target[target != NONE]
    buffer, op, mode = (np.concatenate([part[i] for part in parts]) for i in range(3))
    of_original = ~graph.is_kind(COPY_KINDS)[op] | ((mode & READS) != 0)
    buffer, op = buffer[of_original], op[of_original]
    by_op = np.argsort(op, kind="stable")
    first, last = (np.searchsorted(op[by_op], target, side=side) for side in ("left", "right"))
    count = last - first
    index = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    return buffer[by_op[index]], np.repeat(frees, count), np.full(len(index), FREES)


def _targets(graph: OpGraph, frees: IntColumn) -> IntColumn:
    """The operation that each FREE names: the last such operation before it on its rank, else the first after it."""
    target = np.full(len(frees), NONE, dtype=np.int64)
    named = {int(graph.target_kind[free]) for free in frees}
    candidates = np.flatnonzero(np.isin(graph.kind, list(named)) & (graph.target_kind == NONE))
    columns = (graph.rank, graph.stage, graph.work_item, graph.axis, graph.index)
    kinds = np.concatenate([graph.target_kind[frees], graph.kind[candidates]])
    both = np.concatenate([frees, candidates])
    key = np.unique(np.stack([kinds, *(c[both] for c in columns)]), axis=1, return_inverse=True)[1].reshape(-1)
    free_key, key = key[: len(frees)], key[len(frees) :]
    order = np.argsort(key, kind="stable")
    candidates, place_key = candidates[order], key[order] * graph.num_ops + candidates[order]
    after = np.searchsorted(place_key, free_key * graph.num_ops + frees)
    for index in (after, after - 1):  # an operation before it, if there is one, takes precedence
        inside = (index >= 0) & (index < len(candidates))
        fits = np.flatnonzero(inside)[place_key[index[inside]] // graph.num_ops == free_key[inside]]
        target[fits] = candidates[index[fits]]
    return target


def _merged(columns: Sequence[IntColumn], num_ops: int) -> tuple[IntColumn, IntColumn, IntColumn]:
    """Columns (buffer, op, mode) sorted by buffer and op, modes of one operation's uses of one buffer joined."""
    buffer, op, mode = columns
    bits = max(num_ops, 1).bit_length()
    packed = np.sort((((buffer << bits) | op) << 3) | mode)
    key, mode = packed >> 3, packed & 7
    begins = np.flatnonzero(np.diff(key, prepend=NONE))
    if len(begins) < len(key):
        mode = np.bitwise_or.reduceat(mode, begins)
        key = key[begins]
    return key >> bits, key & ((1 << bits) - 1), mode
