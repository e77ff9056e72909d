"""Sensitivity of a step: its increase if one rank, or one channel, takes a little longer.

Ranks: all computations of one rank take 1 % longer. Channels: each message
from one rank to another takes longer by 1 % of the mean computation. Nothing
is drawn; both are exact differences of two simulations. The time that a
delay *adds* is the sum over all of these operations. The step time increases by
between nothing, where the delay falls into idle time, and all of it, where every
operation is waited for; with rendezvous sends it may increase by more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from pipeproof.analysis.jitter.disturbed_durations import on_finer_grid
from pipeproof.analysis.jitter.noisy_runs import StepTimer, folded
from pipeproof.comm.backend_rows import BackendTable
from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.schedule.ops import COLLECTIVE_KINDS, COPY_KINDS, SEND_KINDS, TRANSFER_KINDS
from pipeproof.sim.contention import require_own_links
from pipeproof.sim.op_durations import Durations, durations_of
from pipeproof.sim.simulate import channel_model_of

PERCENT = 100
"""A delay is one part in that many."""


@dataclass(frozen=True, slots=True)
class Delay:
    """One rank or channel that takes longer. Times in exact microseconds.

    ``where`` is the rank (global; where replicas are folded it represents all
    of them) or the channel, as ``forward 0->1``. ``added_us`` is what its
    operations take longer together, ``step_us`` by how much the step does.
    """

    where: str
    added_us: Fraction
    step_us: Fraction

    @property
    def sensitivity(self) -> Fraction:
        """Increase of the step time over the added time; 0 if nothing is added."""
        return self.step_us / self.added_us if self.added_us else Fraction(0)


@dataclass(frozen=True, slots=True)
class Delays:
    """``undisturbed`` is the makespan without any delay."""

    undisturbed: Fraction
    ranks: tuple[Delay, ...]
    channels: tuple[Delay, ...]


def costliest(delays: Sequence[Delay]) -> tuple[Delay, ...]:
    """Those by which the step gets longer most; none if it does not get longer by any."""
    most = max((delay.step_us for delay in delays), default=Fraction(0))
    return tuple(delay for delay in delays if delay.step_us == most) if most > 0 else ()


def delays_of(lowered: LoweredPlan, *, backend: BackendTable | None = None) -> Delays:
    """Delay each rank and each channel in turn, replicas together. One simulation for each.

    Raises:
        SimulationError: the program cannot finish.
        BadPlanAtError: PP106, messages and collectives share links.
    """
    require_own_links(lowered)
    lowered = folded(lowered)
    graph = lowered.graph
    base = on_finer_grid(durations_of(lowered), PERCENT)
    timer = StepTimer(graph, channel_model_of(lowered, backend), graph.num_ranks + len(graph.channels) + 1)
    undisturbed = timer.makespan(base)
    computes = ~graph.is_kind(COLLECTIVE_KINDS | COPY_KINDS | TRANSFER_KINDS)
    second_of_pair = set(base.overlapped.values())  # it takes the time of the first

    def delay(where: str, durations: Durations, added: int) -> Delay:
        return Delay(where, Fraction(added, base.ticks_per_us), timer.makespan(durations) - undisturbed)

    ranks = []
    for rank, own_name in enumerate(graph.global_rank):
        ticks, added = list(base.ticks), 0
        for op_id in np.flatnonzero(computes & (graph.rank == rank)).tolist():
            more = ticks[op_id] // PERCENT
            ticks[op_id] += more
            added += 0 if op_id in second_of_pair else more
        ranks.append(delay(str(own_name), replace(base, ticks=tuple(ticks)), added))
    piece = _hundredth_of_mean([base.ticks[op_id] for op_id in np.flatnonzero(computes).tolist()])
    messages = [base.message(send) for send in range(graph.num_ops)]
    is_send = graph.is_kind(SEND_KINDS)
    channels = []
    for number, channel in enumerate(graph.channels):
        sends = np.flatnonzero(is_send & (graph.channel == number)).tolist()
        late = messages.copy()
        for send in sends:
            late[send] += piece
        source, target = graph.global_rank[channel.src], graph.global_rank[channel.dst]
        where = f"{channel.communicator} {source}->{target}"
        channels.append(delay(where, replace(base, message_ticks=tuple(late)), piece * len(sends)))
    return Delays(undisturbed, tuple(ranks), tuple(channels))


def _hundredth_of_mean(ticks: list[int]) -> int:
    """A hundredth of the mean of the times that are not 0, and at least a tick."""
    taking = [one for one in ticks if one]
    return max(1, sum(taking) // (PERCENT * len(taking))) if taking else 1
