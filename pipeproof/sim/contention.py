"""Shared links: messages and collectives as flows that compete, where ``cost.network.contention`` is true.

Every rank has an outgoing and an incoming link inside its node, every network
card one to other nodes and one from them, every oversubscribed switch one to
other switches and one from them. After its latency a message is a flow
over the links that it uses; if a rank has less bandwidth to one peer than to
its whole node, that limits the message too. A collective is a ring: a flow from
each rank to the next in group order, after the latencies of its steps; it ends
with the last flow. An all-to-all is a flow between every two ranks. Flows share
links fairly: max-min rates by progressive filling, in exact arithmetic. All rates
grow equally until a link is full; the rates on it stay fixed and the others
keep growing (Bertsekas and Gallager, Data Networks, second edition, section
6.5.2). Without competition all times equal those of
``cost.network_times``, but for transfers between oversubscribed switches, which
there have the share of their cards alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

import simpy

from pipeproof.comm.generated_schedule import MAX_OPERATIONS, TOO_LARGE
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.cost.network_times import Network, Shape
from pipeproof.cost.transfer_times import NetworkTimes
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.ops import KINDS, OpKind
from pipeproof.sim.link_costs import bytes_of
from pipeproof.sim.op_durations import Durations
from pipeproof.specs.exact_times import GRID_US

Link = Hashable
"""The name of a link in one direction."""

_ZERO = Fraction(0)


def fair_rates(paths: Mapping[int, Iterable[Link]], capacity: Callable[[Link], Fraction]) -> dict[int, Fraction]:
    """The max-min fair rate of each flow, from the links of its path, at least one.

    Linear in links times distinct rates.
    """
    on_link: dict[Link, set[int]] = defaultdict(set)
    for flow, path in paths.items():
        for link in path:
            on_link[link].add(flow)
    room = {link: capacity(link) for link in on_link}
    rates: dict[int, Fraction] = {}
    while on_link:
        shares = {link: room[link] / len(flows) for link, flows in on_link.items()}
        least = min(shares.values())
        full = [link for link, share in shares.items() if share == least]
        for flow in sorted({flow for link in full for flow in on_link[link]}):
            rates[flow] = least
            for link in paths[flow]:
                on_link[link].discard(flow)
                room[link] -= least
        on_link = {link: flows for link, flows in on_link.items() if flows}
    return rates


@dataclass(slots=True, eq=False)
class _Flow:
    """A running flow: remaining bytes ``left`` at time ``since``, and the rate in bytes per tick from then on."""

    path: tuple[Link, ...]
    left: Fraction
    since: int
    done: simpy.Event
    rate: Fraction = _ZERO
    ends_at: int = -1


class FairShares:
    """Flows over links with ``capacity(link)`` bytes per tick. A flow ends on the tick of its last byte.

    ``watch``, if given, is called with the time and the rates by path after
    each change of rates, for tests and link figures.
    """

    def __init__(
        self,
        env: simpy.Environment,
        capacity: Callable[[Link], Fraction],
        watch: Callable[[int, list[tuple[tuple[Link, ...], Fraction]]], None] | None = None,
    ) -> None:
        self._env, self._capacity, self._watch = env, capacity, watch
        self._flows: dict[int, _Flow] = {}
        self._on_link: dict[Link, set[int]] = defaultdict(set)
        self._num_flows = 0
        self._changed: set[Link] = set()

    def start(self, path: tuple[Link, ...], num_bytes: Fraction) -> simpy.Event:
        """Send ``num_bytes`` over all links of ``path`` from now; return the event of the arrival of the last byte."""
        done = self._env.event()
        if not num_bytes:
            return done.succeed()
        number = self._num_flows
        self._num_flows += 1
        self._flows[number] = _Flow(path, num_bytes, int(self._env.now), done)
        for link in path:
            self._on_link[link].add(number)
        self._change(path)
        return done

    def _change(self, links: Iterable[Link]) -> None:
        """Recompute rates, once for all flows that start and end at the same time."""
        if not self._changed:
            self._env.timeout(0).callbacks.append(self._share)  # after everything already due at this time
        self._changed.update(links)

    def _share(self, _: Any) -> None:
        now = int(self._env.now)
        paths = {number: self._flows[number].path for number in self._reached(self._changed)}
        self._changed.clear()
        for number, rate in fair_rates(paths, self._capacity).items():
            flow = self._flows[number]
            if rate == flow.rate:
                continue
            flow.left = max(_ZERO, flow.left - flow.rate * (now - flow.since))
            flow.rate, flow.since = rate, now
            self._aim(number, now + ceil(flow.left / rate))
        if self._watch is not None:
            self._watch(now, [(flow.path, flow.rate) for flow in self._flows.values()])

    def _reached(self, links: Iterable[Link]) -> list[int]:
        """Numbers of the flows on these links and of all flows connected to them by shared links, sorted."""
        ahead, seen, connected = list(links), set(links), set[int]()
        while ahead:
            for number in self._on_link[ahead.pop()] - connected:
                connected.add(number)
                new = [link for link in self._flows[number].path if link not in seen]
                seen.update(new)
                ahead += new
        return sorted(connected)

    def _aim(self, number: int, ends_at: int) -> None:
        """Schedule the end of a flow; a change of its rate before then replaces it."""
        self._flows[number].ends_at = ends_at

        def over(_: Any) -> None:
            flow = self._flows.get(number)
            if flow is None or flow.ends_at != int(self._env.now):
                return
            del self._flows[number]
            for link in flow.path:
                self._on_link[link].discard(number)
            flow.done.succeed()
            self._change(flow.path)

        self._env.timeout(ends_at - int(self._env.now)).callbacks.append(over)


_Part = tuple[Fraction, tuple[Link, ...], Fraction]
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

    def _sent(self, source: int, ranks: Sequence[int], shape: Shape, num_bytes: Fraction) -> Iterator[_Part]:
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

    def _carry(self, flows: Sequence[_Part]) -> simpy.Event:
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

        def begin(_: simpy.Event) -> None:
            self._shares.start(path, num_bytes).callbacks.append(ended)

        self._env.timeout(ticks).callbacks.append(begin)
