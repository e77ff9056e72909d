"""Turns of an overlapped pair: the computation before each overlap point, and the position of weight gradients.

An *overlap point* is a collective at which a computation hands the rank over to the other one of its pair. A *turn* is
the part of a side up to its next overlap point, or to its end. The two sides take turns in a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from pipeproof.specs.schedule import Side

_Row = TypeVar("_Row")


class Turn(NamedTuple):
    """One turn of a side, and its number among the side's turns."""

    side: Side
    number: int


def turns_of_pair(
    num_forward_overlap_points: int, num_backward_overlap_points: int, order: Sequence[Side], *, defers: bool
) -> tuple[Turn, ...]:
    """The turns of a pair in the cycle ``order``, F and B each with one turn more than it has overlap points.

    With ``defers`` the backward leaves its weight gradients to turns W; each has the gradients from the turns of B
    since the last W. A side that has ended is skipped, and so is W if nothing is deferred. The remaining weight
    gradients come last.
    """
    num_turns: dict[Side, int] = {"F": num_forward_overlap_points + 1, "B": num_backward_overlap_points + 1}
    done: dict[Side, int] = {"F": 0, "B": 0, "W": 0}
    turns: list[Turn] = []
    deferred = False

    def take(side: Side) -> None:
        turns.append(Turn(side, done[side]))
        done[side] += 1

    while done["F"] < num_turns["F"] or done["B"] < num_turns["B"]:
        for side in order:
            if side == "W":
                if deferred:
                    take(side)
                    deferred = False
            elif done[side] < num_turns[side]:
                take(side)
                deferred = deferred or (defers and side == "B")
    if deferred:
        take("W")
    return tuple(turns)


class Cut(NamedTuple, Generic[_Row]):
    """One exchange of a computation: its collectives, whether it is an overlap point, and how late."""

    rows: Sequence[_Row]
    is_overlap_point: bool
    is_late: bool


@dataclass(frozen=True, slots=True)
class SideTurn(Generic[_Row]):
    """Rows that one turn of a side issues, and its overlap point if that is late: issued in the next turn."""

    rows: list[_Row] = field(default_factory=list)
    late: list[_Row] = field(default_factory=list)


def turns_of_side(parts: Sequence[_Row], cuts: Sequence[Cut[_Row]]) -> list[SideTurn[_Row]]:
    """The turns of a computation, from its parts and the exchange behind each part but the last."""
    turns: list[SideTurn[_Row]] = [SideTurn()]
    for part, cut in zip(parts[:-1], cuts, strict=True):
        turns[-1].rows.append(part)
        (turns[-1].late if cut.is_late else turns[-1].rows).extend(cut.rows)
        if cut.is_overlap_point:
            turns.append(SideTurn())
    turns[-1].rows.append(parts[-1])
    return turns


def rows_in_turns(
    forward: Sequence[SideTurn[_Row]],
    backward: Sequence[SideTurn[_Row]],
    order: Sequence[Side],
    weights: Callable[[int], _Row] | None,
    is_exchange: Callable[[_Row], bool],
) -> Iterator[_Row]:
    """Rows of a pair in the order in which it issues them.

    ``weights`` makes the row of the turns W by their numbers; None if the backward defers nothing. ``is_exchange`` is
    true for a collective that runs while the rank computes. A late overlap point is issued in the other side's next
    turn: behind the parts, and before the first such collective.
    """
    late: list[_Row] = []
    before: Side | None = None
    for turn in turns_of_pair(len(forward) - 1, len(backward) - 1, order, defers=weights is not None):
        if turn.side == "W":
            assert weights is not None, "only what defers has turns W"
            of_turn = SideTurn([weights(turn.number)])
        else:
            of_turn = (forward if turn.side == "F" else backward)[turn.number]
        for row in of_turn.rows:
            if turn.side == before or is_exchange(row):
                yield from late
                late = []
            yield row
        yield from late
        late, before = of_turn.late, turn.side
