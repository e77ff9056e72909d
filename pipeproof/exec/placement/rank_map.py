"""A better map of ranks to processes: candidates, and the one with the shortest predicted step.

Candidates, in the order in which ties are decided:

1. The plan with another ``topology.order``, on the ranks as they are.
2. For each order of axes, ranks in that order on the processes of host after host.
3. The same with whole blocks first: each host takes as many blocks of the fastest axes as it has room for, and the
   processes that are left over take the rest. On hosts of equal size this is the same as the second. Also backwards:
   the first and the last stage of a pipeline differ.
4. The best of these, refined for irregular hosts: two ranks on different nodes change places as long as that is
   better.

A candidate is better if the simulated step is shorter, then if fewer bytes go between nodes. All are deterministic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, permutations
from math import prod

import numpy as np

from pipeproof.comm.mesh import Mesh
from pipeproof.exec.placement.placed_times import PlacedTimes
from pipeproof.exec.placement.rank_placement import RankPlacement
from pipeproof.exec.placement.traffic import Traffic

MOST_SIMULATED = 32
"""Distinct candidates that are simulated, and exchanges of each pass: those with the fewest bytes between nodes."""
MOST_REFINED = 32
"""Ranks up to which a candidate is refined: each pass counts the bytes of all pairs."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted microseconds of a step, 0 without a network; bytes per step between nodes."""

    step_us: Fraction
    between: float

    def __lt__(self, other: Cost) -> bool:
        return (self.step_us, self.between) < (other.step_us, other.between)


@dataclass(frozen=True, slots=True)
class RankMap:
    """``processes[r]`` is the process, by its present rank, that is to be rank r; or the plan's ``order`` to change.

    With ``order`` the processes keep their ranks, and ``processes`` are those that get the work of the old ranks.
    """

    processes: tuple[int, ...]
    cost: Cost
    order: tuple[str, ...] | None = None


class Costs:
    """Costs of maps for processes on given nodes, each distinct one computed once."""

    def __init__(self, traffic: Traffic, times: PlacedTimes | None, nodes: Sequence[int]) -> None:
        self._traffic, self._times, self._nodes = traffic, times, np.array(nodes, dtype=np.int64)
        self._between: dict[tuple[int, ...], float] = {}
        self._steps: dict[tuple[int, ...], Fraction] = {}

    def nodes(self, processes: Sequence[int]) -> tuple[int, ...]:
        """Node of each rank, nodes numbered by their first rank: equal for maps of equal cost."""
        numbers: dict[int, int] = {}
        return tuple(numbers.setdefault(node, len(numbers)) for node in self._nodes[list(processes)].tolist())

    def between(self, processes: Sequence[int]) -> float:
        """Bytes per step between nodes."""
        key = self.nodes(processes)
        if key not in self._between:
            self._between[key] = sum(self._traffic.between(np.array(key, dtype=np.int64)).values())
        return self._between[key]

    def of(self, processes: Sequence[int]) -> Cost:
        """Cost of a map."""
        key = self.nodes(processes)
        if key not in self._steps:
            self._steps[key] = Fraction(0) if self._times is None else self._times.step_us(key)
        return Cost(self._steps[key], self.between(processes))


def proposed_map(
    mesh: Mesh, placements: Sequence[RankPlacement], costs: Costs, *, can_move: bool = True
) -> RankMap | None:
    """Return the best candidate if it is better than the ranks as they are, else None.

    Without ``can_move`` the launcher numbers processes host by host, and only the plan's order can change.
    """
    given = tuple(range(len(placements)))
    nodes = [place.node_key for place in placements]
    # With another order, the plan still puts consecutive ranks on one node.
    orders = list(_orders(mesh)) if is_contiguous(nodes) else []
    moves = list(_moves(mesh, placements)) if can_move else []
    distinct: dict[tuple[int, ...], RankMap] = {}
    for order, processes in [*orders, *((None, processes) for processes in moves)]:
        distinct.setdefault(costs.nodes(processes), RankMap(processes, Cost(Fraction(0), 0), order))
    few = sorted(distinct.values(), key=lambda each: costs.between(each.processes))[:MOST_SIMULATED]
    candidates = [RankMap(each.processes, costs.of(each.processes), each.order) for each in few]
    is_irregular = len(set(Counter(nodes).values())) > 1
    if can_move and is_irregular and len(given) <= MOST_REFINED:
        start = min(candidates, key=lambda each: each.cost, default=None)
        refined = _refined(given if start is None else start.processes, costs)
        candidates.append(RankMap(refined, costs.of(refined)))
    present, first = costs.of(given), {id(each): number for number, each in enumerate(candidates)}
    better = [each for each in candidates if each.cost < present]

    def preference(each: RankMap) -> tuple[Fraction, float, bool, int, int]:
        moved = sum(rank != process for rank, process in enumerate(each.processes))
        return each.cost.step_us, each.cost.between, each.order is None, moved, first[id(each)]

    return min(better, key=preference, default=None)


def is_contiguous(nodes: Sequence[str]) -> bool:
    """Return True if the ranks of each node are consecutive."""
    changes = sum(first != second for first, second in pairwise(nodes))
    return changes + 1 == len(set(nodes))


def _axis_orders(mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """Orders of all axes that differ in those with several ranks, the plan's own first."""
    used = [axis for axis in mesh.axes if mesh.size(axis) > 1]
    for order in permutations(used):
        rest = iter(order)
        yield tuple(next(rest) if mesh.size(axis) > 1 else axis for axis in mesh.axes)


def _ranks_in(mesh: Mesh, order: tuple[str, ...]) -> list[int]:
    """Rank, in a mesh with the axes in this order, of the coordinates of each rank of ``mesh``."""
    other = Mesh(order, tuple(mesh.size(axis) for axis in order))
    return [other.rank(mesh.coords(rank)) for rank in range(mesh.num_ranks)]


def _orders(mesh: Mesh) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    for order in _axis_orders(mesh):
        if order != mesh.axes:
            yield order, tuple(_ranks_in(mesh, order))


def _moves(mesh: Mesh, placements: Sequence[RankPlacement]) -> Iterator[tuple[int, ...]]:
    """Processes of each rank by the second and the third kind of candidates."""
    of_node: dict[tuple[tuple[str, ...], str], list[int]] = defaultdict(list)
    for process, place in enumerate(placements):
        of_node[place.switches, place.node_key].append(process)
    # Nodes of one switch are next to each other, otherwise in the order of their first process.
    switches = {switch: number for number, switch in enumerate(dict.fromkeys(switch for switch, _ in of_node))}
    by_node = sorted(of_node.items(), key=lambda item: (switches[item[0][0]], item[1][0]))
    nodes = [processes for _, processes in by_node]
    for order in _axis_orders(mesh):
        ranks = _ranks_in(mesh, order)
        sizes = [mesh.size(axis) for axis in order]
        for block in dict.fromkeys(prod(sizes[:count]) for count in range(len(sizes))):
            whole = [process for node in nodes for process in node[: len(node) // block * block]]
            rest = [process for node in nodes for process in node[len(node) // block * block :]]
            in_order = [*whole, *rest]
            yield tuple(in_order[rank] for rank in ranks)
            yield tuple(in_order[-1 - rank] for rank in ranks)


def _refined(processes: tuple[int, ...], costs: Costs) -> tuple[int, ...]:
    """Exchange two ranks as long as that makes the cost smaller: the first best pair of each pass."""
    best = list(processes)
    while True:
        nodes = costs.nodes(best)
        trials = []
        for first in range(len(best)):
            for second in range(first + 1, len(best)):
                if nodes[first] != nodes[second]:
                    trial = [*best]
                    trial[first], trial[second] = trial[second], trial[first]
                    trials.append(trial)
        few = sorted(trials, key=costs.between)[:MOST_SIMULATED]
        trial = min(few, key=costs.of, default=best)
        if not costs.of(trial) < costs.of(best):
            return tuple(best)
        best = trial
