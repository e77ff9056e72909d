"""A wait-for cycle drawn on the programs of its ranks."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.specs.finding import CycleWitness, ProgramExcerpt, Witness

_MOST_RANKS = 6
"""Ranks whose programs are drawn; a longer cycle is alike all the way."""


def cycle_drawing(witness: Witness) -> Iterator[str]:
    """Lines of text: each rank's program with the cycle's operations numbered below; none for other witnesses.

    ``^1`` waits for ``^2``, and the last for ``^1``.
    """
    if not isinstance(witness, CycleWitness) or not witness.programs:
        return
    drawn = witness.programs[:_MOST_RANKS]
    width = max(len(_label(program)) for program in drawn)
    for program in drawn:
        yield from _lines(program, width)
    if len(witness.programs) > len(drawn):
        yield f"and {len(witness.programs) - len(drawn)} more ranks"


def _label(program: ProgramExcerpt) -> str:
    return f"rank {program.rank}:"


def _lines(program: ProgramExcerpt, width: int) -> tuple[str, str]:
    """The program, and below it the numbers of what is on the cycle."""
    above, below = _label(program).ljust(width), " " * width
    for op, number in zip(program.ops, program.numbers, strict=True):
        mark = f"^{number}" if number else ""
        column = max(len(op), len(mark))
        above += f" {op.ljust(column)}"
        below += f" {mark.ljust(column)}"
    return above.rstrip(), below.rstrip()
