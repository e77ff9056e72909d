"""Waits between the operations in the dumps of a hung run, and the cycle in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx

from pipeproof.interop.hang.collective_matches import Matches
from pipeproof.interop.hang.flight_recorder import Dump, Launch, State

Node = tuple[int, int]
"""A launch that is not done: its rank, and its index among that rank's launches that are not done."""


@dataclass(frozen=True)
class Waits:
    """The launches that are not done, and the waits between them.

    Each edge has ``why``: ``partner`` (the other end is issued), ``order`` (of
    a queue, or of the host) or ``unissued`` (the other rank has not issued
    it). ``absent`` maps a launch to the ranks that have not issued their part
    although nothing blocks them; ``unknown`` maps it to ranks without a dump.
    """

    graph: nx.DiGraph[Node]
    launches: dict[Node, Launch]
    absent: dict[Node, tuple[int, ...]]
    unknown: dict[Node, tuple[int, ...]]


def wait_graph(dumps: Sequence[Dump], matches: Matches) -> Waits:
    """Build the graph of waits.

    A launch waits for earlier ones in its queue; if the device has not started
    it, for all earlier ones of its rank; for its partners; and, where a partner
    is not issued, for the first launch that blocks that partner's rank.
    """
    launches = {(dump.rank, index): launch for dump in dumps for index, launch in enumerate(dump.pending)}
    node_of = {id(launch): node for node, launch in launches.items()}
    waits = Waits(nx.DiGraph(), launches, {}, {})
    waits.graph.add_nodes_from(sorted(launches))
    known = {dump.rank for dump in dumps}
    for (rank, index), launch in sorted(launches.items()):
        node = (rank, index)
        before = [(rank, earlier) for earlier in range(index)]
        same_queue = [earlier for earlier in before if launches[earlier].queue == launch.queue]
        blockers = same_queue or (before if launch.state is State.SCHEDULED else [])
        for earlier in blockers[-1:]:
            waits.graph.add_edge(node, earlier, why="order")
        absent, unknown = [], []
        for entry in launch.entries:
            for partner in matches.partners.get((entry.rank, entry.index), ()):
                partner_node = node_of.get(id(matches.launch_of[partner.rank, partner.index]))
                if partner_node is not None and partner_node != node:
                    waits.graph.add_edge(node, partner_node, why="partner")
            for missing in matches.missing.get((entry.rank, entry.index), ()):
                if missing not in known:
                    unknown.append(missing)
                elif (missing, 0) in launches and missing != rank:
                    waits.graph.add_edge(node, (missing, 0), why="unissued")
                else:
                    absent.append(missing)
        if absent:
            waits.absent[node] = tuple(dict.fromkeys(absent))
        if unknown:
            waits.unknown[node] = tuple(dict.fromkeys(unknown))
    return waits


def shortest_cycle(waits: Waits) -> list[Node]:
    """Return a shortest cycle in which a wait blocks the host or a queue; empty if there is none.

    The two ends of one message wait for each other, and so do the members of a
    collective: that alone blocks nothing.
    """
    best: list[Node] = []
    for component in nx.strongly_connected_components(waits.graph):
        if len(component) < 2:
            continue
        subgraph = waits.graph.subgraph(component)
        for source, target in sorted(subgraph.edges):
            if subgraph.edges[source, target]["why"] == "partner" or (best and len(best) <= 2):
                continue
            try:
                path = nx.shortest_path(subgraph, target, source)
            except nx.NetworkXNoPath:
                continue
            if not best or len(path) < len(best):
                best = path
    return best


def first_stuck(waits: Waits) -> Iterator[Node]:
    """Launches that wait only for their partners, where the partners wait for nothing else either."""
    for component in nx.strongly_connected_components(waits.graph):
        leaves = all(target in component for node in component for target in waits.graph.successors(node))
        if leaves and not any(node in waits.absent or node in waits.unknown for node in component):
            yield min(component)
