"""Costs of a schedule for a plan, in units that allow schedules to be compared.

The sizes of chunks and micro-batches differ between schedules. The unit of
activations is therefore one transformer block's activation for one sequence,
from the start of F to the end of B or W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from operator import add

from pipeproof.analysis.tune.critical_path import CriticalPath, critical_path
from pipeproof.analysis.tune.repartition import num_blocks
from pipeproof.comm.generated_schedule import stage_costs
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.formats.op_text import kinds_of
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind
from pipeproof.schedule.programs import Schedule, StageCosts, Time, Timed, asap, most_held
from pipeproof.sim.simulate import simulate
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.model_family import stage_layers


@dataclass(frozen=True, slots=True)
class Figures:
    """Time and memory of a step.

    ``work_us`` is the mean computation time of a rank, ``most_work_us`` the time of
    ``busiest``, the first of the ranks that compute longest. ``peak`` is the
    largest number of activations of a rank, in units of one block for one sequence.
    """

    makespan_us: Fraction
    work_us: Fraction
    most_work_us: Fraction
    busiest: int
    peak: Fraction

    @property
    def idle_us(self) -> Fraction:
        """Mean idle time of a rank."""
        return self.makespan_us - self.work_us


@dataclass(frozen=True)
class Clock:
    """The times of each computation of a plan, in ticks of ``1 / ticks_per_us`` microseconds."""

    timed: Timed
    latency: int
    ticks_per_us: int

    def path(self) -> CriticalPath:
        """Parts of the makespan, in microseconds."""
        return critical_path(self.timed, self.latency).scaled(Fraction(1, self.ticks_per_us))


def block_sequences(spec: PlanSpec) -> tuple[Fraction, ...]:
    """Size of one activation of each stage: its blocks times the sequences of a work item.

    A stage without a block counts as one: it has an input activation, too.
    """
    schedule = spec.schedule
    sequences = Fraction(schedule.micro_batch_size, schedule.num_sequence_splits)
    return tuple(max(1, num_blocks(names)) * sequences for names in stage_layers(spec))


def asap_clock(schedule: Schedule, spec: PlanSpec) -> Clock:
    """The times of a schedule's computations if no message waits for another.

    An alternating pair takes as long as the longer of its computations, which is the least possible time.

    Raises:
        ValueError: it cannot finish.
    """
    costs = stage_costs(spec)
    if spec.alternation is not None:
        backward = min(map(add, costs.backward_input, costs.backward_weight))
        costs = replace(costs, overlapped=tuple(max(time, backward) for time in costs.forward))
    rows = [costs.forward, costs.backward_input, costs.backward_weight, costs.overlapped or (), (costs.latency,)]
    ticks_per_us = lcm(*(Fraction(time).denominator for row in rows for time in row))
    forward, backward_input, backward_weight, overlapped, (latency,) = (
        [int(time * ticks_per_us) for time in row] for row in rows
    )
    in_ticks = StageCosts(forward, backward_input, backward_weight, latency, overlapped or None)
    return Clock(asap(schedule, in_ticks), latency, ticks_per_us)


def clock_of(lowered: LoweredPlan) -> Clock:
    """The times of a plan's computations, by its ``cost.p2p`` and with the slowdown by early receives.

    Raises:
        SimulationError: it cannot finish.
        ValueError: it cannot finish.
    """
    slows = bool(lowered.spec.cost.recv_slowdown) and any(lowered.receives)
    alternates = lowered.spec.alternation is not None
    if lowered.spec.cost.p2p == "async" and not slows and not alternates:
        return asap_clock(lowered.schedule, lowered.spec)
    return simulated_clock(lowered)


def simulated_clock(lowered: LoweredPlan) -> Clock:
    """The times of a lowered plan's computations in the reference model, with the waits of its messages.

    As in ``asap_clock``, every message takes the time of the slowest, and no
    links are shared: candidates are compared by one measure. Alternating
    computations have the times of their exchanges and messages.

    Raises:
        SimulationError: it cannot finish.
        BadPlanError: the backend is not simulated.
    """
    links = None if lowered.spec.alternation is None else lowered.links
    timeline = simulate(replace(lowered, links=links)).timeline
    latency = lowered.spec.cost.p2p_latency_us
    computations = [
        (span.rank, timeline.us(span.start), timeline.us(span.end))
        for span, op_kind in zip(timeline.spans, kinds_of(span.op for span in timeline.spans), strict=True)
        if op_kind in COMPUTE_KINDS
    ]
    denominators = {time.denominator for _, *times in computations for time in times}
    ticks_per_us = lcm(latency.denominator, *denominators)
    by_rank = grouped((rank, (int(start * ticks_per_us), int(end * ticks_per_us))) for rank, start, end in computations)
    first = {coords["pp"]: rank for rank, coords in reversed([*enumerate(timeline.ranks)])}
    mine = [by_rank.get(first[pp], []) for pp in range(len(lowered.programs))]
    timed = Timed(
        lowered.programs,
        tuple(tuple(start for start, _ in spans) for spans in mine),
        tuple(tuple(end for _, end in spans) for spans in mine),
    )
    return Clock(timed, int(latency * ticks_per_us), ticks_per_us)


def figures_of(clock: Clock, activations: Sequence[Fraction]) -> Figures:
    """The figures of one step; ``activations`` has the size of one activation of each stage."""
    timed, ranks = clock.timed, range(len(clock.timed.programs))
    busy = [Fraction(timed.busy(rank)) / clock.ticks_per_us for rank in ranks]
    unit = lcm(*(size.denominator for size in activations))
    sizes = [int(size * unit) for size in activations]
    return Figures(
        makespan_us=Fraction(timed.makespan) / clock.ticks_per_us,
        work_us=sum(busy, Fraction(0)) / len(ranks),
        most_work_us=max(busy),
        busiest=busy.index(max(busy)),
        peak=Fraction(max(_peak(timed, rank, sizes) for rank in ranks), unit),
    )


def _peak(timed: Timed, rank: int, sizes: Sequence[int]) -> int:
    """The most that a rank holds at once."""
    changes: list[tuple[Time, int]] = []
    for op, start, end in zip(timed.programs[rank], timed.starts[rank], timed.ends[rank], strict=True):
        if op.kind is OpKind.FORWARD:
            changes.append((start, sizes[op.stage]))
        elif op.kind is not OpKind.BACKWARD_INPUT:
            changes.append((end, -sizes[op.stage]))
    return most_held(changes)
