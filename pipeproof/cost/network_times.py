"""Times of messages and collectives on the links of nodes and between them.

Every transfer has its links to itself.

Everything takes ``launch_us``, a latency for each step, and its bytes at the
bandwidth of the slowest link that it uses. For n ranks with an input of B bytes
each, this gives:

- ring all-reduce: 2 (n - 1) steps, 2 B (n - 1) / n bytes through each rank;
  reduce-scatter: half of both; all-gather: n - 1 steps, B (n - 1) bytes
  (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
  workstations, 2009; Thakur, Rabenseifner and Gropp, Optimization of
  collective communication operations in MPICH, 2005);
- tree all-reduce: a chain inside each node and two binary trees between nodes,
  each with half of the bytes (Sanders, Speck and Traeff, Two-tree algorithms
  for full bandwidth broadcast, reduction and scan, 2009; NCCL since 2.4). Up
  and down these are 2 log2(nodes) steps between nodes and 2 (ranks of a node
  - 1) inside, and 2 B bytes through each rank. Two ranks go as a ring;
- broadcast: a pipeline along the ring, n - 1 steps and B bytes;
- all-to-all: each rank sends B / n directly to each other rank, over the node's
  links inside its node and over its network card to the rest, all at
  once. The slower of the two ways counts. If a token goes once to each of
  at most m nodes for its k experts, only m / k of these bytes cross the
  network, and inside its node each rank passes on B / (ranks of the node) to
  each other rank, in a further step (arXiv:2412.19437, section 3.2.2);
- barrier: an all-reduce of nothing.

The steps of a ring run together: each takes as long as its slowest link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType
from typing import Self

import numpy as np

from pipeproof.cost.device_tables import exact, moved_us
from pipeproof.cost.devices import Device
from pipeproof.diagnostics.finding import BadPlanAtError, Finding, Severity
from pipeproof.schedule.columns import IntColumn
from pipeproof.schedule.ops import GATHER_KINDS, OpKind
from pipeproof.specs.cost import Algorithm, AnalyticSpec, EdgeSpec, LinkSpec, NetworkSpec
from pipeproof.specs.cost_table import CollectiveCurve
from pipeproof.specs.model import MoeSpec

DEFAULT_LINK_EFFICIENCY = 0.75
"""Share of the bandwidth of links that were not measured, as reached by four H200 (``costs-measured.md``)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``on_nodes`` are the members on each node that has some; ``on_cards`` for each card (its members, its node's)."""

    num_ranks: int
    on_nodes: tuple[int, ...]
    on_cards: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranks: list[int], ranks_per_node: int, ranks_per_nic: int) -> Self:
        """The shape of a group of global ranks.

        Node k has the ranks from k * ``ranks_per_node`` on, card k from k * ``ranks_per_nic`` on.
        """
        nodes = Counter(rank // ranks_per_node for rank in ranks)
        cards = Counter(rank // ranks_per_nic for rank in ranks)
        on_cards = sorted((count, nodes[card * ranks_per_nic // ranks_per_node]) for card, count in cards.items())
        return cls(len(ranks), tuple(sorted(nodes.values())), tuple(on_cards))

    @property
    def crosses(self) -> bool:
        """True if the group is on several nodes."""
        return len(self.on_nodes) > 1

    @property
    def cards_per_node(self) -> int:
        """Network cards of the members on a node: the fewest on any."""
        return min(-(-on_node // on_card) for on_card, on_node in self.on_cards)

    @property
    def has_neighbours(self) -> bool:
        """True if some members share a node."""
        return self.on_nodes[-1] > 1


@dataclass(frozen=True, slots=True)
class Link:
    """One sort of link, in one direction."""

    latency_us: Fraction
    bytes_per_us: Fraction

    @classmethod
    def of(cls, spec: LinkSpec | EdgeSpec) -> Self:
        """The link that a plan describes."""
        return cls(spec.latency_us, exact(spec.bandwidth) * 1000)

    def message_us(self, num_bytes: Fraction) -> Fraction:
        """Time of one message that has the link to itself."""
        return self.latency_us + num_bytes / self.bytes_per_us


_RING: Mapping[OpKind, Callable[[int], tuple[int, Fraction]]] = MappingProxyType(
    {
        OpKind.ALL_REDUCE: lambda n: (2 * (n - 1), Fraction(2 * (n - 1), n)),
        OpKind.BARRIER: lambda n: (2 * (n - 1), Fraction(2 * (n - 1), n)),
        OpKind.REDUCE_SCATTER: lambda n: (n - 1, Fraction(n - 1, n)),
        OpKind.ALL_GATHER: lambda n: (n - 1, Fraction(n - 1)),
        OpKind.BROADCAST: lambda n: (n - 1, Fraction(1)),
    }
)
"""Collectives that go around a ring of n ranks: (steps, bytes through each rank for a byte that each puts in)."""


_REDUCTIONS = frozenset({OpKind.ALL_REDUCE, OpKind.BARRIER})
"""Collectives that may also use trees."""


@dataclass(frozen=True, slots=True)
class Way:
    """One algorithm of a collective: latencies in all, and bytes through each rank."""

    latency_us: Fraction
    num_bytes: Fraction


@dataclass(frozen=True, slots=True)
class Routing:
    """Each token has ``top_k`` experts, on at most ``nodes_per_token`` nodes, and goes once to each of these.

    Without a limit the experts are on any ranks with equal probability, and a token also goes once to each rank
    (``by_node``).
    """

    top_k: int
    nodes_per_token: int | None

    def reached(self, places: int) -> Fraction:
        """The mean number of distinct ``places`` that hold the experts of a token."""
        return places * (1 - Fraction(places - 1, places) ** self.top_k)

    def nodes(self, shape: Shape) -> Fraction:
        """The number of nodes to which a token goes."""
        nodes = len(shape.on_nodes)
        if self.nodes_per_token is None:
            return self.reached(nodes)
        return Fraction(min(self.nodes_per_token, self.top_k, nodes))


@dataclass(frozen=True, slots=True)
class Network:
    """Links inside nodes of ``ranks_per_node`` and between them; times are exact, in microseconds.

    ``node`` is the link of a rank to all others of its node together, ``peer``
    to one of them, ``between`` the link of a network card, which
    ``ranks_per_nic`` neighbours share. ``routing`` is for all-to-alls that are
    not even.
    """

    ranks_per_node: int
    node: Link
    peer: Link
    between: Link
    launch_us: Fraction = Fraction(0)
    ranks_per_nic: int = 1
    algorithm: Algorithm = "ring"
    routing: Routing | None = None
    edges: tuple[tuple[tuple[int, int], Link], ...] = ()
    """By sender and receiver, the whole measured time of messages."""
    curves: tuple[CollectiveCurve, ...] = ()
    """Measured collectives inside a node, which take the place of rings there."""
    uses_all_cards: bool = False
    """True if rings across nodes use the network cards of all their members, as NCCL's rings do."""

    @classmethod
    def of_spec(cls, spec: NetworkSpec) -> Self:
        """The network of a plan that describes all of it; a single node never uses links between nodes."""
        assert spec.ranks_per_node is not None
        assert spec.node is not None
        node = Link.of(spec.node)
        between = node if spec.between is None else Link.of(spec.between)
        launch = spec.launch_us or Fraction(0)
        return cls(
            spec.ranks_per_node,
            node,
            node,
            between,
            launch,
            spec.ranks_per_nic,
            spec.algorithm,
            edges=_edges_of(spec),
        )

    @classmethod
    def of_device(
        cls,
        analytic: AnalyticSpec,
        device: Device,
        spec: NetworkSpec | None = None,
        curves: tuple[CollectiveCurve, ...] = (),
    ) -> Self:
        """The links of a data sheet at the plan's efficiency; ``spec`` has the other keys.

        If the plan gives ``link_efficiency``, measured ``curves`` do not apply, and all collectives are rings of single
        links.

        Raises:
            BadPlanAtError: PP106, a network card would be of two nodes.
        """
        spec, ranks_per_node = spec or NetworkSpec(), analytic.ranks_per_node or device.ranks_per_node
        _require_whole_nodes(spec, ranks_per_node)
        is_measured = analytic.link_efficiency is None
        share = exact(DEFAULT_LINK_EFFICIENCY if analytic.link_efficiency is None else analytic.link_efficiency)

        def link(bandwidth: float, latency: float) -> Link:
            return Link(exact(latency), exact(bandwidth) * 1000 * share)

        return cls(
            ranks_per_node,
            link(device.link, analytic.node_step_us),
            link(device.peer, analytic.node_step_us),
            link(device.network, analytic.network_step_us),
            exact(analytic.launch_us),
            spec.ranks_per_nic,
            spec.algorithm,
            edges=_edges_of(spec),
            curves=curves if is_measured else (),
            uses_all_cards=is_measured,
        )

    def routed(self, moe: MoeSpec | None, *, by_node: bool = False) -> Self:
        """The same links where tokens go to these experts."""
        if moe is None or (moe.nodes_per_token is None and not by_node):
            return self
        return replace(self, routing=Routing(moe.top_k, moe.nodes_per_token))

    def shapes(self, groups: IntColumn) -> frozenset[Shape]:
        """The shapes among groups of global ranks, shape [groups, members]; linear, but for sorting."""
        blocks = self.ranks_per_node, self.ranks_per_nic
        places = [groups // block for block in blocks]
        rows = np.concatenate([p - p[:, :1] for p in places], axis=1)
        # Sums by random factors sort faster than rows; equal sums of different rows are detected.
        sums = rows @ np.random.default_rng(0).integers(1, 2**62, rows.shape[1])
        _, examples, which = np.unique(sums, return_index=True, return_inverse=True)
        if not (rows == rows[examples][which]).all():
            _, examples = np.unique(rows, axis=0, return_index=True)
        return frozenset(
            Shape.of(ranks, self.ranks_per_node, self.ranks_per_nic) for ranks in groups[examples].tolist()
        )

    def message_us(self, num_bytes: Fraction, *, crosses: bool) -> Fraction:
        """Time of one message, inside a node or between two."""
        link = self.between if crosses else self.peer
        return self.launch_us + link.message_us(num_bytes)

    def slowest_message_us(self, num_bytes: Fraction, *, crosses: bool) -> Fraction:
        """Time of one message between unknown ranks: no measured edge takes longer."""
        measured = [link.message_us(num_bytes) for _, link in self.edges]
        return max(self.message_us(num_bytes, crosses=crosses), *measured, Fraction(0))

    def collective_us(self, kind: OpKind, shape: Shape, num_bytes: Fraction) -> Fraction:
        """Time of a collective into which each member puts ``num_bytes``; nothing for one rank alone.

        Raises:
            ValueError: ``kind`` is not a collective.
        """
        if shape.num_ranks == 1:
            return Fraction(0)
        curve = None if shape.crosses else self._curve(kind, shape.num_ranks)
        if curve is not None:
            return self._measured_us(curve, kind, shape.num_ranks, num_bytes)
        if kind is OpKind.ALL_TO_ALL:
            return self._all_to_all_us(shape, num_bytes)
        way = self.way(kind, shape, num_bytes)
        return way.latency_us + way.num_bytes / self._slowest(shape).bytes_per_us

    def _curve(self, kind: OpKind, num_ranks: int) -> CollectiveCurve | None:
        """The curve for this number of ranks, or for the next smaller measured one."""
        name = OpKind.ALL_GATHER if kind in GATHER_KINDS else kind
        curves = [curve for curve in self.curves if curve.kind == name and curve.num_ranks <= num_ranks]
        return max(curves, key=lambda curve: curve.num_ranks, default=None)

    def _measured_us(self, curve: CollectiveCurve, kind: OpKind, num_ranks: int, num_bytes: Fraction) -> Fraction:
        if kind is OpKind.ALL_TO_ALL:
            share = Fraction(1)
            if self.routing is not None and self.routing.nodes_per_token is None:
                share = self.routing.reached(num_ranks) / self.routing.top_k
            return moved_us(curve, share * num_bytes * (num_ranks - 1) / num_ranks)
        ring = _RING[OpKind.ALL_GATHER if kind in GATHER_KINDS else kind]
        (steps, share), measured_steps = ring(num_ranks), ring(curve.num_ranks)[0]
        return moved_us(curve, share * num_bytes) + (steps - measured_steps) * self.node.latency_us

    def way(self, kind: OpKind, shape: Shape, num_bytes: Fraction) -> Way:
        """Algorithm of a collective of several ranks, except all-to-alls: the faster one for ``algorithm: auto``.

        Raises:
            ValueError: ``kind`` is not a collective, or is an all-to-all.
        """
        kind = OpKind.ALL_GATHER if kind in GATHER_KINDS else kind
        if kind not in _RING:
            raise ValueError(f"{kind} goes around no ring")
        slowest = self._slowest(shape)
        steps, share = _RING[kind](shape.num_ranks)
        ring = Way(self.launch_us + steps * slowest.latency_us, share * num_bytes)
        if kind not in _REDUCTIONS or self.algorithm == "ring" or shape.num_ranks == 2:
            return ring
        levels = (len(shape.on_nodes) - 1).bit_length()
        latency = 2 * (levels * self.between.latency_us + (shape.on_nodes[-1] - 1) * self.node.latency_us)
        tree = Way(self.launch_us + latency, 2 * num_bytes)
        if self.algorithm == "tree":
            return tree
        return min(ring, tree, key=lambda way: way.latency_us + way.num_bytes / slowest.bytes_per_us)

    def _slowest(self, shape: Shape) -> Link:
        """The latency and the bandwidth of the slowest of the links of a ring."""
        cards = shape.cards_per_node if self.uses_all_cards else 1
        used = [Link(self.between.latency_us, cards * self.between.bytes_per_us)] if shape.crosses else []
        used += [self.node] if shape.has_neighbours else []
        return Link(max(link.latency_us for link in used), min(link.bytes_per_us for link in used))

    def _all_to_all_us(self, shape: Shape, num_bytes: Fraction) -> Fraction:
        """The longer time of the rank that sends most inside its node, and of the network card that sends most."""
        near, far = self.pieces(shape, shape.on_nodes[-1], num_bytes)
        others = shape.on_nodes[-1] - 1
        inside = near.latency_us + others * near.num_bytes / self.node.bytes_per_us
        if not shape.crosses:
            return self.launch_us + inside
        pieces = max(on_card * (shape.num_ranks - on_node) for on_card, on_node in shape.on_cards)
        across = far.latency_us + pieces * far.num_bytes / self.between.bytes_per_us
        return self.launch_us + (max(inside, across) if shape.has_neighbours else across)

    def pieces(self, shape: Shape, on_node: int, num_bytes: Fraction) -> tuple[Way, Way]:
        """Messages of a rank of an all-to-all: to another of the ``on_node`` ranks of its node, and to another node."""
        piece = num_bytes / shape.num_ranks
        if self.routing is None or not shape.crosses:
            return Way(self.node.latency_us, piece), Way(self.between.latency_us, piece)
        nodes = self.routing.nodes(shape)
        latency = self.between.latency_us + (self.node.latency_us if shape.has_neighbours else 0)
        return Way(latency, num_bytes / on_node), Way(latency, piece * nodes / self.routing.top_k)


def _require_whole_nodes(spec: NetworkSpec, ranks_per_node: int) -> None:
    """Raise an error if a card would be of two nodes."""
    if ranks_per_node % spec.ranks_per_nic == 0:
        return
    message = (
        f"a node has {ranks_per_node} ranks, which cost.network.ranks_per_nic {spec.ranks_per_nic} does not divide"
    )
    finding = Finding("PP106", Severity.ERROR, message, help="a network card belongs to one node: choose a divisor")
    raise BadPlanAtError(finding, ("cost", "network", "ranks_per_nic"))


def _edges_of(spec: NetworkSpec) -> tuple[tuple[tuple[int, int], Link], ...]:
    return tuple(((edge.source, edge.destination), Link.of(edge)) for edge in spec.edges)
