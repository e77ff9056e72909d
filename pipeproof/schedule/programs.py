"""Per-rank programs: the computations of one pipeline rank in one step, in order.

Generators make them. Lowering adds transfers with their waits, collectives, gradient reductions and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain, repeat
from typing import TypeVar

from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.ops import Op, OpKind

Program = tuple[Op, ...]
Programs = tuple[Program, ...]
"""One program per pipeline rank."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Result of a generator: the computations of each pipeline rank, and the pairs that run concurrently.

    ``pairs`` has for each rank the positions in its program at which an overlapped pair begins: first the forward, then
    the backward. Empty without overlaps. A stage on two ranks has two copies, which share the micro-batches.
    """

    programs: Programs
    pairs: tuple[frozenset[int], ...] = ()

    def pairs_of(self, rank: int) -> frozenset[int]:
        """The positions in ``rank``'s program at which an overlapped pair begins."""
        return self.pairs[rank] if self.pairs else frozenset()

    def rows(self, rank: int) -> list[Row]:
        """The computations of ``rank`` as rows; the two of an overlapped pair share a batch."""
        begins, batch = self.pairs_of(rank), NONE
        rows = []
        for position, op in enumerate(self.programs[rank]):
            if position - 1 not in begins:
                batch = position if position in begins else NONE
            rows.append(Row(op, batch=batch))
        return rows


class UnfitSizesError(ValueError):
    """A schedule does not exist for these sizes.

    ``key`` is the key of the plan to change, ``help`` names the nearest values that fit.
    """

    def __init__(self, message: str, *, help: str, key: tuple[str, ...] = ("schedule", "num_micro_batches")) -> None:
        super().__init__(message)
        self.help = help
        self.key = key


def steady_pairs(num_forwards: int, num_warmup: Iterable[int]) -> tuple[frozenset[int], ...]:
    """By rank, the positions of the forwards after its warm-up, each directly before a backward."""
    return tuple(frozenset(range(warmup, 2 * num_forwards - warmup, 2)) for warmup in num_warmup)


def in_turn(forwards: Sequence[Op], backwards: Sequence[Op], num_warmup: int) -> Program:
    """Forwards of the warm-up, then a backward behind each forward, then the backwards that are left."""
    pairs = zip(forwards[num_warmup:], backwards, strict=False)
    left = backwards[max(0, len(forwards) - num_warmup) :]
    return (*forwards[:num_warmup], *chain.from_iterable(pairs), *left)


def stages_of(programs: Programs) -> tuple[tuple[int, ...], ...]:
    """The stages that each program computes, in order of their numbers."""
    return tuple(tuple(sorted({op.stage for op in program})) for program in programs)


# As-soon-as-possible times of a schedule: every rank begins each computation as soon as it can.
#
# A forward needs the forward of the stage before it, a backward (or I) the
# backward (or I) of the stage behind it, each one latency later if that is on
# another rank; a rank runs one computation, or one overlapped pair, at a time in
# the order of its program. Nothing else takes time: messages never wait for each
# other. Times are exact if costs are (integers or fractions). One pass, linear
# in operations. The engines of ``sim`` cannot be called: they time an op graph,
# and lowering reads these times to make one.


Time = int | Fraction
_AnyTime = TypeVar("_AnyTime", bound=Time | float)

_F, _B, _I, _W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT
Key = tuple[bool, int, int | None, int | None]
"""Forward or backward, stage, micro-batch and sequence split: the output of one computation."""


def input_of(op: Op, num_stages: int) -> Key | None:
    """The input of a computation from a neighbouring stage; None for a W, and at the ends of the network."""
    is_forward = op.kind is _F
    stage = op.stage - 1 if is_forward else op.stage + 1
    if op.kind is _W or not 0 <= stage < num_stages:
        return None
    return is_forward, stage, op.micro_batch, op.split


def source_of(op: Op, num_stages: int) -> Key | None:
    """The input of a computation on any rank, including the I of a W and the forward of the last stage."""
    if op.kind is _F or (op.kind is not _W and op.stage + 1 < num_stages):
        return input_of(op, num_stages)
    return op.kind is not _W, op.stage, op.micro_batch, op.split


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Times of one computation by global stage, in any one unit; ``latency`` is of an edge between two ranks.

    A whole backward takes the sum of both its parts. ``overlapped`` is the
    time of a forward that overlaps with a whole backward, by the stage of the
    forward; without it, and with an I, the time is the sum of the two.
    """

    forward: Sequence[Time]
    backward_input: Sequence[Time]
    backward_weight: Sequence[Time]
    latency: Time = 0
    overlapped: Sequence[Time] | None = None

    def of(self, op: Op) -> Time:
        """The time of an F, B, I or W alone."""
        match op.kind:
            case OpKind.FORWARD:
                return self.forward[op.stage]
            case OpKind.BACKWARD_INPUT:
                return self.backward_input[op.stage]
            case OpKind.BACKWARD_WEIGHT:
                return self.backward_weight[op.stage]
            case _:
                return self.backward_input[op.stage] + self.backward_weight[op.stage]

    def of_pair(self, forward: Op, backward: Op) -> Time:
        """The time of two computations that run side by side."""
        if backward.kind is OpKind.BACKWARD and self.overlapped is not None:
            return self.overlapped[forward.stage]
        return self.of(forward) + self.of(backward)


def even_costs(
    num_stages: int, forward: Time = 1, backward_input: Time = 1, backward_weight: Time = 1, latency: Time = 0
) -> StageCosts:
    """The same times for every stage."""
    return StageCosts((forward,) * num_stages, (backward_input,) * num_stages, (backward_weight,) * num_stages, latency)


def time_covered(intervals: Iterable[tuple[Time, Time]]) -> Time:
    """The length of the union of intervals (start, end)."""
    covered: Time = 0
    last: Time | None = None
    for start, end in sorted(intervals):
        begin = start if last is None else max(start, last)
        if end > begin:
            covered += end - begin
        last = end if last is None else max(last, end)
    return covered


def most_held(changes: Iterable[tuple[Time | float, int]]) -> int:
    """Return the most that is held at once; what is released at a time makes room for what is acquired then."""
    return max(accumulate((change for _, change in sorted(changes)), initial=0))


def held_changes(
    computations: Iterable[tuple[OpKind, _AnyTime, _AnyTime]], freed_at: OpKind = _W
) -> Iterator[tuple[_AnyTime, int]]:
    """Yield when activations are taken, at the start of F, and given back: at the end of B, or of ``freed_at``."""
    for kind, start, end in computations:
        if kind is _F:
            yield start, 1
        elif kind in (_B, freed_at):
            yield end, -1


@dataclass(frozen=True, slots=True)
class Timed:
    """Start and end of each computation, by rank and position in its program."""

    programs: tuple[Program, ...]
    starts: tuple[tuple[Time, ...], ...]
    ends: tuple[tuple[Time, ...], ...]

    @property
    def makespan(self) -> Time:
        """From 0 to the last end over all ranks."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    def span(self, rank: int) -> Time:
        """From the first start to the last end of a rank (what zero-bubble papers report)."""
        return self.ends[rank][-1] - self.starts[rank][0] if self.ends[rank] else 0

    def busy(self, rank: int) -> Time:
        """Time in which a rank computes; what runs side by side counts once."""
        return time_covered(zip(self.starts[rank], self.ends[rank], strict=True))

    def peak(self, rank: int, freed_at: OpKind = OpKind.BACKWARD_WEIGHT) -> int:
        """Most chunk activations held at once: from the start of F to the end of B, or of ``freed_at`` (I or W)."""
        kinds = (op.kind for op in self.programs[rank])
        return most_held(held_changes(zip(kinds, self.starts[rank], self.ends[rank], strict=True), freed_at))


def asap(schedule: Schedule, costs: StageCosts) -> Timed:
    """Run a schedule.

    Raises:
        ValueError: it cannot finish; the message names the next operation of each rank.
    """
    return AsapRun(schedule, costs).timed()


class AsapRun:
    """One run of a schedule, each rank as far as it can go."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self._schedule, self._costs = schedule, costs
        self._num_stages = 1 + max((op.stage for program in schedule.programs for op in program), default=-1)
        self._outputs: dict[Key, tuple[int, Time]] = {}
        """The rank and the time of what has been computed."""
        self._waiting: dict[Key, int] = {}
        self._place = [0] * len(schedule.programs)
        self._clock: list[Time] = [0] * len(schedule.programs)
        self._starts: list[list[Time]] = [[] for _ in schedule.programs]
        self._ends: list[list[Time]] = [[] for _ in schedule.programs]

    def timed(self) -> Timed:
        """Run to the end."""
        ready = list(range(len(self._place)))
        while ready:
            ready += self._advance(ready.pop())
        programs = self._schedule.programs
        stuck = [rank for rank, position in enumerate(self._place) if position < len(programs[rank])]
        if stuck:
            where = ", ".join(f"rank {rank} at {programs[rank][self._place[rank]]}" for rank in stuck[:8])
            raise ValueError(f"the schedule cannot finish: {where}")
        return Timed(programs, tuple(map(tuple, self._starts)), tuple(map(tuple, self._ends)))

    def _advance(self, rank: int) -> Iterator[int]:
        """Run a rank until it lacks an input; return the ranks that wait for its outputs."""
        program, pairs = self._schedule.programs[rank], self._schedule.pairs_of(rank)
        while self._place[rank] < len(program):
            position = self._place[rank]
            ops = program[position : position + 2] if position in pairs else program[position : position + 1]
            start = self._start(rank, ops)
            if start is None:
                return
            end = start + (self._costs.of_pair(*ops) if len(ops) > 1 else self._costs.of(ops[0]))
            self._place[rank], self._clock[rank] = position + len(ops), end
            for op in ops:
                self._starts[rank].append(start)
                self._ends[rank].append(end)
                if op.kind is not _W:
                    made = op.kind is _F, op.stage, op.micro_batch, op.split
                    self._outputs[made] = rank, end
                    if made in self._waiting:
                        yield self._waiting.pop(made)

    def _start(self, rank: int, ops: Sequence[Op]) -> Time | None:
        """The start of a rank's next computation or pair; None if its input is not there yet."""
        start = self._clock[rank]
        for op in ops:
            source = source_of(op, self._num_stages)
            if source is None:
                continue
            if source not in self._outputs:
                self._waiting[source] = rank
                return None
            source_rank, time = self._outputs[source]
            start = max(start, time if source_rank == rank else time + self._costs.latency)
        return start


_REST = tuple(Op._field_defaults[name] for name in Op._fields[3:])


def stage_ops(kind: OpKind, stage: int, micro_batches: Iterable[int]) -> list[Op]:
    """Return ``[Op(kind, stage, micro_batch) for micro_batch in micro_batches]``."""
    fields = zip(repeat(kind), repeat(stage), micro_batches, *map(repeat, _REST), strict=False)
    return list(map(tuple.__new__, repeat(Op), fields))
