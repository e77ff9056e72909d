"""The rows of a picture, for single ranks or for all ranks of one pipeline position, and their labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, log10

from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.ops import Op
from pipeproof.sim.timeline import Timeline


@dataclass(frozen=True, slots=True)
class RankRow:
    """A row and the ranks that it represents; ``label`` names them: ``rank 3``, ``rank 0-3``, ``rank 0,4,..12``."""

    label: str
    ranks: tuple[int, ...]


def rows_of(timeline: Timeline) -> list[RankRow]:
    """One row per ``pp`` coordinate if its ranks run the same computations, else one per rank."""
    by_pp = grouped((coords["pp"], rank) for rank, coords in enumerate(timeline.ranks))
    equal = all(len({_what_runs(timeline, rank) for rank in ranks}) == 1 for ranks in by_pp.values() if len(ranks) > 1)
    if not equal:
        return [RankRow(f"rank {rank}", (rank,)) for rank in range(len(timeline.ranks))]
    return [RankRow(f"rank {_range_text(ranks)}", tuple(ranks)) for _, ranks in sorted(by_pp.items())]


def _what_runs(timeline: Timeline, rank: int) -> tuple[tuple[str, Fraction, Fraction], ...]:
    return tuple((span.op, timeline.us(span.start), timeline.us(span.end)) for span, _ in timeline.compute_spans(rank))


def _range_text(ranks: Sequence[int]) -> str:
    """``3``, ``0-3`` for consecutive ranks, ``0,4,..12`` for others."""
    if len(ranks) == 1:
        return str(ranks[0])
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) == 2:
        return f"{ranks[0]},{ranks[1]}"
    return f"{ranks[0]},{ranks[1]},..{ranks[-1]}"


def tick_interval(time: Fraction) -> Fraction:
    """The next of 1, 2, 5 times a power of ten."""
    power = Fraction(10) ** floor(log10(time))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= time)


def work_item_text(op: Op) -> str:
    """``3``, the micro-batch of a computation, or ``3.1`` with its sequence split."""
    return f"{op.micro_batch}" if op.split is None else f"{op.micro_batch}.{op.split}"
