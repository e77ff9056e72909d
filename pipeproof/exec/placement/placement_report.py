"""Comparison of the places of all ranks with those that the plan assumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from pipeproof.cost.analytic_links import groups_of
from pipeproof.cost.transfer_times import NetworkTimes
from pipeproof.diagnostics.finding import Finding, Location
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.exec.placement.launcher_forms import can_move, hosts_of, how_to, map_text
from pipeproof.exec.placement.link_kinds import LinkKind
from pipeproof.exec.placement.placed_times import PlacedTimes
from pipeproof.exec.placement.rank_map import Cost, Costs, RankMap, proposed_map
from pipeproof.exec.placement.rank_placement import RankPlacement
from pipeproof.exec.placement.traffic import Traffic
from pipeproof.exec.run_codes import OTHER_NODE_SIZE, SPLIT_NODE
from pipeproof.verify.subject import Subject
from pipeproof.views.byte_sizes import size_text


@dataclass(frozen=True)
class PlacementReport:
    """Places of all ranks, bytes per step by axis and kind of link, findings, and a better map if there is one.

    ``planned_us`` and ``placed_us`` are simulated times of a step, None if the plan has no network.
    """

    placements: tuple[RankPlacement, ...]
    traffic: Mapping[tuple[str, LinkKind], float]
    planned_us: Fraction | None
    placed_us: Fraction | None
    findings: tuple[Finding, ...]
    proposal: RankMap | None

    @property
    def num_nodes(self) -> int:
        """Number of NVLink domains, or of hosts where the GPUs report none."""
        return len({place.node_key for place in self.placements})

    def to_json(self) -> dict[str, Any]:
        """Return the form of ``rehearse --report``."""
        return {
            "ranks": [place.to_json() for place in self.placements],
            "bytes": [
                {"axis": axis, "link": kind.name.lower(), "bytes": round(num_bytes)}
                for (axis, kind), num_bytes in self.traffic.items()
            ],
            "planned_us": _number(self.planned_us),
            "placed_us": _number(self.placed_us),
            "findings": [finding_to_json(finding) for finding in self.findings],
            "map": None if self.proposal is None else self._map_to_json(self.proposal),
        }

    def _map_to_json(self, proposal: RankMap) -> dict[str, Any]:
        return {
            "processes": list(range(len(self.placements)) if proposal.order else proposal.processes),
            "hosts": list(hosts_of(proposal, self.placements)),
            "order": None if proposal.order is None else list(proposal.order),
            "step_us": _number(proposal.cost.step_us if self.placed_us is not None else None),
            "between_nodes_bytes": round(proposal.cost.between),
            "how": how_to(proposal, self.placements),
        }


def _number(time: Fraction | None) -> float | None:
    return None if time is None else float(time)


def placement_report(subject: Subject, placements: Sequence[RankPlacement]) -> PlacementReport:
    """Compare the places of ranks 0 to n - 1 with the plan; its sizes are those of the bytes and times.

    Raises:
        ValueError: the plan has another number of ranks.
    """
    lowered, places = subject.plan, tuple(placements)
    if len(places) != lowered.mesh.num_ranks:
        raise ValueError(f"{len(places)} places for the plan's {lowered.mesh.num_ranks} ranks")
    traffic = Traffic(lowered)
    by_kind = traffic.by_kind(places)
    nodes = _numbered([place.node_key for place in places])
    if max(nodes) == 0:
        return PlacementReport(places, by_kind, None, None, (), None)
    times = PlacedTimes.of(lowered)
    comparison = _Comparison(subject, places, traffic, nodes, times)
    proposal = None
    if comparison.is_other:
        proposal = proposed_map(lowered.mesh, places, Costs(traffic, times, nodes), can_move=can_move(places))
    return PlacementReport(
        places, by_kind, comparison.planned_us, comparison.placed_us, comparison.findings(proposal), proposal
    )


def _numbered(keys: Sequence[str]) -> list[int]:
    numbers: dict[str, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


class _Comparison:
    """Nodes of the ranks as placed and as planned."""

    def __init__(
        self,
        subject: Subject,
        places: tuple[RankPlacement, ...],
        traffic: Traffic,
        nodes: list[int],
        times: PlacedTimes | None,
    ) -> None:
        self._subject, self._places, self._nodes = subject, places, nodes
        links = subject.plan.links
        self._per_node = links.network.ranks_per_node if isinstance(links, NetworkTimes) else None
        # Without a network the plan puts consecutive ranks on the hosts as they are.
        self._planned = (
            sorted(nodes) if self._per_node is None else [rank // self._per_node for rank in range(len(nodes))]
        )
        as_planned = traffic.between(np.array(self._planned, dtype=np.int64))
        as_placed = traffic.between(np.array(nodes, dtype=np.int64))
        self.planned_us = None if times is None else times.planned_us
        self.placed_us = None if times is None else times.step_us(nodes)
        planned = Cost(self.planned_us or Fraction(0), sum(as_planned.values()))
        placed = Cost(self.placed_us or Fraction(0), sum(as_placed.values()))
        # A proposed map may have more bytes of one axis between nodes, and be better than the plan assumes.
        self._more = {
            axis: (as_planned[axis], num_bytes)
            for axis, num_bytes in as_placed.items()
            if num_bytes > as_planned[axis] and planned < placed
        }

    @property
    def is_other(self) -> bool:
        """True if the ranks are placed otherwise than planned."""
        return bool(self._more) or self._other_size() is not None

    def findings(self, proposal: RankMap | None) -> tuple[Finding, ...]:
        """Return a finding for each axis, and one for the first host of another size."""
        remedy = "no map of ranks is better on these hosts"
        if proposal is not None and proposal.order is not None:
            remedy = f"set {map_text(proposal, self._places)}"
        elif proposal is not None:
            remedy = f"place {map_text(proposal, self._places)}"
        other, fixes = self._other_size(), [remedy]
        found = []
        if other is not None:
            place, count = other
            sizes = Counter(self._nodes).values()
            fix = f"set `ranks_per_node` to {count}" if len(set(sizes)) == 1 else "use hosts of one size"
            fixes = [fix] if proposal is None else [remedy, fix]
            found.append(
                OTHER_NODE_SIZE.finding(
                    f"host {place.host} has {count} ranks, and `ranks_per_node` is {self._per_node}",
                    location=self._location(),
                    help=fix,
                )
            )
        found = [*(self._split(axis, ", and ".join(fixes)) for axis in self._more), *found]
        return tuple(found)

    def _split(self, axis: str, fix: str) -> Finding:
        planned, placed = self._more[axis]
        first, second = self._split_pair(axis)
        hosts = f"{self._places[first].host} and {self._places[second].host}"
        times = ""
        if self.placed_us is not None and self.planned_us is not None:
            placed_us, planned_us = milliseconds(self.placed_us), milliseconds(self.planned_us)
            times = f"; a step takes {placed_us}, and {planned_us} as planned (simulated)"
        return SPLIT_NODE.finding(
            f"ranks {first} and {second} of one {axis} group are on {hosts}, and the plan puts them on one node: "
            f"{size_text(round(placed))} of {axis} go between nodes in a step, {size_text(round(planned))} as "
            f"planned{times}",
            location=self._location(),
            help=fix,
        )

    def _split_pair(self, axis: str) -> tuple[int, int]:
        """Two ranks of a group on different nodes that the plan puts on one node.

        More bytes between nodes than planned imply such a pair. Members on one planned node follow each other.
        """
        planned, placed = np.array(self._planned), np.array(self._nodes)
        groups = groups_of(self._subject.plan.spec.topology, axis)
        pairs = np.stack([groups[:, :-1], groups[:, 1:]], axis=2).reshape(-1, 2)
        split = (np.diff(placed[pairs]) != 0) & (np.diff(planned[pairs]) == 0)
        first, second = pairs[int(np.argmax(split[:, 0]))].tolist()
        return first, second

    def _other_size(self) -> tuple[RankPlacement, int] | None:
        """First host with another number of ranks than the plan assumes, None if hosts or domains are as assumed."""
        if self._per_node is None:
            return None
        expected = sorted(Counter(self._planned).values())
        hosts = _numbered([place.host_key for place in self._places])
        if expected in (sorted(Counter(hosts).values()), sorted(Counter(self._nodes).values())):
            return None
        counts = Counter(hosts)
        rank = next((rank for rank, host in enumerate(hosts) if counts[host] != self._per_node), 0)
        return self._places[rank], counts[hosts[rank]]

    def _location(self) -> Location | None:
        path = ("topology", "order") if self._per_node is None else ("cost", "network", "ranks_per_node")
        return self._subject.locate(*path)


def milliseconds(time: Fraction) -> str:
    """Return a time in microseconds as text."""
    return f"{float(time) / 1000:.4g} ms"
