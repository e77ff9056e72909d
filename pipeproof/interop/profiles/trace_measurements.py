"""Times of a plan's operations from the traces of its ranks.

- A computation on a GPU lasts from the start of the first to the end of the last kernel that was launched in its range.
  Kernels of communication do not count, except collectives inside of the operation if the plan shards stages.
- On processors it is its range; if waits may be in the range, it is the range of the operators inside.
- The time of a message on GPUs is the shorter one of its two kernels: the end that was ready last did not wait. On
  processors it is the time from the post of the send to the end of the receive, for messages whose receiver already
  waited, if both ranks have one clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from pipeproof.diagnostics.problems import grouped
from pipeproof.interop.profiles.op_ranges import OpRange, RankSteps, StepRanges, steps_of_trace
from pipeproof.interop.profiles.profile_codes import not_assigned
from pipeproof.interop.profiles.rank_trace import NamedRange, RankTrace, Work
from pipeproof.schedule.op_table import NONE, EdgeKind
from pipeproof.schedule.ops import COMPUTE_KINDS, META_KINDS, TRANSFER_KINDS, Op, OpKind
from pipeproof.schedule.programs import time_covered
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.verify.subject import Subject

_UPDATES = frozenset({OpKind.STEP, OpKind.REDUCE_GRAD, OpKind.GATHER_WEIGHT})


@dataclass(slots=True)
class Measurements:
    """Samples of the counted steps.

    ``ops`` are nanoseconds by stage and kind, ``messages`` samples of (bytes, nanoseconds). ``step_ns`` is the median
    length of a step, None if it is not known. ``notes`` are assumptions and omissions.
    """

    files: Sequence[str]
    num_steps: int
    num_counted: int
    ops: dict[tuple[int, OpKind], list[int]] = field(default_factory=lambda: defaultdict(list))
    messages: list[tuple[int, int]] = field(default_factory=list)
    step_ns: int | None = None
    devices: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)


class _TransferEnd(NamedTuple):
    """One end of a message. ``waited_ns`` is when its rank began to wait for it, None on a GPU."""

    start_ns: int
    end_ns: int
    clock: str
    waited_ns: int | None


@dataclass(frozen=True, slots=True)
class _Place:
    """Position of a rank: its index in the plan's graph, and the replica that the graph stands for."""

    index: int
    replica: tuple[tuple[str, int], ...]


def measure_traces(traces: Sequence[RankTrace], subject: Subject) -> Measurements:
    """Return the times of the plan's operations in the traces of some or all of its ranks.

    Raises:
        BadPlanError: PP164, a trace does not fit to the plan.
    """
    places = _places(traces, subject)
    graph = subject.graph
    sharded = any(subject.plan.mesh.size(axis) > 1 for axis in ("tp", "cp", "ep"))
    measurements = Measurements(sorted({trace.file for trace in traces}), 0, 0)
    ends: dict[tuple[tuple[tuple[str, int], ...], int, int], _TransferEnd] = {}
    step_counts: Counter[int] = Counter()
    lengths: list[list[tuple[int, int, str]]] = []
    left_out = 0
    for trace, position in zip(traces, places, strict=True):
        ids = list(graph.rank_ops(position.index))
        program = [graph.ops[i] for i in ids if graph.ops[i].kind in COMPUTE_KINDS]
        if not trace.device and subject.plan.spec.run.device == "gpu":
            raise not_assigned(
                trace.file, "the plan runs on GPUs, and the trace has no kernels",
                "record the GPU's activities, too: ProfilerActivity.CUDA",
            )  # fmt: skip
        steps = steps_of_trace(trace, program)
        reader = _TraceReader(trace, steps, sharded=sharded)
        counted = steps.steps[1:] or steps.steps
        step_counts[len(steps.steps)] += 1
        left_out += steps.num_left_out
        for number, step in enumerate(counted):
            for op, time in reader.times(step):
                measurements.ops[op.stage, op.kind].append(time)
            for op_id, end in reader.transfers(step, ids, graph.ops):
                ends[position.replica, number, op_id] = end
        lengths.append([reader.length(step) for step in counted])
        if trace.num_unlaunched:
            measurements.notes.append(
                f"rank {trace.rank}: {trace.num_unlaunched} kernels without a launch in the trace"
            )
    measurements.num_steps = max(step_counts)
    measurements.num_counted = max(len(of_rank) for of_rank in lengths)
    measurements.step_ns = _step_ns(lengths)
    measurements.devices = [trace.device for trace in traces if trace.device]
    if len(step_counts) == 1:
        measurements.messages = list(_messages(subject, ends))
    else:
        measurements.notes.append("the ranks have different numbers of steps: messages are not matched")
    if left_out:
        measurements.notes.append(f"{left_out} operations of incomplete steps are left out")
    if len(traces) < subject.plan.mesh.num_ranks:
        measurements.notes.append(f"{len(traces)} of {subject.plan.mesh.num_ranks} ranks have a trace")
    return measurements


def _places(traces: Sequence[RankTrace], subject: Subject) -> list[_Place]:
    """Return the position of each trace's rank; a file for each rank at most."""
    graph, mesh = subject.graph, subject.plan.mesh
    seen: dict[int, str] = {}
    places = []
    for trace in traces:
        if trace.rank is None:
            raise not_assigned(
                trace.file, "the trace does not show its rank", "name the file `rank3.json`, by its rank"
            )
        if trace.rank in seen:
            raise not_assigned(trace.file, f"rank {trace.rank} has another file: `{seen[trace.rank]}`", "give one file")
        if not 0 <= trace.rank < mesh.num_ranks:
            raise not_assigned(
                trace.file, f"rank {trace.rank}, and the plan has {mesh.num_ranks} ranks", "give the plan of this run"
            )
        seen[trace.rank] = trace.file
        coords = mesh.coords(trace.rank)
        if trace.rank in graph.global_rank and not subject.plan.folded:
            places.append(_Place(list(graph.global_rank).index(trace.rank), ()))
            continue
        same = [index for index, rank in enumerate(graph.global_rank) if mesh.coords(rank)["pp"] == coords["pp"]]
        places.append(_Place(same[0], tuple(sorted((axis, c) for axis, c in coords.items() if axis != "pp"))))
    return places


class _TraceReader:
    """Times of one rank's ranges."""

    def __init__(self, trace: RankTrace, steps: RankSteps, *, sharded: bool) -> None:
        self._trace, self._steps, self._sharded = trace, steps, sharded
        self._launched = [work.launched_ns for work in trace.work]
        self._gloo = [each for each in trace.ranges if each.name in ("gloo:send", "gloo:recv")]

    def times(self, step: StepRanges) -> Iterator[tuple[Op, int]]:
        """Yield the computations of a step and the updates of its stages, with their nanoseconds.

        Overlapped pairs have no time of their own.
        """
        updates: Counter[Op] = Counter()
        for each in (*step.computations, *step.others):
            op = each.ops[0]
            if len(each.ops) > 1:
                continue
            if op.kind in COMPUTE_KINDS:
                time = self._time_ns(each)
                if time is None:
                    raise not_assigned(
                        self._trace.file,
                        f"no work was launched in the range of {op}",
                        "record the GPU's activities, too (ProfilerActivity.CUDA); replayed CUDA graphs have no ranges",
                    )
                yield op, time
            elif op.kind in _UPDATES:
                kind = OpKind.REDUCE_GRAD if op.kind is OpKind.REDUCE_GRAD else OpKind.STEP
                updates[Op(kind, op.stage)] += self._time_ns(each) or 0
        stages = sorted({op.stage for each in step.computations for op in each.ops})
        for stage in stages if step.optimizer else ():
            total = sum(self._optimizer_ns(start, end) for start, end in step.optimizer)
            updates[Op(OpKind.STEP, stage)] += total // len(stages)
        yield from updates.items()

    def transfers(self, step: StepRanges, ids: Sequence[int], ops: Sequence[Op]) -> Iterator[tuple[int, _TransferEnd]]:
        """Yield the op id and the end of each transfer of a step that was recorded exactly once."""
        planned = grouped((ops[op_id], op_id) for op_id in ids if ops[op_id].kind in TRANSFER_KINDS - META_KINDS)
        seen: Counter[Op] = Counter()
        for each in step.others:
            op = each.ops[0]
            if op not in planned or seen[op] >= len(planned[op]):
                continue
            op_id = planned[op][seen[op]]
            seen[op] += 1
            end = self._transfer_end(each)
            if end is not None:
                yield op_id, end

    def length(self, step: StepRanges) -> tuple[int, int, str]:
        """Return the start of the first and the end of the last computation of a step, and their clock."""
        spans = [self._span(each) or (each.start_ns, each.end_ns) for each in step.computations]
        return min(start for start, _ in spans), max(end for _, end in spans), self._trace.clock

    def _time_ns(self, each: OpRange) -> int | None:
        span = self._span(each)
        return None if span is None else span[1] - span[0]

    def _span(self, each: OpRange) -> tuple[int, int] | None:
        """Return the start and end of an operation's work, None without any."""
        if not self._trace.device and not each.waits:
            return each.start_ns, each.end_ns
        works = [work for work in self._in_range(each) if self._counts(work)]
        if not works:
            return None
        return min(work.start_ns for work in works), max(work.end_ns for work in works)

    def _counts(self, work: Work) -> bool:
        return not work.is_communication or (self._sharded and not work.is_message)

    def _optimizer_ns(self, start: int, end: int) -> int:
        if not self._trace.device:
            return end - start
        return int(time_covered((work.start_ns, work.end_ns) for work in self._in(start, end)))

    def _in_range(self, each: OpRange) -> Sequence[Work]:
        return self._in(each.start_ns, each.end_ns)

    def _in(self, start_ns: int, end_ns: int) -> Sequence[Work]:
        return self._trace.work[bisect_left(self._launched, start_ns) : bisect_right(self._launched, end_ns)]

    def _transfer_end(self, each: OpRange) -> _TransferEnd | None:
        if self._trace.device:
            kernels = [work for work in self._in_range(each) if work.is_message]
            if len(kernels) != 1:
                return None
            return _TransferEnd(kernels[0].start_ns, kernels[0].end_ns, self._trace.clock, None)
        first = bisect_left(self._gloo, each.start_ns, key=_start)
        last = bisect_right(self._gloo, each.end_ns, key=_start)
        if last - first != 1:
            return None
        named = self._gloo[first]
        ranges = self._steps.ranges
        index = bisect_right(ranges, named.end_ns, key=_start) - 1
        waiting = ranges[index].start_ns if index >= 0 and ranges[index].end_ns >= named.end_ns else named.end_ns
        return _TransferEnd(named.start_ns, named.end_ns, self._trace.clock, waiting)


def _start(each: OpRange | NamedRange) -> int:
    return each.start_ns


def _messages(
    subject: Subject, ends: Mapping[tuple[tuple[tuple[str, int], ...], int, int], _TransferEnd]
) -> Iterator[tuple[int, int]]:
    """Yield (bytes, nanoseconds) of the messages whose ends both show the time."""
    graph = subject.graph
    matches: dict[int, int] = dict(graph.edges[EdgeKind.MATCH].tolist())
    for (replica, step, op_id), send in ends.items():
        receive = ends.get((replica, step, matches[op_id])) if op_id in matches else None
        if receive is None or graph.tensor[op_id] == NONE:
            continue
        dtype = graph.tensors[int(graph.tensor[op_id])].dtype
        num_bytes = int(graph.stop[op_id] - graph.start[op_id]) * dtype_bytes(dtype)
        if receive.waited_ns is None:
            yield num_bytes, min(send.end_ns - send.start_ns, receive.end_ns - receive.start_ns)
        elif send.clock and send.clock == receive.clock and receive.waited_ns <= send.start_ns <= receive.end_ns:
            yield num_bytes, receive.end_ns - send.start_ns


def _step_ns(lengths: Sequence[Sequence[tuple[int, int, str]]]) -> int | None:
    """Return the median length of the steps, over all ranks if they share a clock, else of the longest rank."""
    count = min(map(len, lengths))
    clocks = {clock for of_rank in lengths for _, _, clock in of_rank}
    steps = [[of_rank[number] for of_rank in lengths] for number in range(count)]
    if len(clocks) == 1 and "" not in clocks and len({len(of_rank) for of_rank in lengths}) == 1:
        return round(median(max(end for _, end, _ in step) - min(start for start, _, _ in step) for step in steps))
    return round(median(max(end - start for start, end, _ in step) for step in steps))
