"""Per-rank programs: what one pipeline rank computes in one step, in order.

Generators make them. Lowering adds what they need: transfers with their
waits, collectives, gradient reductions and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.ops import Op

Program = tuple[Op, ...]
Programs = tuple[Program, ...]
"""One program per pipeline rank."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Result of a generator: the computations of each pipeline rank, and the pairs that run concurrently.

    ``pairs`` has for each rank the places in its program at which an
    overlapped pair begins: first the forward, then the backward. Empty where
    nothing overlaps. A stage on two ranks has two copies, which share the
    micro-batches.
    """

    programs: Programs
    pairs: tuple[frozenset[int], ...] = ()

    def pairs_of(self, rank: int) -> frozenset[int]:
        """The places of ``rank`` at which an overlapped pair begins."""
        return self.pairs[rank] if self.pairs else frozenset()

    def rows(self, rank: int) -> list[Row]:
        """The computations of ``rank`` as rows; the two of an overlapped pair share a batch."""
        begins, batch = self.pairs_of(rank), NONE
        rows = []
        for place, op in enumerate(self.programs[rank]):
            if place - 1 not in begins:
                batch = place if place in begins else NONE
            rows.append(Row(op, batch=batch))
        return rows


class UnfitSizesError(ValueError):
    """A schedule does not exist for these sizes.

    ``key`` is the key of the plan to change, ``help`` names the nearest values that fit.
    """

    def __init__(self, message: str, *, help: str, key: tuple[str, ...] = ("schedule", "num_micro_batches")) -> None:
        super().__init__(message)
        self.help = help
        self.key = key


def steady_pairs(num_forwards: int, num_warmup: Iterable[int]) -> tuple[frozenset[int], ...]:
    """By rank the places of the forwards behind its warm-up, each of which has a backward behind it."""
    return tuple(frozenset(range(warmup, 2 * num_forwards - warmup, 2)) for warmup in num_warmup)


def stages_of(programs: Programs) -> tuple[tuple[int, ...], ...]:
    """The stages that each program computes, in order of their numbers."""
    return tuple(tuple(sorted({op.stage for op in program})) for program in programs)
