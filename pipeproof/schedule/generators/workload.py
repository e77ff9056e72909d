"""Workload of one step: computations, integer times and the memory of each rank; the problem that ``optimal`` solves.

Micro-batches are identical. So the forwards, the I and the W of each stage may run in index order without loss: name
the k-th operation after micro-batch k. Its input on another stage is done by then, because at least k of those
operations are done, and the memory of a rank does not depend on names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from operator import add

from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Programs, Schedule, StageCosts, Time, UnfitSizesError

Placement = Sequence[Sequence[int]]
"""The stages of each rank."""

_F, _B, _I, _W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT


@dataclass(frozen=True, slots=True)
class Workload:
    """``num_micro_batches`` forwards, I and W of every stage, each stage on one rank.

    Times are in ticks, by stage; ``latency`` is the latency of an edge between two ranks. ``limits`` are the most chunk
    activations that each rank may hold, from the start of F to the end of W.
    """

    placement: tuple[tuple[int, ...], ...]
    rank_of: tuple[int, ...]
    num_micro_batches: int
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    latency: int
    limits: tuple[int, ...]
    ticks_per_unit: int

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return len(self.rank_of)

    @property
    def costs(self) -> StageCosts:
        """The times in ticks."""
        return StageCosts(self.forward, self.backward_input, self.backward_weight, self.latency)

    @property
    def num_operations(self) -> int:
        """Forwards, I and W of all ranks."""
        return 3 * self.num_stages * self.num_micro_batches

    def edges(self) -> tuple[int, ...]:
        """The latency between each stage and the next, 0 if one rank has both."""
        return tuple(self.latency if rank != following else 0 for rank, following in pairwise(self.rank_of))

    def busy(self, rank: int) -> int:
        """Ticks that a rank computes."""
        each = (self.forward[s] + self.backward_input[s] + self.backward_weight[s] for s in self.placement[rank])
        return self.num_micro_batches * sum(each)

    def heads(self) -> tuple[int, ...]:
        """The earliest start of each stage's first forward."""
        steps = map(add, self.forward, self.edges())
        return tuple(accumulate(steps, initial=0))

    def least_makespan(self) -> int:
        """Ticks that no schedule beats: of the busiest rank from its earliest start, or of one micro-batch alone."""
        heads = self.heads()
        busiest = max(min(heads[s] for s in stages) + self.busy(rank) for rank, stages in enumerate(self.placement))
        return max(busiest, self._alone())

    def _alone(self) -> int:
        """Ticks of one micro-batch alone."""
        heads, edges = self.heads(), self.edges()
        alone = heads[-1] + self.forward[-1]
        longest = 0
        for stage in reversed(range(self.num_stages)):
            alone += self.backward_input[stage]
            longest = max(longest, alone + self.backward_weight[stage])
            alone += edges[stage - 1] if stage else 0
        return longest

    def in_units(self, ticks: int) -> Time:
        """A time in the units of ``costs``, as an integer if possible."""
        time = Fraction(ticks, self.ticks_per_unit)
        return time.numerator if time.denominator == 1 else time


def make_workload(
    placement: Placement, num_micro_batches: int, costs: StageCosts, memory_limit: int | Sequence[int] | None = None
) -> Workload:
    """The work of one step; ``memory_limit`` is one number for all ranks, or one for each; None is unlimited.

    Raises:
        UnfitSizesError: a rank may not even hold one micro-batch of its stages, or a stage is on two ranks.
        ValueError: the placement leaves out a stage or has a rank without one, or times are missing or no times.
    """
    stages_of = tuple(tuple(sorted(stages)) for stages in placement)
    rank_of = _rank_of(stages_of)
    if num_micro_batches < 1:
        raise ValueError(f"{num_micro_batches} micro-batches are nothing to schedule")
    kinds = "forward", "backward_input", "backward_weight"
    times = [_fractions(name, getattr(costs, name), len(rank_of)) for name in kinds]
    if min(times[0]) == 0:
        raise ValueError("a forward takes time; schedules of forwards that take none are not looked for")
    (latency,) = _fractions("latency", [costs.latency], 1)
    rows = (*times, [latency])
    ticks_per_unit = lcm(*(time.denominator for row in rows for time in row))
    forward, backward_input, backward_weight = (tuple(int(time * ticks_per_unit) for time in part) for part in times)
    return Workload(
        placement=stages_of,
        rank_of=rank_of,
        num_micro_batches=num_micro_batches,
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        latency=int(latency * ticks_per_unit),
        limits=_limits(stages_of, num_micro_batches, memory_limit),
        ticks_per_unit=ticks_per_unit,
    )


def in_index_order(programs: Programs) -> Programs:
    """The same order of work on each rank, whole backwards as I and W, with micro-batches numbered as they come.

    No rank holds more than before, or finishes later.
    """
    renamed = []
    for program in programs:
        done: dict[tuple[OpKind, int], int] = {}
        ops = []
        for op in program:
            for kind in (_I, _W) if op.kind is _B else (op.kind,):
                index = done[kind, op.stage] = done.get((kind, op.stage), -1) + 1
                ops.append(Op(kind, op.stage, index))
        renamed.append(tuple(ops))
    return tuple(renamed)


def most_held(programs: Programs) -> list[int]:
    """The most activations that each rank holds from F to the end of W, for any times of operations."""
    changes = (((op.kind is _F) - (op.kind in (_B, _W)) for op in program) for program in programs)
    return [max(accumulate(of_rank, initial=0)) for of_rank in changes]


def fits(schedule: Schedule, work: Workload) -> bool:
    """Return True if no rank of the schedule holds more than its limit."""
    return all(peak <= limit for peak, limit in zip(most_held(schedule.programs), work.limits, strict=True))


def _rank_of(placement: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    rank_of: dict[int, int] = {}
    for rank, stages in enumerate(placement):
        if not stages:
            raise ValueError(f"rank {rank} has no stage")
        for stage in stages:
            if stage in rank_of:
                raise UnfitSizesError(
                    f"stage {stage} is on rank {rank_of[stage]} and on rank {rank}, and this schedule has no copies",
                    help="place each stage once, or use dualpipe or chimera",
                    key=("schedule", "placement"),
                )
            rank_of[stage] = rank
    if sorted(rank_of) != list(range(len(rank_of))):
        missing = next(stage for stage in range(len(rank_of)) if stage not in rank_of)
        raise ValueError(f"stage {missing} is on no rank")
    return tuple(rank_of[stage] for stage in range(len(rank_of)))


def _fractions(name: str, times: Sequence[Time], count: int) -> list[Fraction]:
    if len(times) != count:
        raise ValueError(f"{name} has {len(times)} times for {count} stages")
    exact = [Fraction(time) for time in times]
    if min(exact) < 0:
        raise ValueError(f"{name} is {min(exact)} somewhere: times are not negative")
    return exact


def _limits(
    placement: tuple[tuple[int, ...], ...], num_micro_batches: int, memory_limit: int | Sequence[int] | None
) -> tuple[int, ...]:
    """The limit of each rank, at most all that it could ever hold."""
    everything = [num_micro_batches * len(stages) for stages in placement]
    if memory_limit is None:
        return tuple(everything)
    limits = [memory_limit] * len(placement) if isinstance(memory_limit, int) else list(memory_limit)
    if len(limits) != len(placement):
        raise ValueError(f"{len(limits)} memory limits for {len(placement)} ranks")
    for rank, (stages, limit) in enumerate(zip(placement, limits, strict=True)):
        if limit < len(stages):
            raise UnfitSizesError(
                f"rank {rank} has {len(stages)} stages and may hold {limit} chunk activations, but the forwards of a "
                "micro-batch go through all its stages before the first backward gives anything back",
                help=f"allow {max(map(len, placement))} or more",
                key=("schedule", "memory_limit"),
            )
    return tuple(map(min, limits, everything))
