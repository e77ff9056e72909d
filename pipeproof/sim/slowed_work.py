"""Computations slowed down by transfers: a pending receive spins on some devices, and a collective holds processors."""

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


RECEIVE, EXCHANGE = 0, 1
"""Causes of slower computations: a receive that is under way, and a collective on a queue of its own."""


class SlowedWork:
    """Runs computations; while a transfer of their rank is under way, each takes longer.

    It takes 1 + the sum of the ``slowdowns`` of the kinds that are under way, RECEIVE and EXCHANGE, times as long,
    however many there are of a kind. A computation ends with the tick in which its work is done.
    """

    def __init__(
        self,
        env: simpy.Environment,
        num_ranks: int,
        slowdowns: tuple[Fraction, Fraction],
        finished: Callable[[int], None],
    ) -> None:
        self._env, self._finished, self._slowdowns = env, finished, slowdowns
        self._pending = [[0, 0] for _ in range(num_ranks)]
        self._running: list[list[_Running]] = [[] for _ in range(num_ranks)]

    def begin(self, rank: int, op_id: int, ticks: int) -> None:
        """Start a computation; call ``finished(op_id)`` when it ends."""
        work = _Running(op_id, Fraction(ticks), int(self._env.now))
        self._running[rank].append(work)
        self._aim(rank, work)

    def transfer_starts(self, rank: int, kind: int) -> None:
        """Record that a transfer of ``rank`` begins now."""
        if self._pending[rank][kind]:
            self._pending[rank][kind] += 1
        else:
            self._change(rank, kind, +1)

    def transfer_ends(self, rank: int, kind: int) -> None:
        """Record that a transfer of ``rank`` ends now."""
        if self._pending[rank][kind] > 1:
            self._pending[rank][kind] -= 1
        else:
            self._change(rank, kind, -1)

    def _change(self, rank: int, kind: int, by: int) -> None:
        """Change the number of pending transfers of a kind, and with it the speed."""
        if not self._slowdowns[kind]:
            self._pending[rank][kind] += by
            return
        now = int(self._env.now)
        for work in self._running[rank]:
            work.left -= (now - work.since) / self._pace(rank)
            work.since = now
        self._pending[rank][kind] += by
        for work in self._running[rank]:
            self._aim(rank, work)

    def _pace(self, rank: int) -> Fraction:
        pending = zip(self._slowdowns, self._pending[rank], strict=True)
        return 1 + sum((slowdown for slowdown, number in pending if number), Fraction(0))

    def _aim(self, rank: int, work: _Running) -> None:
        """Schedule the end of a computation; a change of speed before then replaces it."""
        now = int(self._env.now)
        work.ends_at = now + max(0, ceil(work.left * self._pace(rank)))

        def over(_: Any) -> None:
            if work.ends_at == int(self._env.now) and work in self._running[rank]:
                self._running[rank].remove(work)
                self._finished(work.op_id)

        self._env.timeout(work.ends_at - now).callbacks.append(over)
