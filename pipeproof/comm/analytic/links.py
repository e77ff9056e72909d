"""How long messages and collectives take on the links of a device.

A collective is a ring over its n ranks: n - 1 steps, in each of which every
rank sends 1/n of the whole tensor; an all-reduce is a reduce-scatter and an
all-gather. (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for
clusters of workstations, 2009.) It runs at the speed of its slowest link: the
network, as soon as a group of its axis lies on two nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from pipeproof.comm.analytic.devices import Device
from pipeproof.comm.transport import Transport, effective_transport
from pipeproof.specs.analytic import AnalyticSpec
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.plan import PlanSpec, TopologySpec
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.layers import Collective, CollectiveKind


def exact(value: float) -> Fraction:
    """The decimal that a number prints as: 0.7 is 7/10."""
    return Fraction(repr(value))


def crosses_nodes(topology: TopologySpec, axis: str, ranks_per_node: int) -> bool:
    """Whether some group of ``axis`` lies on more than one node; node k has global ranks from k * ranks_per_node.

    Groups of an axis lie inside blocks of (its size) x (the sizes before it in
    ``order``) ranks, so they stay on a node just where blocks fill nodes.
    """
    before = topology.order[: topology.order.index(axis)]
    block = prod(getattr(topology, name) for name in (*before, axis))
    size: int = getattr(topology, axis)
    return size > 1 and topology.num_ranks > ranks_per_node and ranks_per_node % block != 0


@dataclass(frozen=True, slots=True)
class Links:
    """Links between the ranks of a plan; times are exact, in microseconds."""

    plan: PlanSpec
    analytic: AnalyticSpec
    device: Device

    def crosses(self, axis: str) -> bool:
        """Whether groups of ``axis`` use the network."""
        return crosses_nodes(self.plan.topology, axis, self.analytic.ranks_per_node or self.device.ranks_per_node)

    def collective_bytes(self, collective: Collective, item_bytes: int) -> Fraction:
        """What each rank sends in one collective."""
        num_ranks: int = getattr(self.plan.topology, collective.axis)
        whole = Fraction(collective.numel * item_bytes)  # every rank enters with this much, but into a gather
        if collective.kind is CollectiveKind.ALL_GATHER:
            whole *= num_ranks
        rounds = 2 if collective.kind is CollectiveKind.ALL_REDUCE else 1
        return rounds * whole * (num_ranks - 1) / num_ranks

    def collective_us(self, collective: Collective, item_bytes: int) -> Fraction:
        """Time of one collective that has its links to itself."""
        num_ranks: int = getattr(self.plan.topology, collective.axis)
        steps = (num_ranks - 1) * (2 if collective.kind is CollectiveKind.ALL_REDUCE else 1)
        num_bytes = self.collective_bytes(collective, item_bytes)
        crosses = self.crosses(collective.axis)
        bandwidth = self.device.network if crosses else self.device.link
        return self._us(num_bytes, bandwidth, steps, crosses=crosses)

    def message_us(self, boundaries: Iterable[Boundary], transport: str) -> Fraction:
        """Time from a stage's ranks to those of the next: their tensors one after the other, gathers included."""
        return sum((self._one_message_us(boundary, transport) for boundary in boundaries), Fraction(0))

    def message_bytes(self, boundary: Boundary, transport: str) -> int:
        """What each rank of a stage sends of one tensor: the most of any, where ranks differ."""
        item_bytes = dtype_bytes(boundary.dtype)
        if boundary.changes_layout:
            by_sender = Counter[int]()
            for message in boundary.reshard(gradient=False):
                by_sender[message.sender] += message.length
            return max(by_sender.values()) * item_bytes
        num_slices = boundary.num_tp_ranks if _is_sliced(boundary, transport) else 1
        return prod(boundary.local_shape) // num_slices * item_bytes

    def _one_message_us(self, boundary: Boundary, transport: str) -> Fraction:
        crosses = self.crosses("pp")
        num_bytes = Fraction(self.message_bytes(boundary, transport))
        time = self._us(num_bytes, self.device.network if crosses else self.device.peer, 1, crosses=crosses)
        if _is_sliced(boundary, transport):
            share = prod(boundary.local_shape) // boundary.num_tp_ranks
            gather = Collective(CollectiveKind.ALL_GATHER, "tp", share, boundary.member)
            time += self.collective_us(gather, dtype_bytes(boundary.dtype))
        return time

    def _us(self, num_bytes: Fraction, bandwidth: float, steps: int, *, crosses: bool) -> Fraction:
        step = self.analytic.network_step_us if crosses else self.analytic.node_step_us
        bytes_per_us = exact(bandwidth) * 1000 * exact(self.analytic.link_efficiency)
        return exact(self.analytic.launch_us) + steps * exact(step) + num_bytes / bytes_per_us


def _is_sliced(boundary: Boundary, transport: str) -> bool:
    """Whether each rank sends its slice of the tensor, for the receivers to gather."""
    numel = prod(boundary.local_shape)
    is_partial = effective_transport(transport, numel, boundary.num_tp_ranks) is Transport.PARTIAL
    return is_partial and not boundary.changes_layout
