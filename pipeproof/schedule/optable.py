"""The op table: every operation of every rank as one row of columns, with its edges.

This is the one object that is verified, simulated and executed. Op ids are
row numbers; the rows of a rank are contiguous and in host program order, that
is the order in which the rank's process comes to them. Transfers are posted
there and run on a queue of their own (one per rank and channel); everything
else runs on the rank's compute queue and blocks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeproof.schedule.ops import Op

if TYPE_CHECKING:
    import networkx as nx

IntColumn = NDArray[np.int64]

NONE = -1
"""In an integer column: this row has no such thing."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as one rank holds it: what crosses a stage boundary, on one of its sides.

    ``shape`` is local, in elements; ``placement`` is over the ``tp`` axis in
    its text form; ``dims`` names the dims (``sbh``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    dims: str

    @property
    def numel(self) -> int:
        """Number of elements of the local tensor."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Channel:
    """A FIFO from one rank to another on one communicator; no tags, the k-th send meets the k-th recv."""

    communicator: str
    src: int
    dst: int

    def __str__(self) -> str:
        return f"{self.communicator} {self.src}->{self.dst}"


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one communicator along one mesh axis, in group order."""

    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One row before it has an id. Users and tests write, drop, double and swap these.

    ``peer`` is the other rank of a transfer; ``tensor`` indexes the graph's
    tensors; ``start`` and ``stop`` are the half-open range of that tensor's
    flattened elements that the operation reads (send, slice, gather) or
    writes (recv), or 0 and the element count that a child collective puts in;
    ``group`` indexes the graph's groups.
    """

    op: Op
    peer: int = NONE
    tensor: int = NONE
    start: int = 0
    stop: int = 0
    group: int = NONE
    reduction: str = ""


class EdgeKind(StrEnum):
    """Why one operation comes after another."""

    HOST = "host"
    """Next on the rank's compute queue."""
    POST = "post"
    """A transfer is posted after the host operation before it."""
    QUEUE = "queue"
    """Next on the same transfer queue."""
    MATCH = "match"
    """The k-th send of a channel to its k-th recv."""
    WAIT = "wait"
    """A transfer to the wait for it."""
    DATA = "data"
    """Producer to consumer of a tensor within a rank."""


@dataclass(frozen=True, eq=False)
class OpGraph:
    """All operations of one training step as columns, with edges by kind.

    Columns have one entry per op id. ``peer``, ``channel``, ``tensor``,
    ``group``, ``waits_for`` (op id that a WAIT waits for) and ``parent`` (op id
    that a child collective belongs to) are ``NONE`` where they do not apply.
    ``position`` counts a transfer's place in its channel, and a collective's
    place among those that its rank issues on its group.
    """

    ops: tuple[Op, ...]
    reductions: tuple[str, ...]
    rank: IntColumn
    peer: IntColumn
    channel: IntColumn
    tensor: IntColumn
    start: IntColumn
    stop: IntColumn
    group: IntColumn
    position: IntColumn
    waits_for: IntColumn
    parent: IntColumn
    offsets: IntColumn
    """``offsets[r] : offsets[r + 1]`` are the op ids of rank r."""
    tensors: tuple[TensorSpec, ...]
    channels: tuple[Channel, ...]
    groups: tuple[Group, ...]
    edges: Mapping[EdgeKind, IntColumn]
    """Arrays of shape [num_edges, 2] of (source, target) op ids."""

    @property
    def num_ranks(self) -> int:
        """Number of global ranks."""
        return len(self.offsets) - 1

    def rank_ops(self, rank: int) -> range:
        """Op ids of ``rank`` in host program order."""
        return range(int(self.offsets[rank]), int(self.offsets[rank + 1]))

    def rows(self) -> list[list[Row]]:
        """The rows of each rank, from which ``build_graph`` makes an equal graph."""
        return [[self.row(op_id) for op_id in self.rank_ops(rank)] for rank in range(self.num_ranks)]

    def row(self, op_id: int) -> Row:
        """One row in the form that people edit."""
        return Row(
            self.ops[op_id],
            int(self.peer[op_id]),
            int(self.tensor[op_id]),
            int(self.start[op_id]),
            int(self.stop[op_id]),
            int(self.group[op_id]),
            self.reductions[op_id],
        )

    def members_of(self, op_id: int) -> list[int]:
        """A collective's op ids on all ranks that issue it, in group order; empty for any other operation."""
        if self.group[op_id] == NONE:
            return []
        same = (self.group == self.group[op_id]) & (self.position == self.position[op_id])
        by_rank = {int(self.rank[i]): int(i) for i in same.nonzero()[0]}
        return [by_rank[rank] for rank in self.groups[int(self.group[op_id])].ranks if rank in by_rank]

    @cached_property
    def match_of(self) -> dict[int, int]:
        """Send to recv and recv to send, by FIFO position on their channel."""
        pairs = self.edges[EdgeKind.MATCH]
        return {int(a): int(b) for a, b in (*pairs, *pairs[:, ::-1])}

    @cached_property
    def nx(self) -> nx.DiGraph[int]:
        """The networkx graph over op ids: nodes carry ``rank`` and ``op``, edges a tuple ``kinds``."""
        import networkx as nx

        graph: nx.DiGraph[int] = nx.DiGraph()
        for op_id, op in enumerate(self.ops):
            graph.add_node(op_id, rank=int(self.rank[op_id]), op=str(op))
        kinds: dict[tuple[int, int], list[str]] = {}
        for kind, pairs in self.edges.items():
            for source, target in pairs.tolist():
                kinds.setdefault((source, target), []).append(kind.value)
        for (source, target), names in kinds.items():
            graph.add_edge(source, target, kinds=tuple(names))
        return graph
