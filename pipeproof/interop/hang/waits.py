"""What waits for what in the dumps of a hung run, and the cycle in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import networkx as nx

from pipeproof.interop.hang.match import Matches
from pipeproof.interop.hang.records import Dump, State, Unit

Node = tuple[int, int]
"""A unit that is not done: its rank, and its place among that rank's units that are not done."""


@dataclass(frozen=True)
class Waits:
    """The units that are not done, and who waits for whom.

    Each edge has ``why``: ``partner`` (the other end is issued), ``order`` (of
    a queue, or of the host) or ``unissued`` (the other rank has not come to
    it). ``absent`` has, for a unit, the ranks that have not issued their part
    and have nothing left that would hold them up; ``unknown`` those without
    a dump.
    """

    graph: nx.DiGraph[Node]
    units: dict[Node, Unit]
    absent: dict[Node, tuple[int, ...]]
    unknown: dict[Node, tuple[int, ...]]


def wait_graph(dumps: Sequence[Dump], matches: Matches) -> Waits:
    """Build the graph of waits.

    A unit waits for those before it in its queue; one that the device has not
    started, for all that its rank issued before it; for its partners; and,
    where a partner is not issued, for the first thing that holds up that
    partner's rank.
    """
    units = {(dump.rank, place): unit for dump in dumps for place, unit in enumerate(dump.pending)}
    node_of = {id(unit): node for node, unit in units.items()}
    waits = Waits(nx.DiGraph(), units, {}, {})
    waits.graph.add_nodes_from(sorted(units))
    known = {dump.rank for dump in dumps}
    for (rank, place), unit in sorted(units.items()):
        node = (rank, place)
        before = [(rank, earlier) for earlier in range(place)]
        same = [earlier for earlier in before if units[earlier].queue == unit.queue]
        held = same or (before if unit.state is State.SCHEDULED else [])
        for earlier in held[-1:]:
            waits.graph.add_edge(node, earlier, why="order")
        absent, unknown = [], []
        for entry in unit.entries:
            for partner in matches.partners.get((entry.rank, entry.index), ()):
                other = node_of.get(id(matches.unit_of[partner.rank, partner.index]))
                if other is not None and other != node:
                    waits.graph.add_edge(node, other, why="partner")
            for missing in matches.missing.get((entry.rank, entry.index), ()):
                if missing not in known:
                    unknown.append(missing)
                elif (missing, 0) in units and missing != rank:
                    waits.graph.add_edge(node, (missing, 0), why="unissued")
                else:
                    absent.append(missing)
        if absent:
            waits.absent[node] = tuple(dict.fromkeys(absent))
        if unknown:
            waits.unknown[node] = tuple(dict.fromkeys(unknown))
    return waits


def shortest_cycle(waits: Waits) -> list[Node]:
    """A shortest cycle in which something holds up the host or a queue; empty if there is none.

    The two ends of one message wait for each other, and the members of a
    collective: that alone holds up nothing.
    """
    best: list[Node] = []
    for part in nx.strongly_connected_components(waits.graph):
        if len(part) < 2:
            continue
        inside = waits.graph.subgraph(part)
        for source, target in sorted(inside.edges):
            if inside.edges[source, target]["why"] == "partner" or (best and len(best) <= 2):
                continue
            try:
                path = nx.shortest_path(inside, target, source)
            except nx.NetworkXNoPath:
                continue
            if not best or len(path) < len(best):
                best = path
    return best


def first_stuck(waits: Waits) -> Iterator[Node]:
    """Units that wait for nothing but their own partners, which do not wait for anything else either."""
    for part in nx.strongly_connected_components(waits.graph):
        leaves = all(target in part for node in part for target in waits.graph.successors(node))
        if leaves and not any(node in waits.absent or node in waits.unknown for node in part):
            yield min(part)
