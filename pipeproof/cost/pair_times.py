"""Time of an overlapped pair that takes turns, from its parts and its exchanges.

The rows of a pair, in the order that lowering gives them, run on two queues: collectives over ``ep`` on their own, and
parts, weight gradients and other collectives on the compute queue. Each queue runs its rows in order, and a part or a
collective begins after the one before it of its computation. While a collective over ``ep`` is under way, a part takes
longer by ``cost.collective_slowdown``.

A pair begins when both its inputs are there, and hands both outputs on at its end, because receives are before its
rows, and sends behind them. So one time for each two stages is all that the order of work needs of a pair. It is that
of the simulation, where no links are shared and all groups of an axis take the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from fractions import Fraction
from typing import NamedTuple

from pipeproof.cost.analytic_links import OP_KIND, groups_of
from pipeproof.cost.part_shares import PartShares
from pipeproof.cost.plan_times import link_times, with_times
from pipeproof.cost.transfer_times import LinkTimes
from pipeproof.schedule.turns import Cut, SideTurn, rows_in_turns, turns_of_side
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.exact_times import GRID_US, rounded_up
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.schedule import Side
from pipeproof.stages.describe.layer import Collective
from pipeproof.stages.describe.op_work import Phase

_ZERO = Fraction(0)


class _Sort(Enum):
    PART = auto()
    WEIGHTS = auto()
    CALL = auto()
    """A collective on the compute queue."""
    EXCHANGE = auto()
    """A collective on the queue ``ep``."""


class _Row(NamedTuple):
    side: Side
    sort: _Sort
    us: Fraction = _ZERO


class _Side(NamedTuple):
    """One computation: its turns, and the end of its weight gradients by part."""

    turns: list[SideTurn[_Row]]
    weight_ends: list[Fraction]


@dataclass(frozen=True)
class PairTimes:
    """Times of the pairs of a plan. ``plan`` has given times, ``shares`` and ``links`` are of the plan before that."""

    plan: PlanSpec
    shares: PartShares
    links: LinkTimes | None
    _sides: list[_Side] = field(default_factory=list, repr=False, compare=False)
    """Those that differ; most stages of a plan are alike."""
    _places: dict[tuple[Side, int], int] = field(default_factory=dict, repr=False, compare=False)
    _known: dict[tuple[int, int], Fraction] = field(default_factory=dict, repr=False, compare=False)
    _calls: dict[Collective, Fraction] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_plan(cls, plan: PlanSpec) -> PairTimes:
        """The times of a plan with ``schedule.overlap``."""
        return cls(with_times(plan), PartShares(plan), link_times(plan))

    def pair_us(self, forward: int, backward: int) -> Fraction:
        """Microseconds of a forward of one stage next to a whole backward of one."""
        pair = self._place("F", forward), self._place("B", backward)
        if pair not in self._known:
            self._known[pair] = self._length(*(self._sides[place] for place in pair))
        return self._known[pair]

    def _length(self, forward: _Side, backward: _Side) -> Fraction:
        order = self.plan.schedule.turns
        assert order is not None, "computations take turns"
        rows = rows_in_turns(
            forward.turns,
            backward.turns,
            order,
            lambda _: _Row("W", _Sort.WEIGHTS),
            lambda row: row.sort is _Sort.EXCHANGE,
        )
        slowdown = self.plan.cost.collective_slowdown or _ZERO
        return _length(list(_with_weights(rows, backward.weight_ends)), 1 + slowdown)

    def _place(self, side: Side, stage: int) -> int:
        if (side, stage) not in self._places:
            described = self._described(side, stage)
            if described not in self._sides:
                self._sides.append(described)
            self._places[side, stage] = self._sides.index(described)
        return self._places[side, stage]

    def _described(self, side: Side, stage: int) -> _Side:
        cost, parts = self.plan.cost, self.shares.stages[stage]
        described = parts[Phase.FORWARD if side == "F" else Phase.INPUT]
        cuts = [
            Cut([self._call(side, call) for call in calls], exchange.is_overlap_point, exchange.is_late)
            for exchange, calls in described.exchanges
        ]
        whole = cost.forward_of(stage) if side == "F" else cost.backward_of(stage)
        own_us = max(_ZERO, whole - sum(row.us for cut in cuts for row in cut.rows))
        weights_us = _ZERO if side == "F" else min(own_us, cost.backward_weight_of(stage))
        ends = described.ends(own_us - weights_us, GRID_US)
        parts_us = (end - begin for begin, end in zip((_ZERO, *ends[:-1]), ends, strict=True))
        rows = [_Row(side, _Sort.PART, us) for us in parts_us]
        return _Side(turns_of_side(rows, cuts), parts[Phase.WEIGHT].ends(weights_us, GRID_US))

    def _call(self, side: Side, call: Collective) -> _Row:
        if call not in self._calls:
            self._calls[call] = self._call_us(call)
        return _Row(side, _Sort.EXCHANGE if call.axis == "ep" else _Sort.CALL, self._calls[call])

    def _call_us(self, call: Collective) -> Fraction:
        if self.links is None:
            return _ZERO
        num_bytes = call.numel * call.item_bytes(dtype_bytes(self.links.dtype))
        groups = groups_of(self.plan.topology, call.axis)
        return rounded_up(self.links.collective_us(OP_KIND[call.kind], groups, num_bytes))


def _with_weights(rows: Iterable[_Row], ends: list[Fraction]) -> Iterable[_Row]:
    """Rows with the times of weight gradients: of the parts of B since the last ones."""
    num_parts, done = 0, _ZERO
    for row in rows:
        num_parts += row.side == "B" and row.sort is _Sort.PART
        if row.sort is _Sort.WEIGHTS:
            end = ends[min(num_parts, len(ends)) - 1] if num_parts else _ZERO
            row, done = row._replace(us=end - done), end
        yield row


def _length(rows: list[_Row], slowed: Fraction) -> Fraction:
    """Microseconds from the begin to the end of all rows; a part next to a collective takes ``slowed`` of its time."""
    before: list[int | None] = []
    last: dict[Side, int] = {}
    queues: tuple[list[int], list[int]] = [], []
    for number, row in enumerate(rows):
        queues[row.sort is _Sort.EXCHANGE].append(number)
        before.append(last.get(row.side))
        if row.sort is not _Sort.WEIGHTS:
            last[row.side] = number
    waiting = [iter(places) for places in queues]
    heads: list[int | None] = [next(places, None) for places in waiting]
    left, now = [row.us for row in rows], _ZERO
    done: set[int | None] = {None}
    while any(head is not None for head in heads):
        running = [None if head is None or before[head] not in done else head for head in heads]
        computing, call = running
        paces = [Fraction(1), Fraction(1)]
        if computing is not None and call is not None and rows[computing].sort is not _Sort.CALL:
            paces[0] = slowed
        step = min(left[place] * pace for place, pace in zip(running, paces, strict=True) if place is not None)
        now += step
        for queue, (place, pace) in enumerate(zip(running, paces, strict=True)):
            if place is not None:
                left[place] -= step / pace
                if not left[place]:
                    done.add(place)
                    heads[queue] = next(waiting[queue], None)
    return now
