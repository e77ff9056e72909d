"""Simulated time of a step whose ranks are on given nodes, by the plan's own network.

The time of a stage includes its collectives, as the plan assumes their ranks to be. Its own work is the rest, and stays
the same wherever its ranks are. Measured edges belong to ranks at the places where they were measured, and are left
out; transfers have their links to themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from pipeproof.analysis.jitter.noisy_runs import StepTimer
from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.cost.transfer_times import NetworkTimes
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.schedule.columns import IntColumn
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.link_costs import link_durations
from pipeproof.sim.op_durations import durations_of
from pipeproof.sim.simulate import channel_model_of
from pipeproof.specs.exact_times import GRID_US


@dataclass(frozen=True)
class _PlacedLinks:
    """Times of a network whose ranks are elsewhere: rank r is at the position ``positions[r]`` of its nodes."""

    times: NetworkTimes
    positions: IntColumn

    @property
    def dtype(self) -> str:
        return self.times.dtype

    @property
    def gradient_dtype(self) -> str:
        return self.times.gradient_dtype

    @property
    def grid_us(self) -> tuple[Fraction, ...]:
        return self.times.grid_us

    def message_us(self, pairs: IntColumn, num_bytes: int) -> Fraction:
        return self.times.message_us(self.positions[pairs], num_bytes)

    def collective_us(self, kind: OpKind, groups: IntColumn, num_bytes: int) -> Fraction:
        return self.times.collective_us(kind, self.positions[groups], num_bytes)


class PlacedTimes:
    """Step times of one plan with ranks on any nodes. The plan is folded: the slowest replica counts.

    Switches do not count: nodes are numbered, and below which switch they are is unknown.
    """

    def __init__(self, lowered: LoweredPlan, links: NetworkTimes) -> None:
        network = replace(links.network, edges=(), contention=False, switches=None)
        self.network = network
        self._links = NetworkTimes(network, links.dtype, links.gradient_dtype)
        self._lowered = replace(lowered, graph=lowered.canonical, links=self._links)
        self._durations = durations_of(self._lowered)
        self._timer = StepTimer(self._lowered.graph, channel_model_of(self._lowered), 1)
        self.planned_us = self._timer.makespan(self._durations)
        """Microseconds of a step whose ranks are placed as the plan assumes."""

    @classmethod
    def of(cls, lowered: LoweredPlan) -> PlacedTimes | None:
        """Return the times of a plan with a network; None for one whose times depend on no place.

        Also None where the simulator refuses the plan: a placement is no reason to end a rehearsal. A stage's time may
        be shorter than its collectives (PP154), or the program of an unverified plan may not finish (PP403).
        """
        if not isinstance(lowered.links, NetworkTimes):
            return None
        try:
            return cls(lowered, lowered.links)
        except PipeproofError:
            return None

    def step_us(self, nodes: Sequence[int]) -> Fraction:
        """Microseconds of a step; ``nodes`` has the node of each rank.

        Raises:
            SimulationError: the program cannot finish.
        """
        per_node, cards = int(np.bincount(nodes).max()), self.network.ranks_per_nic
        size = -(-per_node // cards) * cards  # cards belong to one node
        seen = [0] * (max(nodes) + 1)
        positions = np.zeros(len(nodes), dtype=np.int64)
        for rank, node in enumerate(nodes):
            positions[rank] = node * size + seen[node]
            seen[node] += 1
        network = replace(self.network, ranks_per_node=size)
        times = NetworkTimes(network, self._links.dtype, self._links.gradient_dtype)
        timed = link_durations(self._lowered, _PlacedLinks(times, positions))
        planned = self._durations
        per_ns = int(planned.ticks_per_us * GRID_US)
        calls = timed.collectives > 0
        ticks = np.where(calls, timed.collectives * per_ns, np.array(planned.ticks, dtype=np.int64))
        messages = tuple((timed.messages * per_ns).tolist())
        return self._timer.makespan(replace(planned, ticks=tuple(ticks.tolist()), message_ticks=messages))
