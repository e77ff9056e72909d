"""One schedule of a workload: every rank always begins the operation that a rule prefers among the possible ones.

The engines of ``sim`` cannot be called: they time a given order of operations,
and here times decide the order.

The rule is asked whenever a rank is free and something may have changed. Time goes forward from event to event, so the
cost is linear in operations (times the stages of a rank). No choice is ever undone, and the run always reaches the end:

*Why memory never locks.* A forward takes a place in its rank's memory, which only the W of the same stage and
micro-batch gives back. On each stage, micro-batches come in index order. Let K be the oldest micro-batch of the whole
pipeline with a forward that has not begun. All older ones have no forwards left; their I and W need no memory and wait
for nothing but each other, so they finish. If K still needs n of a rank's v stages, K holds v - n places there. The
micro-batches behind K hold at most ``limit - v`` there, because a forward of a micro-batch *behind* the oldest that
still needs its rank begins only within that bound, and as long as K needs the rank no older one counts as behind. So n
places are free for K, and its next forward begins. The bound is the banker's algorithm for this case (the needs of K
are part of any later micro-batch's needs). It refuses no safe forward either, except for the ``reserve`` of a rule.

*Why waiting never locks.* A rank that waits (``patience``) waits for an
arrival whose time is known, since its sender has begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from math import inf

from pipeproof.schedule.generators.workload import Workload, in_index_order
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule

_F, _I, _W = OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT
Choice = tuple[OpKind, int]
"""Kind and stage; the micro-batch is the next one."""


class Priority(Enum):
    """Priority between a forward and an I that a rank could both run."""

    ALTERNATE = auto()
    """The kind that did not run last."""
    FORWARD = auto()
    BACKWARD = auto()


class Weights(Enum):
    """When a W goes before a forward or an I."""

    WHEN_IDLE = auto()
    """Never: it runs only if nothing else can run."""
    WHEN_FULL = auto()
    """When memory delays an available forward."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Preferences of a rank.

    Of several stages, the oldest micro-batch goes first or, without ``oldest_first``, the stage nearest to the loss. A
    rank delays a W if something else arrives within ``patience`` halves of that W's time. Micro-batches behind the
    oldest do not get ``reserve`` eighths of the memory that they could take.
    """

    priority: Priority
    weights: Weights
    oldest_first: bool
    patience: int
    reserve: int


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """The choices of each rank in order, and the end of the last one, in ticks."""

    choices: tuple[tuple[Choice, ...], ...]
    makespan: int

    def schedule(self) -> Schedule:
        """The programs."""
        return Schedule(in_index_order(tuple(tuple(Op(*choice) for choice in choices) for choices in self.choices)))


def list_schedule(work: Workload, rule: Rule) -> ListSchedule:
    """Run a step by ``rule``."""
    run = Run(work, rule)
    run.to_the_end()
    return ListSchedule(tuple(map(tuple, run.choices)), run.makespan)


class Run:
    """One run of a step, from its first event to its last."""

    def __init__(self, work: Workload, rule: Rule) -> None:
        self._work, self._rule = work, rule
        self._num_batches = work.num_micro_batches
        self._rank_of, self._stages = work.rank_of, work.placement
        num_stages = work.num_stages
        self._edges = work.edges()
        self._forwards = [0] * num_stages
        self._inputs = [0] * num_stages
        self._weights = [0] * num_stages
        """Number of begun computations of each kind, by stage."""
        self._forward_arrivals: list[list[int]] = [[] for _ in range(num_stages)]
        self._input_arrivals: list[list[int]] = [[] for _ in range(num_stages)]
        """Arrival of the input of the k-th computation of each kind, as far as known."""
        self._forward_arrivals[0] = [0] * self._num_batches
        num_ranks = len(work.placement)
        self._free_at = [0] * num_ranks
        self._held = [0] * num_ranks
        self._forward_was_last = [False] * num_ranks
        self._room_behind = [
            (limit - len(stages)) * (8 - rule.reserve) // 8
            for limit, stages in zip(work.limits, work.placement, strict=True)
        ]
        """Memory that micro-batches behind the oldest may take."""
        self._events = [(0, work.rank_of[0])]
        self.choices: list[list[Choice]] = [[] for _ in range(num_ranks)]
        self.makespan = 0

    def to_the_end(self) -> None:
        """Run the step."""
        while self._events:
            now, rank = heappop(self._events)
            if self._free_at[rank] <= now:
                choice = self.choose(rank, now)
                if choice is not None:
                    self.begin(rank, now, choice)
        assert sum(map(len, self.choices)) == self._work.num_operations, "memory has locked"

    def choose(self, rank: int, now: int) -> Choice | None:
        """The computation that a free rank begins; None if it waits."""
        forward, is_blocked, soon = self._forward(rank, now)
        backward, soon = self._input(rank, now, soon)
        weight = self._weight(rank)
        if weight is not None and is_blocked and self._rule.weights is Weights.WHEN_FULL:
            return _W, weight
        if forward is not None and backward is not None:
            priority = self._rule.priority
            if priority is Priority.ALTERNATE:
                priority = Priority.BACKWARD if self._forward_was_last[rank] else Priority.FORWARD
            return (_F, forward) if priority is Priority.FORWARD else (_I, backward)
        if forward is not None:
            return _F, forward
        if backward is not None:
            return _I, backward
        if weight is None or 2 * (soon - now) < self._rule.patience * self._work.backward_weight[weight]:
            return None
        return _W, weight

    def _forward(self, rank: int, now: int) -> tuple[int | None, bool, float]:
        """The stage whose forward may begin; whether memory delays a forward; the arrival of the next one."""
        chosen, oldest, is_blocked, soon = None, inf, False, inf
        for stage in reversed(self._stages[rank]):
            index, arrivals = self._forwards[stage], self._forward_arrivals[stage]
            if index >= len(arrivals):
                continue
            arrival = arrivals[index]
            if not self._has_room(rank, index):
                is_blocked = is_blocked or arrival <= now
            elif arrival > now:
                soon = min(soon, arrival)
            elif chosen is None or (self._rule.oldest_first and index <= oldest):
                chosen, oldest = stage, index
        return chosen, is_blocked, soon

    def _has_room(self, rank: int, index: int) -> bool:
        if self._held[rank] >= self._work.limits[rank]:
            return False
        stages = self._stages[rank]
        oldest = self._forwards[stages[-1]]
        if index <= oldest:
            return True
        behind = sum(max(0, self._forwards[stage] - oldest - 1) for stage in stages[:-1])
        return behind < self._room_behind[rank]

    def _input(self, rank: int, now: int, soon: float) -> tuple[int | None, float]:
        """The stage whose I may begin, and the arrival of the next forward or I."""
        chosen = None
        for stage in self._stages[rank] if self._rule.oldest_first else reversed(self._stages[rank]):
            index, arrivals = self._inputs[stage], self._input_arrivals[stage]
            if index >= len(arrivals):
                continue
            if arrivals[index] > now:
                soon = min(soon, arrivals[index])
            elif chosen is None:
                chosen = stage
        return chosen, soon

    def _weight(self, rank: int) -> int | None:
        begun = self._weights
        ready = [stage for stage in self._stages[rank] if begun[stage] < self._inputs[stage]]
        return min(ready, key=begun.__getitem__) if ready else None

    def begin(self, rank: int, now: int, choice: Choice) -> None:
        """Begin a computation."""
        kind, stage = choice
        self.choices[rank].append(choice)
        if kind is _F:
            end = now + self._work.forward[stage]
            self._forwards[stage] += 1
            self._held[rank] += 1
            self._forward_was_last[rank] = True
            if stage + 1 < len(self._rank_of):
                self._arrive(self._forward_arrivals, stage + 1, end + self._edges[stage])
            else:
                self._input_arrivals[stage].append(end)
        elif kind is _I:
            end = now + self._work.backward_input[stage]
            self._inputs[stage] += 1
            self._forward_was_last[rank] = False
            if stage:
                self._arrive(self._input_arrivals, stage - 1, end + self._edges[stage - 1])
        else:
            end = now + self._work.backward_weight[stage]
            self._weights[stage] += 1
            self._held[rank] -= 1
        self._free_at[rank] = end
        self.makespan = max(self.makespan, end)
        heappush(self._events, (end, rank))

    def _arrive(self, arrivals: list[list[int]], stage: int, time: int) -> None:
        arrivals[stage].append(time)
        heappush(self._events, (time, self._rank_of[stage]))
