"""Whether one event leads to another: two walks, from both ends, until they meet."""

from __future__ import annotations

import numpy as np

from pipeproof.schedule.optable import IntColumn

Adjacency = tuple[IntColumn, IntColumn]
"""The neighbours of each event, one event's after another's, and where those of each event begin."""


def meet(followers: Adjacency, start: int, leaders: Adjacency, goal: int, *, near: tuple[int, int]) -> bool:
    """Whether there is a way from ``start`` to ``goal``; events in the range ``near`` are tried first.

    The two walks take turns, so the cost is that of the smaller side where there is no way.
    """
    ahead, back = _Walk(followers, start), _Walk(leaders, goal)
    while True:
        for walk, other in ((ahead, back), (back, ahead)):
            if walk.event in other.seen:
                return True
            if not walk.advance(near):
                return False


def adjacency(tails: IntColumn, heads: IntColumn, num_events: int) -> Adjacency:
    """The heads of each event's edges, one event's after another's, and where those of each event begin."""
    by_tail = np.argsort(tails, kind="stable")
    last = max(num_events - 1, int(tails.max(initial=0)), int(heads.max(initial=0)))
    return heads[by_tail], np.searchsorted(tails[by_tail], np.arange(last + 2))


class _Walk:
    """A depth-first walk over events, those of operations between the two in question first."""

    def __init__(self, graph: Adjacency, start: int) -> None:
        self._heads, self._first = graph
        self.event = start
        self.seen = {start}
        self._near: list[int] = []
        self._far: list[int] = []

    def advance(self, near: tuple[int, int]) -> bool:
        """Go on to the next event; False at the end of the walk."""
        event = self.event
        for neighbour in self._heads[self._first[event] : self._first[event + 1]].tolist():
            if neighbour not in self.seen:
                self.seen.add(neighbour)
                (self._near if near[0] <= neighbour <= near[1] else self._far).append(neighbour)
        if not self._near and not self._far:
            return False
        self.event = self._near.pop() if self._near else self._far.pop()
        return True
