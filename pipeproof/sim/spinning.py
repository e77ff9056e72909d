"""Computations that a receive slows down: on some devices one that is under way spins, and takes part of the chip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import simpy


@dataclass(slots=True, eq=False)
class _Running:
    """A computation: what is left of it, in ticks of its undisturbed duration, since when at its present speed."""

    op_id: int
    left: Fraction
    since: int
    ends_at: int = -1


class SlowedWork:
    """Runs computations; while any receive of their rank is under way, each takes 1 + ``slowdown`` times as long.

    A computation ends with the tick in which its work is done.
    """

    def __init__(
        self, env: simpy.Environment, num_ranks: int, slowdown: Fraction, finished: Callable[[int], None]
    ) -> None:
        self._env, self._finished, self._slow = env, finished, 1 + slowdown
        self._receives = [0] * num_ranks
        self._running: list[list[_Running]] = [[] for _ in range(num_ranks)]

    def begin(self, rank: int, op_id: int, ticks: int) -> None:
        """Start a computation; ``finished(op_id)`` is called when it is over."""
        one = _Running(op_id, Fraction(ticks), int(self._env.now))
        self._running[rank].append(one)
        self._aim(rank, one)

    def receive_starts(self, rank: int) -> None:
        """A receive of ``rank`` is under way from now on."""
        if not self._receives[rank]:
            self._change(rank, +1)
        else:
            self._receives[rank] += 1

    def receive_ends(self, rank: int) -> None:
        """One of them is done."""
        if self._receives[rank] == 1:
            self._change(rank, -1)
        else:
            self._receives[rank] -= 1

    def _change(self, rank: int, by: int) -> None:
        """Another speed from now on."""
        now = int(self._env.now)
        for one in self._running[rank]:
            one.left -= (now - one.since) / self._pace(rank)
            one.since = now
        self._receives[rank] += by
        for one in self._running[rank]:
            self._aim(rank, one)

    def _pace(self, rank: int) -> Fraction:
        return self._slow if self._receives[rank] else Fraction(1)

    def _aim(self, rank: int, one: _Running) -> None:
        """Wake up when it will be over, unless the speed changes before."""
        now = int(self._env.now)
        one.ends_at = now + max(0, ceil(one.left * self._pace(rank)))

        def over(_: Any) -> None:
            if one.ends_at == int(self._env.now) and one in self._running[rank]:
                self._running[rank].remove(one)
                self._finished(one.op_id)

        self._env.timeout(one.ends_at - now).callbacks.append(over)
