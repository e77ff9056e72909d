"""Times of the messages and collectives of a plan's stages, on the slowest of their links.

These are the times that a stage includes, and the latency for which schedules
are made. ``network_times`` has the formulas, and the times of single groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from types import MappingProxyType

import numpy as np

from pipeproof.cost.network_times import Network, Shape
from pipeproof.schedule.columns import IntColumn
from pipeproof.schedule.op_parts import part_starts
from pipeproof.schedule.ops import OpKind
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.plan_sections import TopologySpec
from pipeproof.stages.describe.boundary import Boundary, Transport, effective_transport
from pipeproof.stages.describe.layer import Collective, CollectiveKind
from pipeproof.stages.describe.model_family import describe_boundaries


def groups_of(topology: TopologySpec, *axes: str) -> IntColumn:
    """The global ranks of all groups over some axes together, shape [groups, members]."""
    order = topology.order[::-1]  # the axis that changes fastest is the last
    members = [dim for dim, axis in enumerate(order) if axis in axes]
    others = [dim for dim, axis in enumerate(order) if axis not in axes]
    grid = np.arange(topology.num_ranks).reshape([getattr(topology, axis) for axis in order])
    return np.ascontiguousarray(grid.transpose(*others, *members).reshape(-1, prod(grid.shape[dim] for dim in members)))


OP_KIND = MappingProxyType(
    {
        CollectiveKind.ALL_REDUCE: OpKind.ALL_REDUCE,
        CollectiveKind.ALL_GATHER: OpKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER: OpKind.REDUCE_SCATTER,
        CollectiveKind.ALL_TO_ALL: OpKind.ALL_TO_ALL,
    }
)
"""The operation that a layer's collective becomes."""


@dataclass(frozen=True)
class Links:
    """Links between the ranks of a plan; times are exact, in microseconds."""

    plan: PlanSpec
    network: Network
    _shapes: dict[str, frozenset[Shape]] = field(default_factory=dict, repr=False, compare=False)

    def crosses(self, axis: str) -> bool:
        """Return True if groups of ``axis`` use the network."""
        return any(shape.crosses for shape in self.shapes(axis))

    def shapes(self, axis: str) -> frozenset[Shape]:
        """Shapes of the groups of ``axis``."""
        if axis not in self._shapes:
            self._shapes[axis] = self.network.shapes(groups_of(self.plan.topology, axis))
        return self._shapes[axis]

    def collective_bytes(self, collective: Collective, item_bytes: int) -> Fraction:
        """Bytes that each rank sends to other ranks; node-limited routing changes only the time."""
        num_ranks: int = getattr(self.plan.topology, collective.axis)
        whole = Fraction(collective.numel * collective.item_bytes(item_bytes))  # each rank's input
        if collective.kind is CollectiveKind.ALL_GATHER:
            whole *= num_ranks
        rounds = 2 if collective.kind is CollectiveKind.ALL_REDUCE else 1
        return rounds * whole * (num_ranks - 1) / num_ranks

    def collective_us(self, collective: Collective, item_bytes: int) -> Fraction:
        """Time of one collective that has its links to itself."""
        num_bytes = Fraction(collective.numel * collective.item_bytes(item_bytes))
        kind = OP_KIND[collective.kind]
        return max(self.network.collective_us(kind, shape, num_bytes) for shape in self.shapes(collective.axis))

    def message_us(self, boundaries: Iterable[Boundary], transport: str) -> Fraction:
        """Time from a stage's ranks to the ranks of the next: their tensors one after the other, gathers included."""
        if self.plan.transport.messages == "packed":
            return self._slowest_us(sum(message_sizes(boundaries, transport, packed=True)))
        return sum((self._one_message_us(boundary, transport) for boundary in boundaries), Fraction(0))

    def messages(self) -> tuple[Fraction, ...]:
        """By edge, the time of its slower direction and largest message."""
        transport = self.plan.transport
        return tuple(
            max(
                self.message_us(members, name)
                for members in edge.variants
                for name in {transport.forward, transport.backward}
            )
            for edge in describe_boundaries(self.plan)
        )

    def _one_message_us(self, boundary: Boundary, transport: str) -> Fraction:
        time = self._slowest_us(message_bytes(boundary, transport))
        if _is_sliced(boundary, transport):
            share = prod(boundary.local_shape) // boundary.num_tp_ranks
            gather = Collective(CollectiveKind.ALL_GATHER, "tp", share, boundary.member)
            time += self.collective_us(gather, dtype_bytes(boundary.dtype))
        return time

    def _slowest_us(self, num_bytes: int) -> Fraction:
        return self.network.slowest_message_us(Fraction(num_bytes), crosses=self.crosses("pp"))


def message_sizes(boundaries: Iterable[Boundary], transport: str, *, packed: bool) -> list[int]:
    """Bytes of each message that carries the tensors of an edge: one for each tensor, or one packed one."""
    sizes = [message_bytes(boundary, transport) for boundary in boundaries]
    return [part_starts(sizes)[-1]] if packed and len(sizes) > 1 else sizes


def message_bytes(boundary: Boundary, transport: str) -> int:
    """Bytes that each rank of a stage sends of one tensor: the maximum, if ranks differ."""
    item_bytes = dtype_bytes(boundary.dtype)
    if boundary.changes_layout:
        by_sender = Counter[int]()
        for message in boundary.reshard(gradient=False):
            by_sender[message.sender] += message.length
        return max(by_sender.values()) * item_bytes
    num_slices = boundary.num_tp_ranks if _is_sliced(boundary, transport) else 1
    return prod(boundary.local_shape) // num_slices * item_bytes


def _is_sliced(boundary: Boundary, transport: str) -> bool:
    """Return True if each rank sends its slice of the tensor, for the receivers to gather."""
    numel = prod(boundary.local_shape)
    is_partial = effective_transport(transport, numel, boundary.num_tp_ranks) is Transport.PARTIAL
    return is_partial and not boundary.changes_layout
