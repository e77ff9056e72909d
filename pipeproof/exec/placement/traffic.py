"""Bytes per step between each pair of ranks, by axis: messages of the graph, and collectives by their algorithm.

Collectives go around a ring, all-to-alls straight to each member, with the bytes of ``cost.network_times``. A ring
visits the nodes of its group one after the other, as NCCL's rings do, so its hops between nodes are as few as possible.
Trees and NVLink SHARP move other bytes over the same kinds of links.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.cost.network_times import Link, Network, ring_bytes
from pipeproof.cost.plan_times import reduced_dtype
from pipeproof.cost.transfer_times import NetworkTimes
from pipeproof.exec.placement.link_kinds import LinkKind, link_kind
from pipeproof.exec.placement.rank_placement import RankPlacement
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.ops import COLLECTIVE_KINDS, KINDS, SEND_KINDS, OpKind
from pipeproof.sim.link_costs import GlobalRanks, bytes_of

AXES = ("tp", "cp", "ep", "dp", "pp")
"""Axes in the order of tables; a message between stages is of ``pp``."""


@dataclass(frozen=True, eq=False)
class _Collective:
    """Collectives of one kind in the groups of one place of the graph; ``groups`` has shape [groups, members]."""

    axis: str
    kind: OpKind
    groups: IntColumn
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Flow:
    """Bytes from each sender to its receiver; ``pairs`` has shape [pairs, 2]."""

    axis: str
    pairs: IntColumn
    num_bytes: float


class Traffic:
    """Traffic of one step of a plan."""

    def __init__(self, lowered: LoweredPlan) -> None:
        self._lowered = replace(lowered, graph=lowered.canonical)

    @cached_property
    def _messages(self) -> tuple[Flow, ...]:
        graph, ranks = self._lowered.graph, GlobalRanks(self._lowered)
        sends = np.flatnonzero(graph.is_kind(SEND_KINDS))
        of_channel = _sums(graph.channel[sends], self._num_bytes[sends])
        return tuple(Flow("pp", ranks.of_channel(channel), num_bytes) for channel, num_bytes in of_channel.items())

    @cached_property
    def _collectives(self) -> tuple[_Collective, ...]:
        graph, ranks = self._lowered.graph, GlobalRanks(self._lowered)
        calls = np.flatnonzero(graph.is_kind(COLLECTIVE_KINDS) & (graph.group != NONE))
        first = np.array([group.ranks[0] for group in graph.groups], dtype=np.int64)
        calls = calls[graph.rank[calls] == first[graph.group[calls]]]  # every member contributes alike
        of_place = _sums(graph.group[calls] * len(KINDS) + graph.kind[calls], self._num_bytes[calls])
        result = []
        for place, num_bytes in of_place.items():
            group, kind = divmod(place, len(KINDS))
            if graph.groups[group].size > 1 and num_bytes:
                result.append(_Collective(graph.groups[group].axis, KINDS[kind], ranks.of_group(group), num_bytes))
        return tuple(result)

    @cached_property
    def _num_bytes(self) -> IntColumn:
        links, spec = self._lowered.links, self._lowered.spec
        if links is None:  # only the types are used
            unused = Link(Fraction(0), Fraction(1))
            links = NetworkTimes(Network(1, unused, unused, unused), spec.run.dtype, reduced_dtype(spec))
        return bytes_of(self._lowered, links)

    def flows(self, order: IntColumn) -> Iterator[Flow]:
        """All flows; ``order`` is the position of each rank among all, those of a node next to each other."""
        yield from self._messages
        for call in self._collectives:
            size = call.groups.shape[1]
            if call.kind is OpKind.ALL_TO_ALL:
                for distance in range(1, size):
                    pairs = np.stack([call.groups, np.roll(call.groups, -distance, axis=1)], axis=2)
                    yield Flow(call.axis, pairs.reshape(-1, 2), call.num_bytes / size)
                continue
            ring = np.take_along_axis(call.groups, np.argsort(order[call.groups], axis=1), axis=1)
            pairs = np.stack([ring, np.roll(ring, -1, axis=1)], axis=2)
            if call.kind is OpKind.BROADCAST:
                pairs = pairs[:, :-1]
            yield Flow(call.axis, pairs.reshape(-1, 2), float(ring_bytes(call.kind, size, call.num_bytes)))

    def between(self, nodes: IntColumn) -> dict[str, float]:
        """Bytes per step between nodes, by axis; ``nodes`` has the node of each rank."""
        order = np.argsort(np.argsort(nodes, kind="stable"), kind="stable")
        result: dict[str, float] = defaultdict(float)
        for flow in self.flows(order):
            ends = nodes[flow.pairs]
            result[flow.axis] += flow.num_bytes * int((ends[:, 0] != ends[:, 1]).sum())
        return {axis: result[axis] for axis in AXES if axis in result}

    def by_kind(self, placements: Sequence[RankPlacement]) -> dict[tuple[str, LinkKind], float]:
        """Bytes per step by axis and kind of link, in the order of axes and kinds."""
        keys = [(place.switches, place.node_key, place.host_key, rank) for rank, place in enumerate(placements)]
        order = np.argsort(np.array(sorted(range(len(keys)), key=keys.__getitem__)))
        kinds: dict[tuple[int, int], LinkKind] = {}
        result: dict[tuple[str, LinkKind], float] = defaultdict(float)
        for flow in self.flows(order):
            for source, target in flow.pairs.tolist():
                if (source, target) not in kinds:
                    kinds[source, target] = link_kind(placements[source], placements[target])
                result[flow.axis, kinds[source, target]] += flow.num_bytes
        return {(axis, kind): result[axis, kind] for axis in AXES for kind in LinkKind if (axis, kind) in result}


def _sums(keys: IntColumn, values: IntColumn) -> Mapping[int, int]:
    """Sum of the values of each key, in the order of keys."""
    distinct, number = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(sums, number, values)
    return dict(zip(distinct.tolist(), sums.tolist(), strict=True))
