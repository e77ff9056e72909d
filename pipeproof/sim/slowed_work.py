"""Computations slowed down by receives: on some devices a pending receive spins and occupies part of the chip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import simpy


@dataclass(slots=True, eq=False)
class _Running:
    """A running computation.

    ``left`` is the remaining work in ticks of the undisturbed duration, ``since`` the time of the last speed change.
    """

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
        """Start a computation; call ``finished(op_id)`` when it ends."""
        work = _Running(op_id, Fraction(ticks), int(self._env.now))
        self._running[rank].append(work)
        self._aim(rank, work)

    def receive_starts(self, rank: int) -> None:
        """Record that a receive of ``rank`` begins now."""
        if not self._receives[rank]:
            self._change(rank, +1)
        else:
            self._receives[rank] += 1

    def receive_ends(self, rank: int) -> None:
        """Record that a receive of ``rank`` ends now."""
        if self._receives[rank] == 1:
            self._change(rank, -1)
        else:
            self._receives[rank] -= 1

    def _change(self, rank: int, by: int) -> None:
        """Change the number of pending receives, and with it the speed."""
        now = int(self._env.now)
        for work in self._running[rank]:
            work.left -= (now - work.since) / self._pace(rank)
            work.since = now
        self._receives[rank] += by
        for work in self._running[rank]:
            self._aim(rank, work)

    def _pace(self, rank: int) -> Fraction:
        return self._slow if self._receives[rank] else Fraction(1)

    def _aim(self, rank: int, work: _Running) -> None:
        """Schedule the end of a computation; a change of speed before then replaces it."""
        now = int(self._env.now)
        work.ends_at = now + max(0, ceil(work.left * self._pace(rank)))

        def over(_: Any) -> None:
            if work.ends_at == int(self._env.now) and work in self._running[rank]:
                self._running[rank].remove(work)
                self._finished(work.op_id)

        self._env.timeout(work.ends_at - now).callbacks.append(over)
