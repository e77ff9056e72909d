"""Times of the messages and collectives of a graph, in nanoseconds: one look-up for each distinct case."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.cost.transfer_times import LinkTimes
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import packed
from pipeproof.schedule.op_parts import TensorPart, part_starts
from pipeproof.schedule.op_table import Group, TensorSpec
from pipeproof.schedule.ops import COLLECTIVE_KINDS, KIND_CODE, KINDS, META_KINDS, SEND_KINDS, OpKind
from pipeproof.sim.gradient_buckets import bucket_times
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.exact_times import GRID_US, rounded_up

_USUAL_DIMS = 3
"""Dims of an activation, for META messages that name no tensor."""


@dataclass(frozen=True, eq=False)
class LinkDurations:
    """Nanoseconds by op id: ``collectives`` from the arrival of the last member, ``messages`` at their sends, else 0.

    ``inside`` is the total time of the collectives inside a computation.
    """

    collectives: IntColumn
    messages: IntColumn
    inside: IntColumn


def link_durations(lowered: LoweredPlan, links: LinkTimes) -> LinkDurations:
    """Times of all messages and collectives between ranks. Linear in operations, but for sorting.

    Raises:
        BadPlanAtError: PP161, a profile lacks a time.
    """
    graph, ranks = lowered.graph, GlobalRanks(lowered)
    num_bytes = bytes_of(lowered, links)
    collectives, messages, inside = (np.zeros(graph.num_ops, dtype=np.int64) for _ in range(3))
    calls = np.flatnonzero(graph.is_kind(COLLECTIVE_KINDS) & (graph.group != NONE))
    for rows, example in _distinct(calls, graph.kind, graph.group, num_bytes):
        kind, groups = KINDS[graph.kind[example]], ranks.of_group(int(graph.group[example]))
        collectives[rows] = rounded_up(links.collective_us(kind, groups, int(num_bytes[example]))) / GRID_US
    if lowered.spec.cost.bucket_size is not None:
        for op_id, us in bucket_times(lowered, links, num_bytes).items():
            collectives[op_id] = rounded_up(us) / GRID_US
    sends = np.flatnonzero(graph.is_kind(SEND_KINDS))
    for rows, example in _distinct(sends, graph.channel, num_bytes):
        pairs = ranks.of_channel(int(graph.channel[example]))
        messages[rows] = rounded_up(links.message_us(pairs, int(num_bytes[example]))) / GRID_US
    children = calls[graph.parent[calls] != NONE]
    np.add.at(inside, graph.parent[children], collectives[children])
    return LinkDurations(collectives, messages, inside)


def bytes_of(lowered: LoweredPlan, links: LinkTimes) -> IntColumn:
    """Bytes by op id: those that a send sends, and those that a member contributes to a collective.

    A shape is an int64 for each dim.
    """
    graph = lowered.graph
    declared = {entry.name for entry in lowered.spec.boundaries if entry.dtype is not None}
    run_dtype = lowered.spec.run.dtype

    def item_bytes(tensor: TensorSpec | TensorPart) -> int:
        is_of_model = tensor.dtype == run_dtype and tensor.member not in declared
        return dtype_bytes(links.dtype if is_of_model else tensor.dtype)

    of_tensors = np.array([*map(item_bytes, graph.tensors), dtype_bytes(links.dtype)], dtype=np.int64)
    item = of_tensors[graph.tensor]  # the last entry where there is no tensor
    children = np.flatnonzero(graph.parent != NONE)
    reduced = children[graph.kind[graph.parent[children]] == KIND_CODE[OpKind.REDUCE_GRAD]]
    item[reduced] = dtype_bytes(links.gradient_dtype)
    result: IntColumn = (graph.stop - graph.start) * item
    for number, tensor in enumerate(graph.tensors):
        if tensor.parts:
            sizes = [prod(part.shape) * item_bytes(part) for part in tensor.parts]
            result[graph.tensor == number] = part_starts(sizes)[-1]
    shapes = np.flatnonzero(graph.is_kind(META_KINDS))
    num_dims = np.array([*(len(tensor.shape) for tensor in graph.tensors), _USUAL_DIMS], dtype=np.int64)
    result[shapes] = num_dims[graph.tensor[shapes]] * dtype_bytes("int64")
    return result


def _distinct(rows: IntColumn, *columns: IntColumn) -> list[tuple[IntColumn, int]]:
    """Sets of rows that are equal in these columns, each with one example row."""
    if not len(rows):
        return []
    _, number = np.unique(packed(*(column[rows] for column in columns)), return_inverse=True)
    order = np.argsort(number, kind="stable")
    sets = np.split(rows[order], np.cumsum(np.bincount(number))[:-1])
    return [(members, int(members[0])) for members in sets]


class GlobalRanks:
    """Global ranks of the groups and channels of a graph, one row for each replica of a folded graph."""

    def __init__(self, lowered: LoweredPlan) -> None:
        self._graph, mesh = lowered.graph, lowered.mesh
        self._global = np.array(lowered.graph.global_rank, dtype=np.int64)
        self._strides = {axis: prod(mesh.sizes[:index]) for index, axis in enumerate(mesh.axes)}
        self._sizes = dict(zip(mesh.axes, mesh.sizes, strict=True))
        self._folded = [
            axis
            for axis in mesh.axes
            if lowered.folded and not (self._global // self._strides[axis] % self._sizes[axis]).any()
        ]

    def of_group(self, group: int) -> IntColumn:
        """Shape [replicas, members]."""
        members_of: Group = self._graph.groups[group]
        ranks = self._global[list(members_of.ranks)]
        if members_of.copies == 1:
            return self._replicas(ranks, self._folded)
        steps = np.arange(members_of.copies) * self._strides[members_of.axis]
        members = (ranks[:, None] + steps).ravel()
        return self._replicas(members, [axis for axis in self._folded if axis != members_of.axis])

    def of_channel(self, channel: int) -> IntColumn:
        """Shape [replicas, 2]: sender and receiver."""
        ends = self._graph.channels[channel]
        return self._replicas(self._global[[ends.src, ends.dst]], self._folded)

    def _replicas(self, ranks: IntColumn, axes: list[str]) -> IntColumn:
        steps = [range(0, self._sizes[axis] * self._strides[axis], self._strides[axis]) for axis in axes]
        offsets = np.array([sum(point) for point in product(*steps)], dtype=np.int64)
        return ranks + offsets[:, None]
