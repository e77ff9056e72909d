"""The rows whose scales make a token count wrongly: those without which its weight would be right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import combinations

from pipeproof.schedule.op_table import NONE
from pipeproof.verify.gradients.coefficient import ONE, Coefficient
from pipeproof.verify.gradients.expected_gradients import Model
from pipeproof.verify.gradients.explain_sum import HeldGradient
from pipeproof.verify.gradients.parameter_view import Move, MoveKind

ScaledRow = tuple[int, Coefficient]
"""A row and what it multiplies a token's gradient by."""

_MOST_TRIED = 10
"""Scaled rows of which all subsets are tried."""


def scales_of_sum(model: Model, held: HeldGradient, rank: int, sources: Collection[int], place: int) -> list[ScaledRow]:
    """The scaled rows that a micro-batch's gradient meets, from the ranks that add it to the rank that reads it."""
    result = dict[int, Coefficient]()
    for source in sources:
        result |= dict(_scales_of_rank(model, held, source, place, whole=source == rank))
    if rank not in sources:
        view = held.views[rank]
        first = next(iter(view.where(MoveKind.REDUCE)), len(view.moves))
        result |= {int(view.ops[i][0]): _factor(model, view.moves[i]) for i in range(first, len(view.moves))}
    return [(row, factor) for row, factor in result.items() if factor != ONE]


def _scales_of_rank(
    model: Model, held: HeldGradient, source: int, place: int, *, whole: bool
) -> Iterator[tuple[int, Coefficient]]:
    """(row, factor) of the addition of a micro-batch and of what follows it; up to the first sum, if not ``whole``."""
    view = held.views[source]
    is_added = False
    for move, ops in zip(view.moves, view.ops, strict=True):
        if move.kind in (MoveKind.ADD, MoveKind.OVERWRITE):
            if view.counts[move.addend][place]:
                is_added = True
                yield int(ops[0]), move.factor
        elif is_added:
            if move.kind is MoveKind.REDUCE and not whole:
                return
            yield int(ops[0]), _factor(model, move)


def _factor(model: Model, move: Move) -> Coefficient:
    if not move.average:
        return move.factor
    whole = move.group == NONE
    size = model.grid.size(move.axis or "") if whole else Coefficient.of(model.graph.groups[move.group].size)
    return move.factor * size.inverse


def rows_to_blame(
    scaled: Sequence[ScaledRow], error: Coefficient | None, seen: Callable[[Coefficient], Coefficient] = lambda c: c
) -> tuple[int, ...]:
    """The fewest rows whose scales multiply to the error of a weight; all, if no few of them do.

    ``seen`` is a factor as the token has it.
    """
    if error is not None:
        tried = [(row, seen(factor)) for row, factor in scaled[:_MOST_TRIED]]
        for number in range(1, len(tried) + 1):
            for some in combinations(tried, number):
                total = ONE
                for _, factor in some:
                    total *= factor
                if total == error:
                    return tuple(row for row, _ in some)
    return tuple(row for row, _ in scaled)


def rows_to_blame_for_both(
    found: Coefficient, scaled: Sequence[ScaledRow], like: Coefficient, like_scaled: Sequence[ScaledRow]
) -> tuple[int, ...]:
    """The rows of two unlike weights, of which neither is declared, that make them differ."""
    if any(len(factor.terms) != 1 for factor in (like, *(factor for _, factor in like_scaled))):  # zero, or a sum
        return rows_to_blame([*scaled, *like_scaled], None)
    own = [one for one in scaled if one not in like_scaled]
    others = [(row, factor.inverse) for row, factor in like_scaled if (row, factor) not in scaled]
    return rows_to_blame([*own, *others], found * like.inverse)
