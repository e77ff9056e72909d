"""Profile of a run from its op logs.

Processes of one host read one monotonic clock, so times of different ranks can be subtracted.
"""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from pipeproof.cost.measured_profile import measured_sections
from pipeproof.exec.measure.installed_backends import installed_version
from pipeproof.exec.rank.idle_messages import EdgeTimes, spread_by_size
from pipeproof.exec.rank.op_log import HOST_QUEUE, LogEntry, Timing, op_ids_of
from pipeproof.schedule.op_table import NONE, EdgeKind, OpGraph
from pipeproof.schedule.ops import CHILD_KINDS, GATHER_KINDS, PART_KINDS, Op, OpKind
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.profile_file import (
    ClockOfTimes,
    CollectivePoint,
    DeviceMemory,
    Host,
    Machine,
    MeasuredPlan,
    Profile,
    Spread,
    StageOp,
    StageTimes,
    Steps,
    TimedKind,
    by_size,
    spread_of,
)
from pipeproof.system_calls import num_cores
from pipeproof.verify.subject import Subject

_TIMED = frozenset(OpKind(kind) for kind in get_args(TimedKind))


def measured_profile(
    subject: Subject,
    digest: str,
    logs: Mapping[int, Sequence[LogEntry]],
    idle_messages: EdgeTimes,
    threads: int,
    timings: Mapping[int, Timing] = MappingProxyType({}),
) -> Profile:
    """Return the profile of a run from the ranks' logs; the first step is left out if there are others.

    ``logs`` are by rank and match the graph; ``idle_messages`` has the times of all channels before the first step;
    ``threads`` is the number per process; ``timings`` has each rank's clock (default: the host's).
    """
    plan, graph = subject.plan, subject.graph
    all_steps = sorted({entry.step for entries in logs.values() for entry in entries})
    counted = all_steps[1:] or all_steps
    steps = [_MeasuredStep(graph, logs, step) for step in counted]
    return Profile(
        profile=1,
        machine=_machine(plan.spec.run.backend, len(logs), threads, timings),
        plan=MeasuredPlan(digest=digest, **measured_sections(plan.spec)),
        steps=Steps(run=len(all_steps), counted=len(counted)),
        stages=tuple(_stages(len(plan.stages), steps)),
        messages=by_size(sample for step in steps for sample in step.messages()),
        bare_messages=spread_by_size(idle_messages.values()),
        collectives=tuple(_collectives(sample for step in steps for sample in step.collectives())),
        host=Host(
            between_ops=spread_of(Spread, [gap for step in steps for gap in step.gaps()]),
            after_wait=spread_of(Spread, [delay for step in steps for delay in step.delays()]),
        ),
        clock=_clock(timings),
        memory=tuple(
            DeviceMemory(rank=rank, allocated_bytes=timing.allocated_bytes, reserved_bytes=timing.reserved_bytes)
            for rank, timing in sorted(timings.items())
            if timing.device
        ),
    )


class _MeasuredStep:
    """One step of all ranks: the log's entries by op id."""

    def __init__(self, graph: OpGraph, logs: Mapping[int, Sequence[LogEntry]], step: int) -> None:
        self._graph = graph
        self._entries: dict[int, LogEntry] = {}
        self._hosts: list[list[int]] = []
        of_ranks = []
        for rank, entries in sorted(logs.items()):
            of_step = [entry for entry in entries if entry.step == step]
            ids = op_ids_of(graph, rank, of_step)
            of_rank = {op_id: entry for op_id, entry in zip(ids, of_step, strict=True) if op_id is not None}
            self._entries |= of_rank
            self._hosts.append([i for i, entry in of_rank.items() if entry.queue == HOST_QUEUE])
            of_ranks.append(of_rank)
        done_ns = {op_id: entry.end_ns for op_id, entry in self._entries.items()}
        for send, receive in graph.edges[EdgeKind.MATCH].tolist():  # one event, which both ends see late
            done_ns[send] = done_ns[receive] = min(done_ns[send], done_ns[receive])
        self._ready_ns: dict[int, int] = {}
        for of_rank in of_ranks:
            self._ready_ns |= _ready_times(of_rank, done_ns)

    def timed_ops(self) -> Iterator[tuple[int, OpKind, int, int]]:
        """Yield stage, kind and nanoseconds of each timed operation, and of the two parts of each whole backward.

        Each time is given for the whole operation, and without its collectives.
        """
        for op_ids in self._hosts:
            inside: dict[str, list[LogEntry]] = defaultdict(list)
            parts: dict[Op, dict[OpKind, int]] = defaultdict(lambda: defaultdict(int))
            for op_id in op_ids:
                op = self._graph.ops[op_id]
                if _is_child(op):
                    inside[str(op.target)].append(self._entries[op_id])
                elif op.kind in PART_KINDS and op.target is not None:
                    parts[op.target][op.kind] += _duration(self._entries[op_id])
            for op_id in op_ids:
                op = self._graph.ops[op_id]
                if op in parts:
                    for kind, whole in _alternately(op.kind, parts[op]):
                        yield op.stage, kind, whole, whole
                elif op.kind in _TIMED:
                    for kind, whole, children in _parts(op.kind, self._entries[op_id], inside[str(op)]):
                        yield op.stage, kind, whole, whole - sum(map(_duration, children))

    def messages(self) -> Iterator[tuple[int, int]]:
        """Yield (bytes, nanoseconds) of each message unless its receiver was ready after its sender."""
        for send, receive in self._graph.edges[EdgeKind.MATCH].tolist():
            sent, ready, entry = self._ready_ns[send], self._ready_ns[receive], self._entries[receive]
            if ready <= sent:
                yield entry.numel * dtype_bytes(entry.dtype), max(0, entry.end_ns - sent)

    def collectives(self) -> Iterator[tuple[tuple[str, int, int], int]]:
        """Yield ((kind, members, bytes per member), nanoseconds from the last arrival to the end) of each member."""
        calls: dict[tuple[int, int], list[int]] = defaultdict(list)
        for op_id in self._entries:
            group = int(self._graph.group[op_id])
            if group != NONE:
                calls[group, int(self._graph.position[op_id])].append(op_id)
        for (group, _), members in calls.items():
            kind = self._graph.ops[members[0]].kind
            name = str(OpKind.ALL_GATHER if kind in GATHER_KINDS else kind)
            entries = [self._entries[op_id] for op_id in members]
            last_start = max(entry.start_ns for entry in entries)
            for entry in entries:
                num_bytes = entry.numel * dtype_bytes(entry.dtype)
                yield (name, self._graph.groups[group].size, num_bytes), max(0, entry.end_ns - last_start)

    def gaps(self) -> Iterator[int]:
        """Yield the nanoseconds between consecutive operations of a host."""
        for op_ids in self._hosts:
            walk = [op_id for op_id in op_ids if not _is_child(self._graph.ops[op_id])]
            for before, after in pairwise(walk):
                if self._graph.ops[after].kind not in PART_KINDS:  # a part may wait for a collective
                    yield self._entries[after].start_ns - self._entries[before].end_ns

    def delays(self) -> Iterator[int]:
        """Yield the nanoseconds from the end of a transfer to the end of its wait, if the wait began before."""
        for op_ids in self._hosts:
            for op_id in op_ids:
                target = int(self._graph.waits_for[op_id])
                wait = self._entries[op_id]
                if target != NONE and wait.start_ns < self._entries[target].end_ns:
                    yield max(0, wait.end_ns - self._entries[target].end_ns)  # two streams of a GPU see the same end


def _is_child(op: Op) -> bool:
    """Return True for a collective inside of another operation."""
    return op.kind in CHILD_KINDS and op.target is not None


def _ready_times(entries: Mapping[int, LogEntry], done_ns: Mapping[int, int]) -> dict[int, int]:
    """Times at which each transfer of a rank was posted and its channel was free, by op id."""
    free_ns: dict[str, int] = {}
    ready = {}
    transfers = [(op_id, entry) for op_id, entry in entries.items() if entry.queue != HOST_QUEUE]
    for op_id, entry in sorted(transfers, key=lambda pair: pair[1].start_ns):
        ready[op_id] = max(entry.posted_ns, free_ns.get(entry.queue, 0))
        free_ns[entry.queue] = done_ns[op_id]
    return ready


def _parts(
    kind: OpKind, entry: LogEntry, children: Sequence[LogEntry]
) -> Iterator[tuple[OpKind, int, Sequence[LogEntry]]]:
    """Yield nanoseconds and children of an operation, then of both parts of a backward with a known split."""
    yield kind, _duration(entry), children
    if kind is OpKind.BACKWARD and entry.split_ns:
        before = [child for child in children if child.start_ns < entry.split_ns]
        yield OpKind.BACKWARD_INPUT, entry.split_ns - entry.start_ns, before
        after = [child for child in children if child.start_ns >= entry.split_ns]
        yield OpKind.BACKWARD_WEIGHT, entry.end_ns - entry.split_ns, after


def _alternately(kind: OpKind, parts: Mapping[OpKind, int]) -> Iterator[tuple[OpKind, int]]:
    """Yield the nanoseconds of a computation of an overlapped pair by its parts, and of both parts of a backward.

    They contain the slowdown by the other computation's collectives.
    """
    yield kind, sum(parts.values())
    if kind is OpKind.BACKWARD:
        yield OpKind.BACKWARD_INPUT, parts[OpKind.PART]
        yield OpKind.BACKWARD_WEIGHT, parts[OpKind.WEIGHTS]


def _duration(entry: LogEntry) -> int:
    return entry.end_ns - entry.start_ns


def _stages(num_stages: int, steps: Sequence[_MeasuredStep]) -> Iterator[StageTimes]:
    times: dict[tuple[int, OpKind], list[tuple[int, int]]] = defaultdict(list)
    for step in steps:
        for stage, op_kind, whole_ns, own_ns in step.timed_ops():
            times[stage, op_kind].append((whole_ns, own_ns))
    for stage in range(num_stages):
        ops = []
        for kind in get_args(TimedKind):
            measured = times.get((stage, OpKind(kind)), [])
            whole, own = (spread_of(Spread, [ns[index] for ns in measured]) for index in (0, 1))
            if whole is not None and own is not None:
                ops.append(StageOp(kind=kind, whole=whole, own=own))
        yield StageTimes(stage=stage, ops=tuple(ops))


def _collectives(measured: Iterable[tuple[tuple[str, int, int], int]]) -> Iterator[CollectivePoint]:
    times: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for key, time_ns in measured:
        times[key].append(time_ns)
    for (kind, axis_size, num_bytes), samples in sorted(times.items()):
        point = spread_of(CollectivePoint, samples, kind=kind, axis_size=axis_size, bytes=num_bytes)
        assert point is not None
        yield point


def _clock(timings: Mapping[int, Timing]) -> ClockOfTimes:
    """Return one clock for all ranks; errors of two ranks may have different signs, so the two largest add."""
    errors_ns = sorted((timing.accuracy_ns for timing in timings.values()), reverse=True)
    return ClockOfTimes(
        name="device" if any(timing.device for timing in timings.values()) else "host",
        accuracy_us=sum(errors_ns[:2]) / 1000,
    )


def _machine(backend: str, num_processes: int, threads: int, timings: Mapping[int, Timing]) -> Machine:
    return Machine(
        processor=_processor(),
        cores=num_cores(),
        processes=num_processes,
        threads=threads,
        framework=f"{backend} {installed_version(backend) or 'of an unknown version'}",
        devices=tuple(timing.device for _, timing in sorted(timings.items()) if timing.device),
        system=f"{platform.system()} {platform.release()}",
    )


def _processor() -> str:
    """Name of the processor if the kernel reports it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
