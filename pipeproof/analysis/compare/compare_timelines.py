"""Two timelines side by side: predicted and measured, or of two plans.

Operations are paired by rank, text and step. A timeline of one step is
compared with each step of a timeline with several: a prediction with all
measured steps.

Simulated timelines have one clock. If one of the two was measured, the
clocks are set equal at the first operation of each rank in each step: the
earliest common one on the rank's host queue. Ranks of a real run do not
begin a step together, and the distance of their starts is not a property of the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby, zip_longest
from statistics import median

from pipeproof.analysis.compare.timeline_files import TimedOp, TimelineFile
from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.ops import COMPUTE_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.sim.timeline import COMPUTE_QUEUE

_IN_EVERY_FILE = COMPUTE_KINDS | TRANSFER_KINDS
"""Operations that timelines have even without duration: only their order is compared."""
_WAITING = TRANSFER_KINDS | {OpKind.WAIT}
"""Kinds whose length depends on other ranks; they are never listed as worst."""


@dataclass(frozen=True, slots=True)
class PairedOp:
    """One operation in both timelines, ``b`` on the clock of ``a``; times in exact microseconds."""

    a: TimedOp
    b: TimedOp
    shift: Fraction
    """Offset from times of ``b`` to the clock of ``a``."""

    @property
    def duration_error(self) -> Fraction:
        """Duration in B minus duration in A."""
        return self.b.duration - self.a.duration

    @property
    def start_error(self) -> Fraction:
        """Start in B minus start in A."""
        return self.b.start + self.shift - self.a.start


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step of A compared with one of B: exact microseconds from the first start to the last end over all ranks.

    ``compute_a`` and ``compute_b`` count only the computations (F, B, I, W).
    """

    step_a: int
    step_b: int
    makespan_a: Fraction
    makespan_b: Fraction
    compute_a: Fraction
    compute_b: Fraction


@dataclass(frozen=True, slots=True)
class KindErrors:
    """Operations of one kind that both have: exact microseconds, B minus A.

    ``median_ratio`` is the median of B / A over the operations that take time in A; None without such.
    """

    kind: OpKind
    count: int
    total_a: Fraction
    total_b: Fraction
    median_error: Fraction
    max_error: Fraction
    """The error farthest from 0."""
    median_ratio: Fraction | None
    median_start_error: Fraction
    max_start_error: Fraction


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position on a queue with different computations or transfers; None is the queue's end."""

    rank: int
    queue: str
    step_a: int
    step_b: int
    place: int
    op_a: str | None
    op_b: str | None


@dataclass(frozen=True)
class Comparison:
    """Comparison of two timelines: common operations, and their differences."""

    a: TimelineFile
    b: TimelineFile
    per_rank_clocks: bool
    steps: tuple[StepTimes, ...]
    pairs: tuple[PairedOp, ...]
    kinds: tuple[KindErrors, ...]
    first_divergence: Divergence | None
    only_a: Mapping[OpKind, int]
    only_b: Mapping[OpKind, int]

    def worst(self, count: int) -> tuple[PairedOp, ...]:
        """The operations with the largest differences of length, without transfers, waits and equal ones."""
        own = (pair for pair in self.pairs if pair.a.op.kind not in _WAITING and pair.duration_error)
        return tuple(sorted(own, key=lambda pair: -abs(pair.duration_error))[:count])


def compare_timelines(a: TimelineFile, b: TimelineFile, step: int | None = None) -> Comparison:
    """Compare two timelines; ``step`` selects a step of timelines with several.

    Raises:
        ValueError: there is no such step, or the two have several steps and none in common.
    """
    per_rank = a.measured or b.measured
    times: list[StepTimes] = []
    pairs: list[PairedOp] = []
    divergences: list[tuple[tuple[Fraction, int], Divergence]] = []
    only_a: Counter[OpKind] = Counter()
    only_b: Counter[OpKind] = Counter()
    for ops_a, ops_b in _step_pairs(a, b, step):
        by_key = {(op.rank, op.op): op for op in ops_b}
        both = [(op, by_key[op.rank, op.op]) for op in ops_a if (op.rank, op.op) in by_key]
        common = {(op.rank, op.op) for op, _ in both}
        only_a.update(op.op.kind for op in ops_a if (op.rank, op.op) not in common)
        only_b.update(op.op.kind for op in ops_b if (op.rank, op.op) not in common)
        by_start = sorted(both, key=lambda pair: (pair[0].queue != COMPUTE_QUEUE, pair[0].start, pair[0].order))
        shifts = {x.rank: x.start - y.start for x, y in reversed(by_start)} if per_rank else {}  # by the first of each
        whole = min(op.start for op in ops_a) - min(op.start for op in ops_b)
        pairs += [PairedOp(x, y, shifts.get(x.rank, whole)) for x, y in both]
        times.append(_times(ops_a, ops_b))
        divergences += _divergences(ops_a, ops_b)
    return Comparison(
        a=a,
        b=b,
        per_rank_clocks=per_rank,
        steps=tuple(times),
        pairs=tuple(pairs),
        kinds=tuple(_kinds(pairs)),
        first_divergence=min(divergences, key=lambda divergence: divergence[0])[1] if divergences else None,
        only_a=dict(only_a),
        only_b=dict(only_b),
    )


def _step_pairs(
    a: TimelineFile, b: TimelineFile, step: int | None
) -> Iterator[tuple[Sequence[TimedOp], Sequence[TimedOp]]]:
    steps_a, steps_b = _by_step(a), _by_step(b)
    if len(steps_a) == len(steps_b) == 1:
        chosen = [(*steps_a, *steps_b)]
    elif len(steps_a) == 1:
        chosen = [(next(iter(steps_a)), number) for number in steps_b]
    elif len(steps_b) == 1:
        chosen = [(number, next(iter(steps_b))) for number in steps_a]
    else:
        chosen = [(number, number) for number in steps_a if number in steps_b]
    if step is not None:
        wanted = (steps_a if len(steps_a) > 1 else {step}, steps_b if len(steps_b) > 1 else {step})
        for file, steps in zip((a, b), wanted, strict=True):
            if step not in steps:
                raise ValueError(f"{file.file} has no step {step}: it has {_listed(steps)}")
        chosen = [
            (x, y) for x, y in chosen if (len(steps_a) == 1 or x == step) and (len(steps_b) == 1 or y == step)
        ]  # fmt: skip
    if not chosen:
        raise ValueError(f"no step is in both: A has {_listed(steps_a)}, and B {_listed(steps_b)}")
    for step_a, step_b in chosen:
        yield steps_a[step_a], steps_b[step_b]


def _by_step(file: TimelineFile) -> dict[int, list[TimedOp]]:
    by_step = sorted(file.ops, key=lambda op: op.step)
    return {step: list(ops) for step, ops in groupby(by_step, lambda op: op.step)}


def _listed(steps: Mapping[int, object] | set[int]) -> str:
    numbers = sorted(steps)
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"


def _times(ops_a: Sequence[TimedOp], ops_b: Sequence[TimedOp]) -> StepTimes:
    computes = [[op for op in ops if op.op.kind in COMPUTE_KINDS] for ops in (ops_a, ops_b)]
    return StepTimes(
        ops_a[0].step, ops_b[0].step, _extent(ops_a), _extent(ops_b), _extent(computes[0]), _extent(computes[1])
    )


def _extent(ops: Sequence[TimedOp]) -> Fraction:
    return max(op.end for op in ops) - min(op.start for op in ops) if ops else Fraction(0)


def _kinds(pairs: Sequence[PairedOp]) -> Iterator[KindErrors]:
    """The errors of each kind, in the order of the kinds."""
    groups = grouped((pair.a.op.kind, pair) for pair in pairs)
    for kind in (kind for kind in OpKind if kind in groups):
        group = groups[kind]
        errors, starts = [pair.duration_error for pair in group], [pair.start_error for pair in group]
        ratios = [pair.b.duration / pair.a.duration for pair in group if pair.a.duration]
        yield KindErrors(
            kind=kind,
            count=len(group),
            total_a=sum((pair.a.duration for pair in group), Fraction(0)),
            total_b=sum((pair.b.duration for pair in group), Fraction(0)),
            median_error=median(errors),
            max_error=max(errors, key=abs),
            median_ratio=median(ratios) if ratios else None,
            median_start_error=median(starts),
            max_start_error=max(starts, key=abs),
        )


def _divergences(
    ops_a: Sequence[TimedOp], ops_b: Sequence[TimedOp]
) -> Iterator[tuple[tuple[Fraction, int], Divergence]]:
    """On each queue the first divergence of the order, with its time in A and the rank."""
    queues_a, queues_b = _orders(ops_a), _orders(ops_b)
    for rank, queue in sorted(queues_a.keys() | queues_b.keys()):
        one, other = queues_a.get((rank, queue), []), queues_b.get((rank, queue), [])
        for position, (op_a, op_b) in enumerate(zip_longest(one, other)):
            if op_a is None or op_b is None or op_a.op != op_b.op:
                at = op_a.start if op_a is not None else one[-1].end if one else Fraction(0)
                texts = [None if op is None else str(op.op) for op in (op_a, op_b)]
                yield (at, rank), Divergence(rank, queue, ops_a[0].step, ops_b[0].step, position, *texts)
                break


def _orders(ops: Sequence[TimedOp]) -> dict[tuple[int, str], list[TimedOp]]:
    return grouped(
        ((op.rank, op.queue), op)
        for op in sorted(ops, key=lambda op: (op.start, op.order))
        if op.op.kind in _IN_EVERY_FILE
    )
