"""Messages and collectives that share links: what carries them in the reference model where ``cost.network`` says so.

Every rank has a way out and a way in inside its node, and every network card
has one to other nodes and one from them. A message is a flow over the two that
it uses, once its latency has passed; where a rank has less bandwidth to one
other than to all of its node, a message is bound by that, too. A collective
goes around its ring, from each rank to the next in group order, once the
latencies of its steps have passed, and is done when the last of these flows
is; an all-to-all is a flow between each two ranks. Flows share what they meet
on fairly (``fair_shares``). Alone, everything takes what
``comm.links.network`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

import simpy

from pipeproof.comm.links.network import Network
from pipeproof.comm.links.shape import Shape
from pipeproof.comm.links.times import NetworkTimes
from pipeproof.comm.lower import MAX_OPERATIONS, TOO_LARGE
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.schedule.ops import KINDS, OpKind
from pipeproof.sim.costs import Durations
from pipeproof.sim.fair_shares import FairShares, Link
from pipeproof.sim.link_costs import bytes_of
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.times import GRID_US

_Flow = tuple[Fraction, tuple[Link, ...], Fraction]
"""Latency beside the launch, path, bytes."""

OUT, IN, BOTH = "out", "in", "between two"
"""What a link is: a way out, a way in, or the way from one rank to another."""


def shared_network(lowered: LoweredPlan) -> Network | None:
    """The network whose links a plan's messages and collectives share; None where each has them to itself."""
    links = lowered.links
    return links.network if isinstance(links, NetworkTimes) and links.network.contention else None


def require_own_links(lowered: LoweredPlan) -> None:
    """For what disturbs the times of single messages and collectives.

    Raises:
        BadPlanAtError: PP106, these come from links that are shared.
    """
    if shared_network(lowered) is None:
        return
    message = "`cost.network.contention` is true, and noise is for messages and collectives with links to themselves"
    finding = Finding("PP106", Severity.ERROR, message, help="set it to false for runs with noise")
    raise BadPlanAtError(finding, ("cost", "network", "contention"))


def every_rank_of(lowered: LoweredPlan) -> LoweredPlan:
    """The plan with each rank for itself: ranks that do alike do not share links alike.

    Raises:
        BadPlanAtError: PP116, these are too many operations.
    """
    if not lowered.folded:
        return lowered
    num_ops = lowered.graph.num_ops * (lowered.mesh.num_ranks // lowered.graph.num_ranks)
    if num_ops > MAX_OPERATIONS:
        message = (
            f"links are shared by the {num_ops:,} operations of {lowered.mesh.num_ranks:,} ranks, which are simulated "
            f"one by one, and this release holds {MAX_OPERATIONS:,}"
        )
        mend = "set cost.network.contention to false, or simulate fewer micro-batches or replicas"
        finding = Finding(TOO_LARGE.code, Severity.ERROR, message, help=mend)
        raise BadPlanAtError(finding, ("cost", "network", "contention"))
    return lowered.unfolded()


class SharedLinks:
    """Carries the messages and collectives of a graph in which every rank stands for itself."""

    def __init__(self, env: simpy.Environment, lowered: LoweredPlan, durations: Durations) -> None:
        assert not lowered.folded
        assert isinstance(lowered.links, NetworkTimes)
        self._env, self._graph, self._network = env, lowered.graph, lowered.links.network
        self._bytes = bytes_of(lowered, lowered.links).tolist()
        self._per_us, self._per_ns = durations.ticks_per_us, int(durations.ticks_per_us * GRID_US)
        self._shares = FairShares(env, self._capacity)

    def message(self, send: int) -> simpy.Event:
        """A message begins now; the event that it has arrived."""
        channel = self._graph.channels[int(self._graph.channel[send])]
        source, target = channel.src, channel.dst
        network, crosses = self._network, self._crosses(source, target)
        link = network.between if crosses else network.peer
        path = self._path(source, target)
        if not crosses and network.peer != network.node:
            path = (*path, (BOTH, source, target))
        return self._carry([(link.latency_us, path, Fraction(self._bytes[send]))])

    def collective(self, calls: Sequence[int]) -> simpy.Event:
        """The last member of a collective has come now; the event that it is done."""
        graph, network = self._graph, self._network
        ranks = graph.groups[int(graph.group[calls[0]])].ranks
        kind, num_bytes = KINDS[graph.kind[calls[0]]], Fraction(max(self._bytes[call] for call in calls))
        if len(ranks) == 1:
            return self._env.timeout(0)
        shape = Shape.of([*ranks], network.ranks_per_node, network.ranks_per_nic)
        if kind is OpKind.ALL_TO_ALL:
            return self._carry([flow for rank in ranks for flow in self._sent(rank, ranks, shape, num_bytes)])
        way = network.way(kind, shape, num_bytes)
        ring = pairwise(ranks if kind is OpKind.BROADCAST else (*ranks, ranks[0]))
        steps_us = way.latency_us - network.launch_us
        return self._carry([(steps_us, self._path(source, target), way.num_bytes) for source, target in ring])

    def _sent(self, source: int, ranks: Sequence[int], shape: Shape, num_bytes: Fraction) -> Iterator[_Flow]:
        """What one rank of an all-to-all sends to each other."""
        near, far = self._network.pieces(shape, sum(not self._crosses(source, one) for one in ranks), num_bytes)
        for target in ranks:
            if target != source:
                way = far if self._crosses(source, target) else near
                yield way.latency_us, self._path(source, target), way.num_bytes

    def _crosses(self, source: int, target: int) -> bool:
        return source // self._network.ranks_per_node != target // self._network.ranks_per_node

    def _path(self, source: int, target: int) -> tuple[Link, ...]:
        """Over the network cards of two ranks, or inside their node."""
        if self._crosses(source, target):
            return (OUT, "card", self._card(source)), (IN, "card", self._card(target))
        return (OUT, "node", source), (IN, "node", target)

    def _card(self, rank: int) -> int:
        return rank // self._network.ranks_per_nic

    def _capacity(self, link: Link) -> Fraction:
        """Bytes for each tick."""
        assert isinstance(link, tuple)
        network = self._network
        one = network.peer if link[0] == BOTH else network.between if link[1] == "card" else network.node
        return one.bytes_per_us / self._per_us

    def _carry(self, flows: Sequence[_Flow]) -> simpy.Event:
        """Start flows; the event that the last has ended.

        That is a whole number of nanoseconds from now.
        """
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
        """Start one flow when its latency has passed."""

        def begin(_: simpy.Event) -> None:
            self._shares.start(path, num_bytes).callbacks.append(ended)

        self._env.timeout(ticks).callbacks.append(begin)
