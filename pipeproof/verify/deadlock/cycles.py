"""Cycles of a graph of waits: whether there are any, and a shortest one."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn
from pipeproof.verify.deadlock.columns import WaitGraph

_LARGE = 50_000
"""Waits above which SciPy's components are worth their import."""

_MOST_STEPS = 100_000
"""Waits that the search for a shortest cycle may look at, in large knots of waits."""


def cyclic_part(waits: WaitGraph) -> BoolColumn:
    """Which waits may be on a cycle: none of them if and only if there is no cycle. Linear in waits.

    All waits on cycles are in it, and perhaps some on paths from one cycle to another.
    """
    if not len(waits.source):
        return np.zeros(0, dtype=bool)
    used = np.zeros(int(max(waits.source.max(), waits.target.max())) + 1, dtype=bool)
    used[waits.source] = used[waits.target] = True
    number = np.cumsum(used) - 1
    source, target, num_nodes = number[waits.source], number[waits.target], int(number[-1]) + 1
    if len(source) > _LARGE:
        return _between_components(source, target, num_nodes)
    after_cycles = _never_freed(source, target, num_nodes)
    part: BoolColumn = after_cycles[source]
    if part.any():
        part = part & _never_freed(target, source, num_nodes)[target]
    return part


def _between_components(source: IntColumn, target: IntColumn, num_nodes: int) -> BoolColumn:
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    ones = np.ones(len(source))  # the type that scipy would make of any other
    matrix = csr_array((ones, (source, target)), shape=(num_nodes, num_nodes))
    _, component = connected_components(matrix, connection="strong")
    same: BoolColumn = component[source] == component[target]
    return same


def _never_freed(source: IntColumn, target: IntColumn, num_nodes: int) -> BoolColumn:
    """Nodes that remain when nodes that nothing holds are taken away, with their waits, as long as there are any."""
    waiting = np.bincount(target, minlength=num_nodes)
    order = np.argsort(source, kind="stable")
    followers = target[order].tolist()
    begins = np.concatenate([[0], np.cumsum(np.bincount(source, minlength=num_nodes))]).tolist()
    ready = deque(np.flatnonzero(waiting == 0).tolist())
    count = waiting.tolist()
    while ready:
        node = ready.popleft()
        for follower in followers[begins[node] : begins[node + 1]]:
            count[follower] -= 1
            if count[follower] == 0:
                ready.append(follower)
    return np.array(count, dtype=np.int64) > 0


def shortest_cycle(waits: WaitGraph, part: BoolColumn) -> list[int]:
    """The waits of a cycle with as few of them as there are, each waiting for the next, as places in ``waits``.

    ``part`` is the cyclic part, with a cycle in it. In a knot of waits too
    large to search through, the shortest of the cycles that were met.
    """
    short = _one_or_two_waits(waits, np.flatnonzero(part))
    if short:
        return short
    held_by: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place in np.flatnonzero(part).tolist():
        held_by[int(waits.target[place])].append((int(waits.source[place]), place))
    best: list[int] = []
    steps = 0
    for start in sorted(held_by):
        cycle, looked_at = _cycle_through(held_by, start, len(best))
        best = cycle or best
        steps += looked_at
        del held_by[start]  # no other cycle through it is shorter
        if len(best) == 3 or (best and steps > _MOST_STEPS):
            break
    assert best, "the cyclic part has no cycle"
    return best


def _one_or_two_waits(waits: WaitGraph, part: IntColumn) -> list[int]:
    """Two nodes that wait for each other, or one for itself, as the waits between them; empty if there are none."""
    source, target = waits.source[part], waits.target[part]
    itself = np.flatnonzero(source == target)
    if len(itself):
        return [int(part[itself[0]])]
    size = int(max(source.max(), target.max())) + 1
    there, first = np.unique(source * size + target, return_index=True)
    back = target[first] * size + source[first]
    place = np.searchsorted(there, back)
    place[place == len(there)] = 0
    found = np.flatnonzero(there[place] == back)
    if not len(found):
        return []
    one = found[np.argmin(part[first[found]])]
    return [int(part[first[one]]), int(part[first[place[one]]])]


def _cycle_through(held_by: dict[int, list[tuple[int, int]]], start: int, shorter_than: int) -> tuple[list[int], int]:
    """(waits of a shortest cycle through a node, empty if none is short enough; waits looked at); 0: any length."""
    came_by = {start: (start, NONE)}
    frontier, length, steps = [start], 0, 0
    while frontier:
        length += 1
        if shorter_than and length >= shorter_than:
            break
        reached = []
        for node in frontier:
            for held, place in held_by.get(node, ()):
                steps += 1
                if held == start:
                    path = [place]
                    while node != start:
                        node, place = came_by[node]
                        path.append(place)
                    return path[::-1], steps
                if held not in came_by:
                    came_by[held] = (node, place)
                    reached.append(held)
        frontier = reached
    return [], steps
