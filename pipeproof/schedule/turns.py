"""Turns of an overlapped pair: which computation runs up to which of its seams, and when its weight gradients run.

A *seam* is a collective at which a computation hands the rank over to the other one of its pair. What a side does up
to its next seam, or to its end, is a *turn*. The two sides take turns in a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeproof.specs.schedule import Side


class Turn(NamedTuple):
    """One turn of a side, and its number among those of the side."""

    side: Side
    number: int


def turns_of_pair(
    num_forward_seams: int, num_backward_seams: int, order: Sequence[Side], *, defers: bool
) -> tuple[Turn, ...]:
    """The turns of a pair in the cycle ``order``, F and B each with one turn more than it has seams.

    With ``defers`` the backward leaves its weight gradients to turns W, each with those of the turns of B since the
    last one. A side that has ended is skipped, and so is W where nothing is deferred. What is still deferred when both
    have ended comes last.
    """
    num_turns: dict[Side, int] = {"F": num_forward_seams + 1, "B": num_backward_seams + 1}
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
