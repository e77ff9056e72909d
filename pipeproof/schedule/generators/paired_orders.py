"""Schedules in which a forward and a whole backward of other micro-batches run side by side, in turns.

Tried are, in this order: the fixed orders with pairs (combined 1F1B, Megatron's
interleaved 1F1B, DualPipeV) where the placement is theirs; the given schedule
without pairs, and with those that delay no begin; and list schedules that know
the time of a pair (``paired_list_schedule``). Each but the second is tried a second
time with the W of its unpaired backwards late (``with_late_weights``). What
does not fit in memory is left out.

All are timed exactly, and none is proved to be the shortest: the bound
(``Workload.least_with_pairs``) is that of the busiest rank if each of its
forwards had its best pair, but for those of one micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop
from itertools import accumulate, product
from math import ceil
from operator import add

from pipeproof.schedule.generators.dualpipe_v import dualpipe_v
from pipeproof.schedule.generators.interleaved import interleaved
from pipeproof.schedule.generators.list_schedule import Choice, Priority, Rule, Run, Weights
from pipeproof.schedule.generators.one_f_one_b import in_rounds, one_f_one_b
from pipeproof.schedule.generators.workload import Workload, fits, most_held
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import (
    AsapRun,
    Key,
    Program,
    Schedule,
    Time,
    UnfitSizesError,
    asap,
    source_of,
    stage_ops,
    steady_pairs,
)

_F, _B, _I, _W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT

_MAX_OPERATIONS = 50_000
"""Operations that all list schedules together may schedule; the first two may take more."""

RULES = (
    Rule(Priority.BACKWARD, Weights.WHEN_IDLE, oldest_first=False, patience=2, reserve=0),
    Rule(Priority.ALTERNATE, Weights.WHEN_FULL, oldest_first=True, patience=1, reserve=2),
)


@dataclass(frozen=True, slots=True)
class TimedSchedule:
    """A schedule, its makespan in ticks, and the sum of its ranks' ends, on which the rest of a step depends, too."""

    makespan: Time
    ends: Time
    schedule: Schedule


def with_pairs(work: Workload, unpaired: Schedule) -> list[TimedSchedule]:
    """All that is tried and differs, the shortest first; of equal ones, that whose ranks end earlier."""
    found: dict[Schedule, TimedSchedule] = {}
    enough = work.least_with_pairs()
    for schedule in _tries(work, unpaired):
        if schedule not in found and fits(schedule, work):
            timed = asap(schedule, work.costs)
            found[schedule] = TimedSchedule(timed.makespan, sum(ends[-1] for ends in timed.ends), schedule)
            if timed.makespan <= enough:
                break
    return sorted(found.values(), key=lambda timed: (timed.makespan, timed.ends))


def _tries(work: Workload, unpaired: Schedule) -> Iterator[Schedule]:
    orders = [*orders_with_pairs(work), *(_rounds(work) if work.num_stages == len(work.placement) else ())]
    yield from orders
    yield unpaired
    yield _paired(work, unpaired)
    for order in orders:
        yield with_late_weights(work, order)
    rules = [*_pair_rules(work, unpaired)]
    for rule in rules[: max(2, _MAX_OPERATIONS // work.num_operations)]:
        schedule = paired_list_schedule(work, rule)
        yield schedule
        yield with_late_weights(work, schedule)


def orders_with_pairs(work: Workload) -> Iterator[Schedule]:
    """The orders of other kinds with pairs where the placement is theirs, whether or not they fit in memory."""
    num_ranks, num_batches, num_chunks = len(work.placement), work.num_micro_batches, len(work.placement[0])
    if work.num_stages == num_ranks:
        by_stage = one_f_one_b(num_ranks, num_batches, overlaps=True)
        order = [stage for (stage,) in work.placement]
        yield Schedule(
            tuple(by_stage.programs[stage] for stage in order), tuple(by_stage.pairs[stage] for stage in order)
        )
        return
    if work.num_stages != num_ranks * num_chunks:
        return
    with suppress(UnfitSizesError):
        if work.placement == tuple(tuple(range(rank, work.num_stages, num_ranks)) for rank in range(num_ranks)):
            yield interleaved(num_ranks, num_batches, num_chunks, "megatron", None, overlaps=True)
    with suppress(UnfitSizesError):
        if work.placement == tuple((rank, 2 * num_ranks - 1 - rank) for rank in range(num_ranks)):
            yield dualpipe_v(num_ranks, num_batches)


def _rounds(work: Workload) -> Iterator[Schedule]:
    """Warm-ups, then pairs in rounds, where each rank has one stage.

    A pair hands on both its outputs at its end, so that the way to the loss and back takes two pairs for each rank in
    between, and as many forwards more.
    """
    last, num_batches = work.num_stages - 1, work.num_micro_batches
    for more in (1, 2, 3):
        warmups: list[int] = []
        most = num_batches
        for stage, rank in enumerate(work.rank_of):
            limit = work.limits[rank]
            warmups.append(min(most, 2 * (last - stage) + more, limit if limit == num_batches else limit - 1))
            # the backward of the first pair needs a pair of the next rank, which needs a forward of the warm-up here
            most = num_batches if warmups[-1] == num_batches else warmups[-1] - 1
        if warmups[-1] < 1:
            return
        programs = [in_rounds(stage, warmups[stage], num_batches) for (stage,) in work.placement]
        yield Schedule(tuple(programs), steady_pairs(num_batches, [warmups[stage] for (stage,) in work.placement]))


def _pair_rules(work: Workload, unpaired: Schedule) -> Iterator[PairRule]:
    """Rules with forwards ahead for the time that a backward takes to come, alone or in pairs."""
    most = [limit - 1 for limit in work.limits]
    alone, in_pairs = (_forwards_until_backward(work, in_pairs=in_pairs) for in_pairs in (False, True))
    wanted = [in_pairs, alone, most, most_held(unpaired.programs), [ahead + 1 for ahead in alone]]
    aheads = dict.fromkeys(tuple(map(min, ahead, most)) for ahead in wanted)
    for ahead, rule, patient in product(aheads, RULES, (True, False)):
        yield PairRule(rule, ahead, patient)


def _forwards_until_backward(work: Workload, *, in_pairs: bool) -> list[int]:
    """By rank the forwards that begin, one for each pair, from its first forward to its first backward.

    Behind the rank, the micro-batch goes through computations alone, or through pairs, each to its end.
    """
    assert work.pairs is not None, "the work has pairs"
    stages = range(work.num_stages)
    pairs = [work.pairs[stage, stage] for stage in stages]
    there = [2 * pair for pair in pairs] if in_pairs else list(map(add, work.forward, work.backward_input))
    edges = (*work.edges(), 0)
    back = list(accumulate((there[stage] + 2 * edges[stage] for stage in reversed(stages)), initial=0))[::-1]
    forwards = []
    for mine in work.placement:
        time = back[mine[0]] - back[mine[-1]] + work.forward[mine[-1]] + back[mine[-1] + 1]
        forwards.append(ceil(Fraction(time * len(mine), sum(pairs[stage] for stage in mine) or 1)))
    return forwards


def _paired(work: Workload, unpaired: Schedule) -> Schedule:
    """The schedule with pairs of what follows each other on a rank, where the inputs of both are there at the first.

    It comes to an end, because no pair needs what begins later. Earlier W of a pair's stage go before it, so that
    weight gradients are added in index order.
    """
    timed = asap(unpaired, work.costs)
    made: dict[Key, tuple[int, Time]] = {}
    for rank, (program, ends) in enumerate(zip(timed.programs, timed.ends, strict=True)):
        for op, end in zip(program, ends, strict=True):
            if op.kind is not _W:
                made[op.kind is _F, op.stage, op.micro_batch, op.split] = rank, end

    def is_there(rank: int, op: Op, time: Time) -> bool:
        source = source_of(op, work.num_stages)
        if source is None:
            return True
        source_rank, end = made[source]
        return end + (work.latency if source_rank != rank else 0) <= time

    programs, pairs = [], []
    for rank, (program, starts) in enumerate(zip(timed.programs, timed.starts, strict=True)):
        paired: list[Op] = []
        begins: set[int] = set()
        done: set[Op] = set()
        num_weights = dict.fromkeys(work.placement[rank], 0)
        following = _next_of_no_weights(program)
        for place, op in enumerate(program):
            other = following[place]
            if op in done:
                continue
            if op.kind is not _W and other is not None and other not in done and is_there(rank, other, starts[place]):
                forward, backward = (op, other) if op.kind is _F else (other, op)
                if forward.kind is not backward.kind and work.saved(forward.stage, backward.stage) > 0:
                    assert backward.micro_batch is not None, "the orders are of micro-batches"
                    left = range(num_weights[backward.stage], backward.micro_batch)
                    paired += stage_ops(_W, backward.stage, left)
                    begins.add(len(paired))
                    paired += forward, backward._replace(kind=_B)
                    done |= {other, *stage_ops(_W, backward.stage, (*left, backward.micro_batch))}
                    num_weights[backward.stage] = backward.micro_batch + 1
                    continue
            paired.append(op)
            num_weights[op.stage] += op.kind is _W
        programs.append(tuple(paired))
        pairs.append(frozenset(begins))
    return Schedule(tuple(programs), tuple(pairs))


def _next_of_no_weights(program: Program) -> list[Op | None]:
    """By place, the next F or I behind it."""
    following: list[Op | None] = []
    after: Op | None = None
    for op in reversed(program):
        following.append(after)
        after = after if op.kind is _W else op
    return following[::-1]


def with_late_weights(work: Workload, schedule: Schedule) -> Schedule:
    """The same order of forwards, I and pairs, where each other W runs in a gap that it fits in, or at the end.

    A W also runs where memory has no place for the next forward without it, and before a later W of its stage.
    """
    return _LateWeights(work, schedule).run()


class _LateWeights(AsapRun):
    """A run of a schedule without its W, which come in between."""

    def __init__(self, work: Workload, schedule: Schedule) -> None:
        programs, pairs = zip(
            *(_without_weights(program, schedule.pairs_of(rank)) for rank, program in enumerate(schedule.programs)),
            strict=True,
        )
        super().__init__(Schedule(programs, pairs), work.costs)
        self._limits = work.limits
        self._held = [0] * len(programs)
        self._deferred: list[deque[Op]] = [deque() for _ in programs]
        self._programs: list[list[Op]] = [[] for _ in programs]
        self._pairs: list[set[int]] = [set() for _ in programs]

    def run(self) -> Schedule:
        self.timed()
        for program, deferred in zip(self._programs, self._deferred, strict=True):
            program += deferred
        return Schedule(tuple(map(tuple, self._programs)), tuple(map(frozenset, self._pairs)))

    def _start(self, rank: int, ops: Sequence[Op]) -> Time | None:
        start = super()._start(rank, ops)
        if start is None:
            return None
        program, deferred, limit = self._programs[rank], self._deferred[rank], self._limits[rank]
        while deferred:
            end = self._clock[rank] + self._costs.of(deferred[0])
            is_full = ops[0].kind is _F and self._held[rank] >= limit
            is_next = ops[-1].kind is _B and any(op.stage == ops[-1].stage for op in deferred)
            if end > start and not is_full and not is_next:
                break
            program.append(deferred.popleft())
            self._clock[rank], start = end, max(start, end)
            self._held[rank] -= 1
        if len(ops) > 1:
            self._pairs[rank].add(len(program))
        for op in ops:
            program.append(op)
            self._held[rank] += (op.kind is _F) - (op.kind is _B)
            if op.kind is _I:
                deferred.append(op._replace(kind=_W))
        return start


def _without_weights(program: Program, pairs: frozenset[int]) -> tuple[Program, frozenset[int]]:
    """The operations of a rank and its pairs without W, which backwards that have no pair leave for later."""
    ops: list[Op] = []
    begins: set[int] = set()
    for place, op in enumerate(program):
        if place in pairs:
            begins.add(len(ops))
        if place in pairs or place - 1 in pairs:
            ops.append(op)
        elif op.kind is not _W:
            ops.append(op._replace(kind=_I) if op.kind is _B else op)
    return tuple(ops), frozenset(begins)


# A way through a workload in which a forward and a backward that a rank could both begin are one overlapped pair.
#
# Where a rank could begin only one of them, it is a question of what comes:
# forwards alone go ``ahead``, up to a number of activations that the rank holds,
# and more of them wait for a backward to go with. A ``patient`` rank also lets a
# backward wait for a forward, as long as it has some left. All else goes by the
# rules of ``list_schedule``. Where all ranks wait for each other, the next
# computation goes by these rules alone, which never lock.


@dataclass(frozen=True, slots=True)
class PairRule:
    """``rule`` for what has no pair; ``ahead`` has for each rank the activations up to which forwards go alone."""

    rule: Rule
    ahead: tuple[int, ...]
    patient: bool


def paired_list_schedule(work: Workload, rule: PairRule) -> Schedule:
    """Run a step by ``rule``, with the pairs that save time."""
    run = _PairRun(work, rule)
    run.to_the_end()
    return Schedule(tuple(map(tuple, run.programs)), tuple(map(frozenset, run.pairs)))


class _PairRun(Run):
    def __init__(self, work: Workload, rule: PairRule) -> None:
        super().__init__(work, rule.rule)
        self._pair_rule, self._is_forced = rule, False
        self.programs: list[list[Op]] = [[] for _ in work.placement]
        self.pairs: list[set[int]] = [set() for _ in work.placement]
        self._deferred: list[list[int]] = [[] for _ in range(work.num_stages)]
        """Micro-batches whose W is left, by stage."""
        assert work.pairs is not None, "the work has pairs"
        self._pair_ticks = work.pairs

    def to_the_end(self) -> None:
        """Run the step."""
        now = 0
        while True:
            while self._events:
                now, rank = heappop(self._events)
                if self._free_at[rank] <= now:
                    self._go_on(rank, now)
            if min(self._weights) == self._num_batches:
                return
            self._is_forced = True  # ranks near the loss first: what they do frees memory
            has_begun = any(self._go_on(rank, now) for rank in reversed(range(len(self.programs))))
            assert has_begun, "memory has locked"
            self._is_forced = False

    def _go_on(self, rank: int, now: int) -> bool:
        """Begin something, if a rank may."""
        pair = None if self._is_forced else self._pair(rank, now)
        if pair is None:
            choice = self.choose(rank, now)
        elif self._deferred[pair[1]]:  # weight gradients of a stage are added in index order
            choice = _W, pair[1]
        else:
            self._begin_pair(rank, now, *pair)
            return True
        if choice is not None:
            self.begin(rank, now, choice)
        return choice is not None

    def _pair(self, rank: int, now: int) -> tuple[int, int] | None:
        """The stages of the pair that a rank may begin."""
        forward, _, soon = self._forward(rank, now)
        backward, _ = self._input(rank, now, soon)
        if forward is None or backward is None or self._work.saved(forward, backward) <= 0:
            return None
        return forward, backward

    def choose(self, rank: int, now: int) -> Choice | None:
        """The computation that a rank begins alone; None if it waits."""
        choice = super().choose(rank, now)
        if self._is_forced or choice is None or choice[0] is _W:
            return choice
        if choice[0] is _F:
            waits = self._held[rank] >= self._pair_rule.ahead[rank]
        else:
            left = any(self._forwards[stage] < self._num_batches for stage in self._stages[rank])
            waits = self._pair_rule.patient and left and self._held[rank] < self._work.limits[rank]
        if not waits:
            return choice
        weight = self._weight(rank)
        return None if weight is None else (_W, weight)

    def begin(self, rank: int, now: int, choice: Choice) -> None:
        """Begin one computation."""
        kind, stage = choice
        if kind is _F:
            index = self._forwards[stage]
        elif kind is _I:
            index = self._inputs[stage]
            self._deferred[stage].append(index)
        else:
            index = self._deferred[stage].pop(0)
        self.programs[rank].append(Op(kind, stage, index))
        super().begin(rank, now, choice)

    def _begin_pair(self, rank: int, now: int, forward: int, backward: int) -> None:
        program = self.programs[rank]
        self.pairs[rank].add(len(program))
        program += Op(_F, forward, self._forwards[forward]), Op(_B, backward, self._inputs[backward])
        self._forwards[forward] += 1
        self._inputs[backward] += 1
        self._weights[backward] += 1
        end = now + self._pair_ticks[forward, backward]
        self._hand_on_forward(forward, end)
        self._hand_on_input(backward, end)
        self._busy_until(rank, end)
