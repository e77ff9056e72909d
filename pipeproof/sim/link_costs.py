"""What the messages and the collectives of a graph take, in nanoseconds: one look-up for each sort of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from pipeproof.comm.links.times import LinkTimes
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import packed
from pipeproof.schedule.ops import COLLECTIVE_KINDS, KIND_CODE, KINDS, SEND_KINDS, OpKind
from pipeproof.schedule.optable import Group
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.times import GRID_US, rounded_up


@dataclass(frozen=True, eq=False)
class OnLinks:
    """By op id, in nanoseconds: collectives from their last member's coming on, messages at their sends, 0 elsewhere.

    ``inside`` has for a computation what the collectives inside it take together.
    """

    collectives: IntColumn
    messages: IntColumn
    inside: IntColumn


def on_links(lowered: LoweredPlan, links: LinkTimes) -> OnLinks:
    """Time all messages and collectives that are between ranks. Linear in operations, but for sorting.

    Raises:
        BadPlanAtError: PP161, a profile lacks some time.
    """
    graph, places = lowered.graph, Places(lowered)
    num_bytes = bytes_of(lowered, links)
    collectives, messages, inside = (np.zeros(graph.num_ops, dtype=np.int64) for _ in range(3))
    calls = np.flatnonzero(graph.is_kind(COLLECTIVE_KINDS) & (graph.group != NONE))
    for rows, one in _sorts(calls, graph.kind, graph.group, num_bytes):
        kind, groups = KINDS[graph.kind[one]], places.of_group(int(graph.group[one]))
        collectives[rows] = rounded_up(links.collective_us(kind, groups, int(num_bytes[one]))) / GRID_US
    sends = np.flatnonzero(graph.is_kind(SEND_KINDS))
    for rows, one in _sorts(sends, graph.channel, num_bytes):
        pairs = places.of_channel(int(graph.channel[one]))
        messages[rows] = rounded_up(links.message_us(pairs, int(num_bytes[one]))) / GRID_US
    children = calls[graph.parent[calls] != NONE]
    np.add.at(inside, graph.parent[children], collectives[children])
    return OnLinks(collectives, messages, inside)


def bytes_of(lowered: LoweredPlan, links: LinkTimes) -> IntColumn:
    """By op id, the bytes of the range that a row names: what a send sends, and a member of a collective puts in."""
    graph = lowered.graph
    declared = {entry.name for entry in lowered.spec.boundaries if entry.dtype is not None}
    own = lowered.spec.run.dtype
    dtypes = (
        links.dtype if tensor.dtype == own and tensor.member not in declared else tensor.dtype
        for tensor in graph.tensors
    )
    of_tensors = np.array([*map(dtype_bytes, dtypes), dtype_bytes(links.dtype)], dtype=np.int64)
    item = of_tensors[graph.tensor]  # the last where there is no tensor
    children = np.flatnonzero(graph.parent != NONE)
    reduced = children[graph.kind[graph.parent[children]] == KIND_CODE[OpKind.REDUCE_GRAD]]
    item[reduced] = dtype_bytes(links.gradient_dtype)
    result: IntColumn = (graph.stop - graph.start) * item
    return result


def _sorts(rows: IntColumn, *columns: IntColumn) -> list[tuple[IntColumn, int]]:
    """The rows that are alike in these columns, and one of each lot."""
    if not len(rows):
        return []
    _, number = np.unique(packed(*(column[rows] for column in columns)), return_inverse=True)
    order = np.argsort(number, kind="stable")
    lots = np.split(rows[order], np.cumsum(np.bincount(number))[:-1])
    return [(lot, int(lot[0])) for lot in lots]


class Places:
    """The global ranks that groups and channels of a graph stand for, one row for each replica."""

    def __init__(self, lowered: LoweredPlan) -> None:
        self._graph, mesh = lowered.graph, lowered.mesh
        self._global = np.array(lowered.graph.global_rank, dtype=np.int64)
        self._strides = {axis: prod(mesh.sizes[:place]) for place, axis in enumerate(mesh.axes)}
        self._sizes = dict(zip(mesh.axes, mesh.sizes, strict=True))
        self._folded = [
            axis
            for axis in mesh.axes
            if lowered.folded and not (self._global // self._strides[axis] % self._sizes[axis]).any()
        ]

    def of_group(self, group: int) -> IntColumn:
        """Shape [replicas, members]."""
        one: Group = self._graph.groups[group]
        ranks = self._global[list(one.ranks)]
        if one.copies == 1:
            return self._replicas(ranks, self._folded)
        steps = np.arange(one.copies) * self._strides[one.axis]
        members = (ranks[:, None] + steps).ravel()
        return self._replicas(members, [axis for axis in self._folded if axis != one.axis])

    def of_channel(self, channel: int) -> IntColumn:
        """Shape [replicas, 2]: sender and receiver."""
        one = self._graph.channels[channel]
        return self._replicas(self._global[[one.src, one.dst]], self._folded)

    def _replicas(self, ranks: IntColumn, axes: list[str]) -> IntColumn:
        steps = [range(0, self._sizes[axis] * self._strides[axis], self._strides[axis]) for axis in axes]
        offsets = np.array([sum(point) for point in product(*steps)], dtype=np.int64)
        return ranks + offsets[:, None]
