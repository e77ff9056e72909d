"""Shared links: messages and collectives as flows that compete, where ``cost.network.contention`` is true.

Every rank has an outgoing and an incoming link inside its node, every network
card one to other nodes and one from them, every oversubscribed switch one to
other switches and one from them. After its latency a message is a flow
over the links that it uses; if a rank has less bandwidth to one peer than to
its whole node, that limits the message too. A collective is a ring: a flow from
each rank to the next in group order, after the latencies of its steps; it ends
with the last flow. An all-to-all is a flow between every two ranks. Flows share
links fairly (``fair_shares``). Without competition all times equal those of
``cost.network_times``, but for transfers between oversubscribed switches, which
there have the share of their cards alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import simpy

from pipeproof.comm.generated_schedule import MAX_OPERATIONS, TOO_LARGE
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.cost.network_times import Network, Shape
from pipeproof.cost.transfer_times import NetworkTimes
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.ops import KINDS, OpKind
from pipeproof.sim.fair_shares import FairShares, Link
from pipeproof.sim.link_costs import bytes_of
from pipeproof.sim.op_durations import Durations
from pipeproof.specs.exact_times import GRID_US

_Flow = tuple[Fraction, tuple[Link, ...], Fraction]
"""Latency without the launch, path, bytes."""

OUT, IN, PEER = "out", "in", "peer"
"""Kinds of links: outgoing, incoming, or from one rank to one peer."""


def shared_network(lowered: LoweredPlan) -> Network | None:
    """The network whose links the messages and collectives of a plan share, None without contention."""
    links = lowered.links
    return links.network if isinstance(links, NetworkTimes) and links.network.contention else None


def every_rank_of(lowered: LoweredPlan) -> LoweredPlan:
    """The unfolded plan: ranks that run the same program do not share links alike.

    Raises:
        BadPlanAtError: PP116, the unfolded plan has too many operations.
    """
    if not lowered.folded:
        return lowered
    num_ops = lowered.graph.num_ops * (lowered.mesh.num_ranks // lowered.graph.num_ranks)
    if num_ops > MAX_OPERATIONS:
        message = (
            f"links are shared by the {num_ops:,} operations of {lowered.mesh.num_ranks:,} ranks, which are simulated "
            f"one by one, and this release holds {MAX_OPERATIONS:,}"
        )
        fix = "set cost.network.contention to false, or simulate fewer micro-batches or replicas"
        finding = TOO_LARGE.finding(message, help=fix)
        raise BadPlanAtError(finding, ("cost", "network", "contention"))
    return lowered.unfolded()


class SharedLinks:
    """Messages and collectives of an unfolded graph as flows over shared links."""

    def __init__(self, env: simpy.Environment, lowered: LoweredPlan, durations: Durations) -> None:
        assert not lowered.folded
        assert isinstance(lowered.links, NetworkTimes)
        self._env, self._graph, self._network = env, lowered.graph, lowered.links.network
        self._bytes = bytes_of(lowered, lowered.links).tolist()
        self._per_us, self._per_ns = durations.ticks_per_us, int(durations.ticks_per_us * GRID_US)
        self._shares = FairShares(env, self._capacity)

    def message(self, send: int) -> simpy.Event:
        """Start a message; return the event of its arrival."""
        channel = self._graph.channels[int(self._graph.channel[send])]
        source, target = channel.src, channel.dst
        network, crosses = self._network, self._crosses(source, target)
        link = network.between if crosses else network.peer
        path = self._path(source, target)
        if not crosses and network.peer != network.node:
            path = (*path, (PEER, source, target))
        return self._carry([(link.latency_us, path, Fraction(self._bytes[send]))])

    def collective(self, calls: Sequence[int]) -> simpy.Event:
        """Start a collective whose last member has just arrived; return the event of its end."""
        graph, network = self._graph, self._network
        ranks = graph.groups[int(graph.group[calls[0]])].ranks
        kind, num_bytes = KINDS[graph.kind[calls[0]]], Fraction(max(self._bytes[call] for call in calls))
        if len(ranks) == 1:
            return self._env.timeout(0)
        shape = Shape.of([*ranks], network.ranks_per_node, network.ranks_per_nic, network.ranks_per_switch)
        if kind is OpKind.ALL_TO_ALL:
            return self._carry([flow for rank in ranks for flow in self._sent(rank, ranks, shape, num_bytes)])
        cost = network.way(kind, shape, num_bytes)
        ring = pairwise(ranks if kind is OpKind.BROADCAST else (*ranks, ranks[0]))
        steps_us = cost.latency_us - network.launch_us
        return self._carry([(steps_us, self._path(source, target), cost.num_bytes) for source, target in ring])

    def _sent(self, source: int, ranks: Sequence[int], shape: Shape, num_bytes: Fraction) -> Iterator[_Flow]:
        """The flows from one rank of an all-to-all to every other rank."""
        near, far = self._network.pieces(shape, sum(not self._crosses(source, rank) for rank in ranks), num_bytes)
        for target in ranks:
            if target != source:
                way = far if self._crosses(source, target) else near
                yield way.latency_us, self._path(source, target), way.num_bytes

    def _crosses(self, source: int, target: int) -> bool:
        return source // self._network.ranks_per_node != target // self._network.ranks_per_node

    def _path(self, source: int, target: int) -> tuple[Link, ...]:
        """Links between two ranks: over their network cards and switches, or inside their node."""
        if self._crosses(source, target):
            cards: tuple[Link, ...] = ((OUT, "card", self._card(source)), (IN, "card", self._card(target)))
            below = self._network.ranks_per_switch
            if below is None or source // below == target // below:
                return cards
            return (*cards, (OUT, "switch", source // below), (IN, "switch", target // below))
        return (OUT, "node", source), (IN, "node", target)

    def _card(self, rank: int) -> int:
        return rank // self._network.ranks_per_nic

    def _capacity(self, link: Link) -> Fraction:
        """Bytes per tick."""
        assert isinstance(link, tuple)
        network = self._network
        if link[1] == "switch":
            assert network.switches is not None
            return network.uplink(network.switches.ranks // network.ranks_per_nic).bytes_per_us / self._per_us
        link_spec = network.peer if link[0] == PEER else network.between if link[1] == "card" else network.node
        return link_spec.bytes_per_us / self._per_us

    def _carry(self, flows: Sequence[_Flow]) -> simpy.Event:
        """Start flows; return the event of the end of the last one, rounded up to whole nanoseconds from now."""
        begun, over = int(self._env.now), self._env.event()
        missing = len(flows)

        def ended(_: simpy.Event) -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                took = int(self._env.now) - begun
                self._env.timeout(-took % self._per_ns).callbacks.append(lambda _: over.succeed())

        for latency_us, path, num_bytes in flows:
            latency = (self._network.launch_us + latency_us) * self._per_us
            assert latency.denominator == 1, "ticks hold latencies whole"
            self._after(int(latency), path, num_bytes, ended)
        return over

    def _after(
        self, ticks: int, path: tuple[Link, ...], num_bytes: Fraction, ended: Callable[[simpy.Event], None]
    ) -> None:
        """Start one flow after its latency."""

        def begin(_: simpy.Event) -> None:
            self._shares.start(path, num_bytes).callbacks.append(ended)

        self._env.timeout(ticks).callbacks.append(begin)
