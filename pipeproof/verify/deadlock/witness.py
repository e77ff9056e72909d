"""A cycle of waits as people see it: in a sentence, and on the programs of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from pipeproof.specs.finding import CycleWitness, ProgramExcerpt
from pipeproof.verify.subject import Subject

_NAMED = 6
"""Operations, or ranks, up to which a sentence names all."""

_LEFT_OUT = ".."

_NEIGHBOURS = 1
"""Operations shown on either side of one of the cycle."""

_SMALL_GAP = 2
"""Operations between two that are shown, up to which they are shown, too."""


def cycle_witness(subject: Subject, ops: Sequence[int]) -> CycleWitness:
    """A cycle with the stretches of its ranks' programs."""
    graph = subject.graph
    by_rank: dict[int, list[int]] = {}
    for op_id in ops:
        by_rank.setdefault(int(graph.rank[op_id]), []).append(op_id)
    number = {op_id: place for place, op_id in enumerate(ops, start=1)}
    return CycleWitness(
        tuple(subject.witness_op(op_id) for op_id in ops),
        tuple(_excerpt(subject, rank, mine, number) for rank, mine in sorted(by_rank.items())),
    )


def _excerpt(subject: Subject, rank: int, mine: Sequence[int], number: dict[int, int]) -> ProgramExcerpt:
    graph = subject.graph
    program = graph.rank_ops(rank)
    shown = {near for op_id in mine for near in range(op_id - _NEIGHBOURS, op_id + _NEIGHBOURS + 1) if near in program}
    for first, second in pairwise(sorted(shown)):
        if second - first - 1 <= _SMALL_GAP:
            shown.update(range(first, second))
    ops: list[tuple[str, int]] = []
    last = program.start - 1
    for op_id in sorted(shown):
        if op_id > last + 1:
            ops.append((_LEFT_OUT, 0))
        ops.append((str(graph.ops[op_id]), number.get(op_id, 0)))
        last = op_id
    if last + 1 < program.stop:
        ops.append((_LEFT_OUT, 0))
    return ProgramExcerpt(graph.global_rank[rank], tuple(text for text, _ in ops), tuple(mark for _, mark in ops))


def chain_text(subject: Subject, ops: Sequence[int]) -> str:
    """``A (rank 0) waits for B (rank 1) waits for A (rank 0)``, with the middle of a long cycle left out."""
    graph = subject.graph
    names = [f"{graph.ops[i]} (rank {graph.global_rank[int(graph.rank[i])]})" for i in ops]
    if len(names) > _NAMED:
        names = [*names[: _NAMED // 2], f"... {len(names) - _NAMED + 1} more ...", *names[1 - _NAMED // 2 :]]
    return " waits for ".join([*names, names[0]])


def ranks_text(subject: Subject, ops: Sequence[int]) -> str:
    """``ranks 0, 1``, or how many they are."""
    graph = subject.graph
    ranks = sorted({graph.global_rank[int(graph.rank[i])] for i in ops})
    if len(ranks) > _NAMED:
        return f"{len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
