"""Curves that accompany a timeline: bytes or activations of a rank from each time on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

from pipeproof.schedule.programs import held_changes
from pipeproof.sim.memory_curve import MemoryCurve
from pipeproof.sim.timeline import Time, Timeline

Steps = tuple[tuple[Time, int], ...]
"""(time in ticks, value from then on), times ascending, no two equal; before the first it is 0."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity of each rank over time: its ``name`` and its ``unit``."""

    name: str
    unit: str
    ranks: tuple[Steps, ...]

    @property
    def peak(self) -> int:
        """The greatest value on any rank, 0 without any."""
        return max((value for steps in self.ranks for _, value in steps), default=0)


def activations_held(timeline: Timeline) -> Curve:
    """Chunk activations of one micro-batch, from the start of F to the end of B, or of W where the backward is split.

    A measured timeline that begins within a step also frees activations that it did not see made; it counts from 0.
    """
    ranks = tuple(tuple(_held(timeline, rank)) for rank in range(len(timeline.ranks)))
    return Curve("activations held", "activations", ranks)


def _held(timeline: Timeline, rank: int) -> Iterator[tuple[Time, int]]:
    changes = held_changes((kind, span.start, span.end) for span, kind in timeline.compute_spans(rank))
    held = before = 0
    for time, at_once in groupby(sorted(changes), key=lambda change: change[0]):
        held += sum(change for _, change in at_once)
        if max(held, 0) != before:
            before = max(held, 0)
            yield time, before


def memory_held(timeline: Timeline, memory: Sequence[MemoryCurve]) -> Curve:
    """Bytes that each rank of a simulated timeline holds; ``memory`` is from the same simulation."""
    return Curve("memory held", "bytes", tuple(tuple(_bytes(timeline, curve)) for curve in memory))


def _bytes(timeline: Timeline, curve: MemoryCurve) -> Iterator[tuple[Time, int]]:
    begin = Fraction(timeline.first_start)
    values: dict[Time, int] = {begin: sum(curve.persistent.values())}
    for ticks, held in zip(*(column.tolist() for column in curve.steps()), strict=True):
        values[max(curve.us(ticks) / timeline.tick_us, begin)] = held  # the last of several at one time counts
    before: int | None = None
    for time, held in values.items():
        if held != before:
            before = held
            yield time, held


def all_curves(timeline: Timeline, more: Sequence[Curve] = ()) -> tuple[Curve, ...]:
    """The curves of a picture: activations held, then ``more`` (such as bytes), whose times are of this timeline.

    Raises:
        ValueError: a curve has not one entry for each rank.
    """
    for curve in more:
        if len(curve.ranks) != len(timeline.ranks):
            raise ValueError(f"{curve.name}: {len(curve.ranks)} curves for {len(timeline.ranks)} ranks")
    return activations_held(timeline), *more
