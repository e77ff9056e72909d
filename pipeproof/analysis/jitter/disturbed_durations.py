"""The durations of one run: those of the plan, times what was drawn.

A time that is disturbed is rounded to a nanosecond; one that is not stays
exact, so that runs without noise are the simulation itself. Members of one
collective share its factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

import numpy as np

from pipeproof.analysis.jitter.noise import FloatColumn, Noise, Stream
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import packed
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, COPY_KINDS, SEND_KINDS, TRANSFER_KINDS
from pipeproof.sim.op_durations import Durations

_TICKS_PER_US = 1000
"""Ticks of a nanosecond."""


class Disturbance:
    """A graph whose durations are drawn anew for each run.

    Args:
        graph: the operations.
        durations: what they take undisturbed.
        noise: what is drawn; ranks that are slow are those of the graph, see ``slow``.
        slow: by rank of the graph, the factor of its computations.
        replicas: how many ranks each rank of the graph represents.
    """

    def __init__(
        self,
        graph: OpGraph,
        durations: Durations,
        noise: Noise,
        *,
        slow: Mapping[int, float] | None = None,
        replicas: int = 1,
    ) -> None:
        self._graph, self._noise, self._replicas = graph, noise, replicas
        self.undisturbed = on_finer_grid(
            durations, lcm(durations.ticks_per_us, _TICKS_PER_US) // durations.ticks_per_us
        )
        """The same durations in ticks that nanoseconds are whole numbers of."""
        self._slow = np.ones(graph.num_ranks)
        for rank, factor in (slow or {}).items():
            self._slow[rank] = factor
        self._ns = self._nanoseconds(self.undisturbed.ticks)
        takes_time = self._ns > 0
        is_network = graph.is_kind(COLLECTIVE_KINDS)
        self._computes = np.flatnonzero(takes_time & ~is_network & ~graph.is_kind(COPY_KINDS | TRANSFER_KINDS))
        self._calls = np.flatnonzero(takes_time & is_network)
        self._first_call = self._first_calls()
        self._sends = np.flatnonzero(graph.is_kind(SEND_KINDS))
        self._message_ticks = [self.undisturbed.message(send) for send in range(graph.num_ops)]
        self._message_ns = self._nanoseconds(self._message_ticks)

    def of_run(self, run: int) -> Durations:
        """The durations of a run, which depend on nothing but its number and the noise."""
        noise, graph = self._noise, self._graph
        by_rank = self._slow.copy()
        if noise.straggler_probability:
            by_rank[noise.stragglers(run, graph.num_ranks, self._replicas)] *= noise.straggler_factor
        factors = noise.factors(run, Stream.COMPUTE, noise.compute_cv, len(self._computes))
        ticks = list(self.undisturbed.ticks)
        self._disturb(ticks, self._ns, self._computes, factors * by_rank[graph.rank[self._computes]])
        if not noise.network_cv:
            return replace(self.undisturbed, ticks=tuple(ticks))
        factors = noise.factors(run, Stream.NETWORK, noise.network_cv, 2 * graph.num_ops)
        self._disturb(ticks, self._ns, self._calls, factors[graph.num_ops + self._first_call])
        messages = self._message_ticks.copy()
        self._disturb(messages, self._message_ns, self._sends, factors[self._sends])
        return replace(self.undisturbed, ticks=tuple(ticks), message_ticks=tuple(messages))

    def _disturb(self, ticks: list[int], nanoseconds: FloatColumn, rows: IntColumn, factors: FloatColumn) -> None:
        """Put drawn times in place of given ones, where they differ."""
        per_ns = self.undisturbed.ticks_per_us // _TICKS_PER_US
        differs = factors != 1.0
        drawn = np.rint(nanoseconds[rows[differs]] * factors[differs])
        for row, time in zip(rows[differs].tolist(), drawn.tolist(), strict=True):
            ticks[row] = int(time) * per_ns

    def _nanoseconds(self, ticks: Sequence[int]) -> FloatColumn:
        return np.array([one * _TICKS_PER_US / self.undisturbed.ticks_per_us for one in ticks], dtype=np.float64)

    def _first_calls(self) -> IntColumn:
        """For each call of a collective the first call of its meeting; a collective of one rank alone is its own."""
        graph, calls = self._graph, self._calls
        if not len(calls):
            return calls
        _, first, number = np.unique(
            packed(graph.group[calls], graph.position[calls]), return_index=True, return_inverse=True
        )
        return np.where(graph.group[calls] == NONE, calls, calls[first[number]])


def on_finer_grid(durations: Durations, times: int) -> Durations:
    """The same durations in ticks of which there are ``times`` as many."""
    messages = durations.message_ticks
    return replace(
        durations,
        ticks=tuple(ticks * times for ticks in durations.ticks),
        latency_ticks=durations.latency_ticks * times,
        ticks_per_us=durations.ticks_per_us * times,
        message_ticks=None if messages is None else tuple(ticks * times for ticks in messages),
    )
