"""Sums that the optimizers read: the views of one parameter on all ranks, executed together.

A state is a linear combination of addends. Where one rank represents a whole
line of ranks that do the same, a sum over the line is noted on the term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.schedule.op_table import NONE
from pipeproof.verify.gradients.coefficient import ONE, Coefficient
from pipeproof.verify.gradients.parameter_view import Move, MoveKind, View

Source = tuple[int, int, frozenset[str]]
"""(rank, addend of its view, axes over whose lines it is summed); rank ``NONE`` for what is no part of the gradient."""

State = Mapping[Source, Coefficient]

UNEXPECTED: Source = (NONE, NONE, frozenset())


@dataclass(frozen=True, slots=True)
class Partners:
    """Participants of a reduction of one rank.

    ``ranks`` are those of the graph that hold a copy of the parameter;
    ``key`` is equal for all of them. ``fold`` names the axis of whose line
    each represents. ``size`` counts the members; ``unexpected`` is True if some
    hold no copy.
    """

    ranks: tuple[int, ...]
    key: tuple[object, ...]
    size: Coefficient
    fold: str | None = None
    unexpected: bool = False


@dataclass(slots=True)
class _Runner:
    """One rank on its way through its view."""

    view: View
    at: int = 0
    state: State = field(default_factory=dict)
    final: State | None = None
    calls: dict[tuple[object, ...], int] = field(default_factory=dict)


def interpret(views: Mapping[int, View], partners: Callable[[int, Move], Partners]) -> dict[int, State]:
    """The state that the optimizer of each rank reads, or the last one where there is none.

    The k-th reduction of a rank with some partners meets their k-th with it.
    Where ranks wait for each other in a circle, which other rules report, the
    first of them continues without its partners.
    """
    runners = {rank: _Runner(view) for rank, view in views.items()}
    calls_of_rank = {
        rank: [partners(rank, move) if move.kind is MoveKind.REDUCE else None for move in view.moves]
        for rank, view in views.items()
    }
    totals = {
        rank: {key: keys.count(key) for key in keys}
        for rank, found in calls_of_rank.items()
        for keys in [[one.key for one in found if one is not None]]
    }
    arrived: dict[tuple[object, ...], set[int]] = {}
    todo = list(runners)
    stuck: dict[int, None] = {}
    while todo or stuck:
        forced = not todo
        rank = todo.pop() if todo else next(iter(stuck))
        stuck.pop(rank, None)
        runner = runners[rank]
        _advance(rank, runner)
        if runner.at == len(runner.view.moves):
            continue
        partners_of_call = calls_of_rank[rank][runner.at]
        assert partners_of_call is not None
        turn = runner.calls.get(partners_of_call.key, 0)
        here = arrived.setdefault((partners_of_call.key, turn), set())
        here.add(rank)
        expected = {
            one for one in partners_of_call.ranks if totals.get(one, {}).get(partners_of_call.key, 0) > turn
        } | {rank}
        if not forced and here < expected:
            stuck[rank] = None
            continue
        met = here & expected
        here -= met
        _meet([(one, runners[one]) for one in sorted(met)], partners_of_call)
        for one in met:
            runners[one].calls[partners_of_call.key] = turn + 1
            stuck.pop(one, None)
            todo.append(one)
    return {rank: runner.state if runner.final is None else runner.final for rank, runner in runners.items()}


def _advance(rank: int, runner: _Runner) -> None:
    """Execute the moves that need no other rank."""
    moves = runner.view.moves
    while runner.at < len(moves) and moves[runner.at].kind is not MoveKind.REDUCE:
        move = moves[runner.at]
        match move.kind:
            case MoveKind.ADD:
                runner.state = {**runner.state, (rank, move.addend, frozenset()): move.factor}
            case MoveKind.OVERWRITE:
                runner.state = {(rank, move.addend, frozenset()): move.factor}
            case MoveKind.SCALE:
                runner.state = {source: factor * move.factor for source, factor in runner.state.items()}
            case MoveKind.SPOIL:
                runner.state = {**runner.state, UNEXPECTED: ONE}
            case MoveKind.STEP:
                runner.final = runner.state if runner.final is None else runner.final
            case _:
                pass
        runner.at += 1


def _meet(together: Sequence[tuple[int, _Runner]], partners_of_call: Partners) -> None:
    total: dict[Source, Coefficient] = {UNEXPECTED: ONE} if partners_of_call.unexpected else {}
    for _, runner in together:
        for (source, addend, summed), factor in runner.state.items():
            target = (source, addend, summed)
            if partners_of_call.fold is not None and source != NONE:
                if partners_of_call.fold in summed:
                    factor *= partners_of_call.size
                target = (source, addend, summed | {partners_of_call.fold})
            total[target] = total.get(target, Coefficient(())) + factor
    shared: dict[Coefficient, State] = {}
    for _, runner in together:
        move = runner.view.moves[runner.at]
        factor = move.factor * (partners_of_call.size.inverse if move.average else ONE)
        if factor not in shared:
            shared[factor] = total if factor == ONE else {source: f * factor for source, f in total.items()}
        runner.state = shared[factor]
        runner.at += 1
