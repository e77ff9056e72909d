"""Segments of an overlapped pair: the computation before each overlap point, and the position of weight gradients.

An *overlap point* is a collective at which a computation gives the rank to the other one of its pair. A *segment* is
the part of a half up to its next overlap point, or to its end. The two halves alternate in a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from pipeproof.specs.schedule import Half

_Row = TypeVar("_Row")


class Segment(NamedTuple):
    """One segment of a half, and its number among the half's segments."""

    half: Half
    number: int


def segments_of_pair(
    num_forward_overlap_points: int, num_backward_overlap_points: int, order: Sequence[Half], *, defers: bool
) -> tuple[Segment, ...]:
    """The segments of a pair in the cycle ``order``, F and B each with one segment more than it has overlap points.

    With ``defers`` the backward leaves its weight gradients to segments W; each has the gradients of the segments of B
    since the last W. A half that has ended is skipped, and so is W if nothing is deferred. The remaining weight
    gradients come last.
    """
    num_segments: dict[Half, int] = {"F": num_forward_overlap_points + 1, "B": num_backward_overlap_points + 1}
    done: dict[Half, int] = {"F": 0, "B": 0, "W": 0}
    segments: list[Segment] = []
    deferred = False

    def take(half: Half) -> None:
        segments.append(Segment(half, done[half]))
        done[half] += 1

    while done["F"] < num_segments["F"] or done["B"] < num_segments["B"]:
        for half in order:
            if half == "W":
                if deferred:
                    take(half)
                    deferred = False
            elif done[half] < num_segments[half]:
                take(half)
                deferred = deferred or (defers and half == "B")
    if deferred:
        take("W")
    return tuple(segments)


class Cut(NamedTuple, Generic[_Row]):
    """One exchange of a computation: its collectives, whether it is an overlap point, and how late."""

    rows: Sequence[_Row]
    is_overlap_point: bool
    is_late: bool


@dataclass(frozen=True, slots=True)
class SegmentRows(Generic[_Row]):
    """Rows that one segment of a half issues, and its overlap point if that is late: issued in the next segment."""

    rows: list[_Row] = field(default_factory=list)
    late: list[_Row] = field(default_factory=list)


def segments_of_half(parts: Sequence[_Row], cuts: Sequence[Cut[_Row]]) -> list[SegmentRows[_Row]]:
    """The segments of a computation, from its parts and the exchange behind each part but the last."""
    segments: list[SegmentRows[_Row]] = [SegmentRows()]
    for part, cut in zip(parts[:-1], cuts, strict=True):
        segments[-1].rows.append(part)
        (segments[-1].late if cut.is_late else segments[-1].rows).extend(cut.rows)
        if cut.is_overlap_point:
            segments.append(SegmentRows())
    segments[-1].rows.append(parts[-1])
    return segments


def alternating_rows(
    forward: Sequence[SegmentRows[_Row]],
    backward: Sequence[SegmentRows[_Row]],
    order: Sequence[Half],
    weights: Callable[[int], _Row] | None,
    is_exchange: Callable[[_Row], bool],
) -> Iterator[_Row]:
    """Rows of a pair in the order in which it issues them.

    ``weights`` makes the row of each segment W by its number; None if the backward defers nothing. ``is_exchange`` is
    true for a collective that runs while the rank computes. A late overlap point is issued in the other half's next
    segment: behind the parts, and before the first such collective.
    """
    late: list[_Row] = []
    before: Half | None = None
    for segment in segments_of_pair(len(forward) - 1, len(backward) - 1, order, defers=weights is not None):
        if segment.half == "W":
            assert weights is not None, "only what defers has segments W"
            of_segment = SegmentRows([weights(segment.number)])
        else:
            of_segment = (forward if segment.half == "F" else backward)[segment.number]
        for row in of_segment.rows:
            if segment.half == before or is_exchange(row):
                yield from late
                late = []
            yield row
        yield from late
        late, before = of_segment.late, segment.half
