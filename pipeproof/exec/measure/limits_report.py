"""Division of a measured step: the time of each rank by what it is spent on, without remainder, and as text.

A step lasts from the first computation of any rank to the last end of an operation, as the makespan of a simulation,
on all ranks. Each nanosecond of a rank belongs to one part of one stage:

- computation: inside of F, B, I or W, without its collectives, or inside of parts of pairs that take turns;
- messages, collectives: exposed communication. A wait, or a collective, while the data is under way: all ends of it
  are posted, by the clocks of their ranks;
- bubble: the rank depends on another one. The message that the rank waits for is not posted at its other end, the last
  member of a collective has not come, or the rank has ended its step before others;
- launch-bound: the host is late. Between two operations, and in a wait from the end of its transfer. On a GPU this is
  time without work on its stream. If the other end of the next wait is not posted either, it is bubble: a faster host
  would gain nothing;
- update: the optimizer, reductions and gathers of weights without their collectives, slices.

Time between operations belongs to the stage of the next one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from rich.text import Text

from pipeproof.diagnostics.units import time_text
from pipeproof.exec.rank.op_log import LogEntry, Timing
from pipeproof.schedule.columns import HOST_QUEUE
from pipeproof.schedule.op_table import NONE, EdgeKind, OpGraph
from pipeproof.schedule.ops import CHILD_KINDS, COLLECTIVE_KINDS, COMPUTE_KINDS, PART_KINDS, Op, OpKind
from pipeproof.specs.profile_file import (
    LargestLoss,
    LossCause,
    MeasuredPlan,
    ProductPeak,
    Profile,
    StageLimits,
    StepLimits,
)
from pipeproof.stages.describe.boundary import work_item_sizes
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.stages.describe.op_work import Phase, product_flops
from pipeproof.verify.subject import Subject
from pipeproof.views.tables import table_lines


class TimePart(StrEnum):
    """One part of a rank's time; the value is the name in the profile."""

    COMPUTATION = "computation"
    MESSAGES = "messages"
    COLLECTIVES = "collectives"
    BUBBLE = "bubble"
    LAUNCH_BOUND = "launch_bound"
    UPDATE = "update"


PartTimes = Mapping[tuple[int, TimePart], int]
"""Nanoseconds by stage and part."""

_PHASES: Mapping[OpKind, tuple[Phase, ...]] = {
    OpKind.FORWARD: (Phase.FORWARD,),
    OpKind.BACKWARD: (Phase.INPUT, Phase.WEIGHT),
    OpKind.BACKWARD_INPUT: (Phase.INPUT,),
    OpKind.BACKWARD_WEIGHT: (Phase.WEIGHT,),
}


def is_child(op: Op) -> bool:
    """Return True for a collective inside of another operation."""
    return op.kind in CHILD_KINDS and op.target is not None


def collective_calls(graph: OpGraph, entries: Mapping[int, LogEntry]) -> dict[tuple[int, int], list[int]]:
    """Return the members' operations of each collective of a step, by group and position."""
    calls: dict[tuple[int, int], list[int]] = defaultdict(list)
    for op_id in entries:
        group = int(graph.group[op_id])
        if group != NONE:
            calls[group, int(graph.position[op_id])].append(op_id)
    return calls


@dataclass(frozen=True, slots=True)
class DividedStep:
    """One step: its nanoseconds, which are the same for all ranks, and their division on each rank."""

    length_ns: int
    ranks: tuple[PartTimes, ...]


def divided_step(graph: OpGraph, entries: Mapping[int, LogEntry], hosts: Sequence[Sequence[int]]) -> DividedStep:
    """Divide the time of each rank in one step.

    ``entries`` are the log's by op id, ``hosts`` each rank's operations on its host queue in the order of the log.
    """
    return _Division(graph, entries, hosts).result()


class _Division:
    def __init__(self, graph: OpGraph, entries: Mapping[int, LogEntry], hosts: Sequence[Sequence[int]]) -> None:
        self._graph, self._entries, self._hosts = graph, entries, hosts
        matches: list[tuple[int, int]] = graph.edges[EdgeKind.MATCH].tolist()
        self._partner = dict(matches) | {receive: send for send, receive in matches}
        self._last_arrival: dict[int, int] = {}
        """By member of a collective: the arrival of the last other member."""
        for members in collective_calls(graph, entries).values():
            for op_id in members:
                others = [entries[member].start_ns for member in members if member != op_id]
                self._last_arrival[op_id] = max(others, default=entries[op_id].start_ns)

    def result(self) -> DividedStep:
        on_hosts = [(op_id, self._entries[op_id]) for op_ids in self._hosts for op_id in op_ids]
        computes = [entry.start_ns for op_id, entry in on_hosts if self._graph.ops[op_id].kind in COMPUTE_KINDS]
        begin = min(computes, default=0)
        end = max((entry.end_ns for _, entry in on_hosts), default=0)
        end = max(begin, end) if computes else begin
        return DividedStep(end - begin, tuple(self._rank(op_ids, begin, end) for op_ids in self._hosts))

    def _rank(self, op_ids: Sequence[int], begin: int, end: int) -> PartTimes:
        inside: dict[Op | None, list[int]] = defaultdict(list)
        for op_id in op_ids:
            op = self._graph.ops[op_id]
            if is_child(op):
                inside[op.target].append(op_id)
        clock, stage = _PartClock(begin, end), 0
        for op_id in op_ids:
            op, entry = self._graph.ops[op_id], self._entries[op_id]
            if is_child(op):
                continue
            clock.stage = stage = op.stage
            target = int(self._graph.waits_for[op_id])
            if target in self._partner:
                self._wait(clock, entry, target)
            elif op.kind in COLLECTIVE_KINDS:
                clock.until(min(self._last_arrival[op_id], entry.start_ns), TimePart.BUBBLE)
                clock.until(entry.start_ns, TimePart.LAUNCH_BOUND)
                self._collective(clock, op_id)
            else:
                awaited = int(self._graph.part_before[op_id])
                if awaited in self._last_arrival and self._graph.queue[awaited] > HOST_QUEUE:
                    self._collective(clock, awaited, entry.start_ns)
                clock.until(entry.start_ns, TimePart.LAUNCH_BOUND)
                part = TimePart.COMPUTATION if op.kind in COMPUTE_KINDS | PART_KINDS else TimePart.UPDATE
                part = TimePart.LAUNCH_BOUND if op.kind is OpKind.WAIT else part  # for what is done already
                for child in inside[op]:
                    clock.until(self._entries[child].start_ns, part)
                    self._collective(clock, child)
                clock.until(entry.end_ns, part)
        clock.stage = stage
        clock.until(end, TimePart.BUBBLE)
        return clock.times

    def _wait(self, clock: _PartClock, wait: LogEntry, target: int) -> None:
        done = min(self._entries[target].end_ns, wait.end_ns)
        clock.until(min(self._entries[self._partner[target]].posted_ns, done), TimePart.BUBBLE)
        clock.until(wait.start_ns, TimePart.LAUNCH_BOUND)
        clock.until(done, TimePart.MESSAGES)
        clock.until(wait.end_ns, TimePart.LAUNCH_BOUND)

    def _collective(self, clock: _PartClock, op_id: int, latest: int | None = None) -> None:
        """Give time to a collective until its end, or to what is left of one that the rank waits for, to ``latest``."""
        end = self._entries[op_id].end_ns
        end = end if latest is None else min(end, latest)
        clock.until(min(self._last_arrival[op_id], end), TimePart.BUBBLE)
        clock.until(end, TimePart.COLLECTIVES)


class _PartClock:
    """Time of one rank from ``begin`` to ``end``, given to parts of stages in order, each moment once."""

    def __init__(self, begin: int, end: int) -> None:
        self._now, self._end = begin, end
        self.stage = 0
        self.times: dict[tuple[int, TimePart], int] = defaultdict(int)

    def until(self, time: int, part: TimePart) -> None:
        """Give the time from now until then, if there is any, to a part of the current stage."""
        time = min(time, self._end)
        if time > self._now:
            self.times[self.stage, part] += time - self._now
            self._now = time


def planned_flops(subject: Subject) -> dict[tuple[int, int], Fraction]:
    """Return the FLOPs of products and attention in a step, by rank and stage; empty for custom layers.

    Those of a recomputation are not included.
    """
    plan, graph = subject.plan.spec, subject.graph
    if plan.is_custom:
        return {}
    sizes, by_work_item = work_item_sizes(plan)
    of_stages = [[product_flops(plan, names, size) for size in sizes] for names in stage_layers(plan)]
    flops: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for op_id, op in enumerate(graph.ops):
        if op.kind in COMPUTE_KINDS:
            of_size = of_stages[op.stage][by_work_item[int(graph.work_item[op_id])] if by_work_item else 0]
            flops[int(graph.rank[op_id]), op.stage] += sum(of_size[phase] for phase in _PHASES[op.kind])
    return flops


def step_limits(
    subject: Subject,
    steps: Sequence[DividedStep],
    timings: Mapping[int, Timing],
    flops: Mapping[tuple[int, int], Fraction | int],
) -> StepLimits:
    """Return the means over the counted steps.

    ``timings`` have the measured peak of each rank, ``flops`` those of a step by rank and stage, if they are known.
    """
    graph = subject.graph
    peaks = {rank: timing.peak_flops for rank, timing in timings.items() if timing.peak_flops}
    stages = []
    for rank in range(graph.num_ranks):
        coords = subject.plan.mesh.coords(graph.global_rank[rank])
        times = [step.ranks[rank] for step in steps]
        for stage in sorted({stage for of_step in times for stage, _ in of_step}):
            mean_us = {
                f"{part}_us": sum(of_step.get((stage, part), 0) for of_step in times) / len(steps) / 1000
                for part in TimePart
            }
            known, computation_us = float(flops.get((rank, stage), 0)), mean_us["computation_us"]
            rate = known / computation_us * 1e6 if known and computation_us else None
            stages.append(
                StageLimits(
                    rank=rank,
                    pp=coords["pp"],
                    stage=stage,
                    **mean_us,
                    flops=known or None,
                    tflops=None if rate is None else rate / 1e12,
                    share_of_peak=rate / peaks[rank] if rate is not None and rank in peaks else None,
                )
            )
    return StepLimits(
        step_us=sum(step.length_ns for step in steps) / len(steps) / 1000,
        stages=tuple(stages),
        peaks=tuple(
            ProductPeak(rank=rank, dtype=timings[rank].peak_dtype, tflops=peak / 1e12)
            for rank, peak in sorted(peaks.items())
        ),
        largest_loss=_largest_loss(stages),
    )


def _largest_loss(stages: Sequence[StageLimits]) -> LargestLoss | None:
    """Return the largest loss of the slowest rank, which has the shortest bubble; None if it loses nothing.

    In addition to the parts that are not computation, a loss is the time that its computation would save at the peak,
    and the time by which it computes longer than the mean of all ranks.
    """
    of_ranks: dict[int, list[StageLimits]] = defaultdict(list)
    for each in stages:
        of_ranks[each.rank].append(each)
    if not of_ranks:
        return None
    rank, own = min(of_ranks.items(), key=lambda pair: sum(each.bubble_us for each in pair[1]))
    computation = sum(each.computation_us for each in own)
    mean = sum(each.computation_us for each in stages) / len(of_ranks)
    losses: dict[LossCause, float] = {
        "bubble": sum(each.bubble_us for each in own),
        "messages": sum(each.messages_us for each in own),
        "collectives": sum(each.collectives_us for each in own),
        "launch_bound": sum(each.launch_bound_us for each in own),
        "update": sum(each.update_us for each in own),
        "imbalance": computation - mean,
        "below_peak": sum(
            each.computation_us * (1 - each.share_of_peak) for each in own if each.share_of_peak is not None
        ),
    }
    cause = max(losses, key=lambda name: losses[name])
    return LargestLoss(rank=rank, cause=cause, us=losses[cause]) if losses[cause] > 0 else None


_HEADINGS = (">pp", ">stage", ">computation", ">bubble", ">exposed communication", ">launch-bound", ">update")

_CAUSES: dict[LossCause, str] = {
    "bubble": "bubble: it waits for other ranks",
    "messages": "exposed messages",
    "collectives": "exposed collectives",
    "launch_bound": "launch-bound: the host is late",
    "update": "the optimizer and the reductions",
    "imbalance": "more computation than the mean of the ranks",
    "below_peak": "computation below the peak of the products",
}


@dataclass(frozen=True, slots=True)
class LimitsReport:
    """The limits of a step of a measured profile; its text is the table that ``pipeproof run --profile`` prints."""

    profile: Profile

    @property
    def limits(self) -> StepLimits:
        """The figures.

        Raises:
            ValueError: the profile is of a release that did not divide steps.
        """
        if self.profile.limits is None:
            raise ValueError("the profile has no limits of a step: measure again")
        return self.profile.limits

    def __str__(self) -> str:
        return "\n".join(line.plain for line in self.lines())

    def lines(self) -> list[Text]:
        """The title, the table, one row for each pipeline rank and stage, and the largest loss."""
        limits, plan = self.limits, self.profile.plan
        rates = [each.tflops for each in limits.stages if each.tflops is not None]
        is_large = max((*rates, *(peak.tflops for peak in limits.peaks)), default=1.0) >= 1
        unit, scale = ("TFLOP/s", 1.0) if is_large else ("GFLOP/s", 1000.0)
        rows: dict[tuple[int, int], list[StageLimits]] = defaultdict(list)
        for each in limits.stages:
            rows[each.pp, each.stage].append(each)
        cells = [_row(limits, replicas, scale) for _, replicas in sorted(rows.items())]
        lines = [
            Text(f"step of {time_text(limits.step_us)}, mean of {self.profile.steps.counted}, in % of it:"),
            *table_lines((*_HEADINGS, f">{unit}", ">of peak"), cells),
        ]
        if limits.peaks:
            types = sorted({peak.dtype for peak in limits.peaks})
            peaks = [scale * peak.tflops for peak in limits.peaks]
            spread = f"{min(peaks):.3g}" if len(peaks) == 1 else f"{min(peaks):.3g} to {max(peaks):.3g}"
            lines.append(Text(f"measured peak of products: {spread} {unit} in {' and '.join(types)}"))
        if not rates:
            lines.append(Text("FLOPs are not known: the layers are custom layers, or no product was counted"))
        if limits.largest_loss is not None:
            lines.append(_loss_line(limits.largest_loss, limits.step_us, plan))
        return lines


def _row(limits: StepLimits, replicas: Sequence[StageLimits], scale: float) -> list[str]:
    """Cells of a stage on a pipeline rank: means over its tensor-, context-, expert- and data-parallel ranks."""

    def share(part: Callable[[StageLimits], float]) -> str:
        return f"{100 * sum(map(part, replicas)) / len(replicas) / limits.step_us:.1f}"

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if len(known) == len(replicas) else None

    rate, of_peak = (mean([getattr(each, name) for each in replicas]) for name in ("tflops", "share_of_peak"))
    return [
        str(replicas[0].pp),
        str(replicas[0].stage),
        share(lambda each: each.computation_us),
        share(lambda each: each.bubble_us),
        share(lambda each: each.messages_us + each.collectives_us),
        share(lambda each: each.launch_bound_us),
        share(lambda each: each.update_us),
        "-" if rate is None else f"{scale * rate:.3g}",
        "-" if of_peak is None else f"{100 * of_peak:.2g} %",
    ]


def _loss_line(loss: LargestLoss, step_us: float, plan: MeasuredPlan) -> Text:
    share = f"{100 * loss.us / step_us:.1f} %"
    return Text(
        f"largest loss on the slowest rank ({loss.rank}): {share}, {_CAUSES[loss.cause]}; {_remedy(loss, plan)}"
    )


def _remedy(loss: LargestLoss, plan: MeasuredPlan) -> str:
    """Return the change that makes a loss smaller, for the framework, the device and the model of the run."""
    is_script = plan.model.get("kind") == "layers" and plan.backend == "torch"
    match loss.cause:
        case "bubble":
            return (
                f"use more than {plan.num_micro_batches} micro-batches, or another schedule than {plan.schedule}: "
                "`pipeproof tune` with this profile compares them"
            )
        case "messages":
            return (
                "overlap them: earlier receives (`transport.recv_order`), or a schedule with other work meanwhile: "
                "`pipeproof tune` with this profile compares schedules"
            )
        case "collectives":
            return "use smaller tp, cp, ep or dp groups, or more micro-batches for those at the end of the step"
        case "launch_bound" if plan.device == "gpu":
            return "capture the step as a CUDA graph" if is_script else "replay the step: `run.replay: true`"
        case "launch_bound":
            return "use larger micro-batches: the host takes the same time for each operation"
        case "update":
            return "use more micro-batches for each update"
        case "imbalance":
            return "move layers to other stages"
        case "below_peak":
            compiled = ", or compile the blocks (`torch.compile`)" if is_script else ""
            return f"use larger products (a larger micro-batch){compiled}"
