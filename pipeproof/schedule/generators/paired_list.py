"""A way through a workload in which a forward and a backward that a rank could both begin are one overlapped pair.

Where a rank could begin only one of them, it is a question of what comes:
forwards alone go ``ahead``, up to a number of activations that the rank holds,
and more of them wait for a backward to go with. A ``patient`` rank also lets a
backward wait for a forward, as long as it has some left. All else goes by the
rules of ``list_schedule``. Where all ranks wait for each other, the next
computation goes by these rules alone, which never lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop

from pipeproof.schedule.generators.list_schedule import Choice, Rule, Run
from pipeproof.schedule.generators.workload import Workload
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Schedule

_F, _B, _I, _W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT


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
