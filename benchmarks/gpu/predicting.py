"""Times of a profile, put onto the stages of other plans; their simulation and its error.

The profile is of 1F1B: F, I and W of each rank's stage as they were in the
step, the time of a message, and the most memory of each rank. Schedules with
two chunks on a rank need the times of half a stage. In addition to the step, each rank
has timed three chunks by themselves: embedding and half of the blocks, half of
the blocks, half of the blocks and head. A chunk of a rank takes what the chunk
of its sort took there, times what the rank's stage took in the step over what
its two halves took by themselves. A GPU that waits less may be slower
(``Power``): how much of 1F1B's step the ranks computed, and how much slower
they compute without any waiting, are measured. Time between operations goes to
the forward and the input gradient before it: after them messages are posted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from pipeproof.comm.lower import lower
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind, parse_op
from pipeproof.sim.simulate import Simulation, simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.profile_file import Profile

PARTS: Mapping[str, str] = {"F": "forward_us", "I": "backward_input_us", "W": "backward_weight_us"}
"""Timed quantities, and the plan key of each."""

ROUNDS = 4
"""Number of iterations after which the load of ranks hardly changes."""

OpTimes = dict[tuple[int, str], float]
"""Start of each computation by rank and text, in microseconds from the first."""


@dataclass(frozen=True)
class Power:
    """Slowdown of a GPU whose mean power would be above its limit.

    ``busy`` is the share of the step that ranks computed when they were timed, ``slower`` how many times as long the
    same computations take one right after the other. Both are means over the ranks: values of single ranks scatter by
    more than they differ. A computation takes the same energy at any clock, and the limit holds the mean power: without
    waiting the limit is ``1 / slower`` of the power that the computations would draw, so a rank is slower only where it
    computes for more than this share of a step.
    """

    busy: float
    slower: float

    def factor(self, busy: float) -> float:
        """Factor on the time of a rank that computes for this share of a step."""
        return max(1.0, self.slower * busy) / max(1.0, self.slower * self.busy)

    def from_full(self) -> FromFull:
        """The same for times that were taken one right after the other."""
        return FromFull(self)


@dataclass(frozen=True)
class FromFull:
    """Speedup of computations that were timed without waiting.

    A replayed step follows others, on a GPU that is still warm, and so it does not get back all of ``slower``: its
    times are on a straight line between the times without waiting and the times at ``Power.busy``.
    """

    power: Power

    def factor(self, busy: float) -> float:
        """Factor on the time of a rank that computes for this share of a step."""
        power = self.power
        if power.busy >= 1:
            return 1.0
        return (1 + (power.slower - 1) * (busy - power.busy) / (1 - power.busy)) / power.slower


@dataclass(frozen=True)
class Measured:
    """Measurements of 1F1B and its chunks: microseconds, bytes."""

    stages: Sequence[Mapping[str, float]]
    """F, I and W of each rank's stage in the step."""
    chunks: Sequence[Sequence[Mapping[str, float]]]
    """Times of the three sorts of chunks by themselves, by rank."""
    message_us: float
    between_us: float
    """Time from an operation's end to the next one's start, once for each forward and each backward."""
    excess_bytes: Sequence[int]
    """Excess of each rank over its simulation."""
    power: Power


def stage_times(profile: Profile) -> list[dict[str, float]]:
    """Medians of F, I and W by stage."""
    return [{op.kind: op.whole.median_us for op in stage.ops if op.kind in PARTS} for stage in profile.stages]


def between_us(profile: Profile) -> float:
    """The time between operations, shared out to forwards and backwards."""
    gaps = profile.host.between_ops
    num = sum(op.whole.count for stage in profile.stages for op in stage.ops if op.kind in "FB")
    return 0.0 if gaps is None else gaps.count * gaps.mean_us / num


def cost_of(plan: LoweredPlan, measured: Measured) -> dict[str, Any]:
    """The section ``cost`` of a plan with one or two chunks a rank."""
    num_stages, num_ranks = len(plan.stages), len(measured.stages)
    if num_stages == num_ranks:
        times = list(measured.stages)
    else:
        times = [_chunk(plan, stage, measured) for stage in range(num_stages)]
    return given_cost(times, measured.message_us, measured.between_us)


def given_cost(times: Sequence[Mapping[str, float]], message_us: float, between_us: float = 0.0) -> dict[str, Any]:
    """The section ``cost`` that has these times, by stage."""
    more = {"F": between_us, "I": between_us, "W": 0.0}
    keys = {key: [round(one[part] + more[part], 3) for one in times] for part, key in PARTS.items()}
    return {**keys, "p2p_latency_us": round(message_us, 3), "p2p": "backend"}


def _chunk(plan: LoweredPlan, stage: int, measured: Measured) -> dict[str, float]:
    rank, num_ranks = int(plan.owner[stage, 0]), len(measured.stages)
    first, middle, last = measured.chunks[rank]
    ends = (first if rank == 0 else middle), (last if rank == num_ranks - 1 else middle)
    own = first if stage == 0 else last if stage == len(plan.stages) - 1 else middle
    return {part: own[part] * measured.stages[rank][part] / sum(end[part] for end in ends) for part in PARTS}


def simulated(data: Mapping[str, Any], cost: Mapping[str, Any]) -> Simulation:
    """One step of a plan at these times."""
    return simulate(lower(plan_from_dict({**data, "cost": cost}).spec))


def with_power(
    plan: LoweredPlan, data: Mapping[str, Any], cost: Mapping[str, Any], power: Power | FromFull
) -> tuple[dict[str, Any], Simulation]:
    """These times as the plan's ranks have them, busy as they are in it; and the simulation with them."""
    owners = [int(plan.owner[stage, 0]) for stage in range(len(plan.stages))]
    factors = [1.0] * plan.mesh.num_ranks
    for _ in range(ROUNDS):
        times = {
            **cost,
            **{
                key: [round(time * factors[rank], 3) for time, rank in zip(cost[key], owners, strict=True)]
                for key in PARTS.values()
            },
        }
        simulation = simulated(data, times)
        step_us, _, lengths = predicted_starts(simulation, times)
        busy = [sum(us for (rank, _), us in lengths.items() if rank == one) for one in range(len(factors))]
        factors = [power.factor(us / step_us) for us in busy]
    return times, simulation


def predicted_starts(simulation: Simulation, cost: Mapping[str, Any]) -> tuple[float, OpTimes, OpTimes]:
    """From the first start of a computation to the last end; starts; lengths.

    A simulation has the two of an overlapped pair begin and end together. They are executed one after the other,
    and so they are shown.
    """
    timeline = simulation.timeline
    starts: OpTimes = {}
    lengths: OpTimes = {}
    for rank in range(len(timeline.ranks)):
        spans = [span for span, _ in timeline.compute_spans(rank)]
        for before, span in pairwise([None, *spans]):
            begin, end = float(timeline.us(span.start)), float(timeline.us(span.end))
            if before is not None and (before.start, before.end) == (span.start, span.end):
                first_us = _given_us(before.op, cost)
                lengths[rank, before.op] = first_us
                begin += first_us
            starts[rank, span.op], lengths[rank, span.op] = begin, end - begin
    first = min(starts.values())
    starts = {key: start - first for key, start in starts.items()}
    return max(starts[key] + lengths[key] for key in starts), starts, lengths


def _given_us(text: str, cost: Mapping[str, Any]) -> float:
    op = parse_op(text)
    parts = "IW" if op.kind is OpKind.BACKWARD else op.kind.value
    return float(sum(cost[PARTS[part]][op.stage] for part in parts))


def measured_starts(steps: Iterable[Mapping[int, Sequence[LogEntry]]]) -> tuple[float, OpTimes, OpTimes]:
    """The same for measured steps, each from its own first start on: medians over them."""
    starts, lengths = defaultdict(list), defaultdict(list)
    extents = []
    for step in steps:
        entries = [(rank, e) for rank, log in step.items() for e in log if _computes(e)]
        begin = min(entry.start_ns for _, entry in entries)
        extents.append((max(entry.end_ns for _, entry in entries) - begin) / 1e3)
        for rank, entry in entries:
            starts[rank, entry.op].append((entry.start_ns - begin) / 1e3)
            lengths[rank, entry.op].append((entry.end_ns - entry.start_ns) / 1e3)
    return median(extents), {k: median(v) for k, v in starts.items()}, {k: median(v) for k, v in lengths.items()}


def _computes(entry: LogEntry) -> bool:
    return "/" not in entry.op and parse_op(entry.op).kind in COMPUTE_KINDS


def part_times(log: Iterable[LogEntry]) -> dict[int, dict[str, float]]:
    """Medians of F, I and W in one rank's log, by stage; a whole backward has its two parts."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for entry in filter(_computes, log):
        op = parse_op(entry.op)
        if op.kind is OpKind.BACKWARD:
            times[op.stage, "I"].append((entry.split_ns - entry.start_ns) / 1e3)
            times[op.stage, "W"].append((entry.end_ns - entry.split_ns) / 1e3)
        else:
            times[op.stage, op.kind.value].append((entry.end_ns - entry.start_ns) / 1e3)
    by_stage: dict[int, dict[str, float]] = defaultdict(dict)
    for (stage, part), all_times in sorted(times.items()):
        by_stage[stage][part] = median(all_times)
    return dict(by_stage)


def graph_times(ops: Iterable[tuple[str, Sequence[int]]]) -> dict[int, dict[str, float]]:
    """F, I and W by stage of computations that were timed whole; where B has no parts anywhere, each is half of it."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for text, lengths in ops:
        op = parse_op(text)
        times[op.stage, op.kind.value] += [length / 1e3 for length in lengths]
    by_stage: dict[int, dict[str, float]] = defaultdict(dict)
    for (stage, kind), lengths_us in sorted(times.items()):
        if kind != "B":
            by_stage[stage][kind] = median(lengths_us)
        elif (stage, "I") not in times:
            by_stage[stage] |= dict.fromkeys("IW", median(lengths_us) / 2)
    return dict(by_stage)


def start_errors(predicted: OpTimes, measured: OpTimes) -> tuple[float, float]:
    """The largest, and that which 95 % are below, of how far starts are apart; microseconds."""
    assert predicted.keys() == measured.keys()
    apart = sorted(abs(predicted[key] - measured[key]) for key in predicted)
    return apart[-1], apart[max(0, -(-95 * len(apart) // 100) - 1)]


def spans_of(starts: OpTimes, lengths: OpTimes) -> list[list[Any]]:
    """Rank, operation, start and end, to a microsecond."""
    return [
        [rank, op, round(start), round(start + lengths[rank, op])]
        for (rank, op), start in sorted(starts.items(), key=lambda item: (item[0][0], item[1]))
    ]
