"""Numbers of blocks of stages with nearly equal work, by dynamic programming over the blocks' boundaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any


@dataclass(frozen=True, order=True, slots=True)
class Balance:
    """Sizes of stages, the better the smaller: first by the work of the largest stage.

    Then come the number of stages without blocks, the sum of the squares of the stages' work, and the number of blocks
    in stages that also have work around the blocks. ``negated`` are the sizes times -1: earlier stages are larger.
    """

    largest: int
    num_empty: int
    squares: int
    at_edges: int
    negated: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of blocks of each stage."""
        return tuple(-size for size in self.negated)


def balanced(work: Sequence[int], num_stages: int) -> Balance:
    """The best numbers of blocks of at most as many stages as blocks.

    ``work`` is that before the blocks, which the first stage has, that of each block, and that after them, which the
    last stage has. A stage has no blocks only where the largest stage has less work so.
    """
    before, *blocks, after = work
    sums, last = [*accumulate(blocks, initial=0)], num_stages - 1

    def load(stage: int, begin: int, end: int) -> int:
        return sums[end] - sums[begin] + before * (stage == 0) + after * (stage == last)

    def larger(stage: int, begin: int, end: int, rest: int) -> int:
        return max(load(stage, begin, end), rest)

    def within(stage: int, begin: int, end: int, rest: tuple[Any, ...]) -> tuple[Any, ...] | None:
        own, size = load(stage, begin, end), end - begin
        if own > limit:
            return None
        has_edge = (stage == 0 and before > 0) or (stage == last and after > 0)
        num_empty, squares, at_edges, negated = rest
        return num_empty + (not size), squares + own * own, at_edges + size * has_edge, (-size, *negated)

    limits = [_least(len(blocks), num_stages, fewest, larger, 0) for fewest in (1, 0)]
    fewest, limit = (0, limits[1]) if limits[1] < limits[0] else (1, limits[0])
    return Balance(limit, *_least(len(blocks), num_stages, fewest, within, (0, 0, 0, ())))


def _least(num_blocks: int, num_stages: int, fewest: int, value: Callable[..., Any], of_none: Any) -> Any:
    """The least value of all cuts into stages of ``fewest`` blocks at least.

    ``value`` is that of a stage's blocks ``begin`` to ``end - 1`` with the value of all stages after it; None if the
    stage may not have them.
    """
    rest = {num_blocks: of_none}
    for stage in reversed(range(num_stages)):
        found = {}
        for begin in range(num_blocks + 1) if stage else [0]:
            values = [value(stage, begin, end, rest[end]) for end in rest if end - begin >= fewest]
            values = [each for each in values if each is not None]
            if values:
                found[begin] = min(values)
        rest = found
    return rest[0]
