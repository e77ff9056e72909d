"""The times of a schedule as an SVG picture: a row per rank, a block per computation, time to the right.

Colours are as in the terminal's timeline: one for each kind, paler for every
second stage of a rank. Letters carry the same information: colours are
not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from pipeproof.diagnostics.units import time_text
from pipeproof.schedule.ops import Op, OpKind, parse_op
from pipeproof.schedule.programs import Time, Timed, stages_of
from pipeproof.sim.timeline import Timeline
from pipeproof.views.picture_rows import tick_interval, work_item_text
from pipeproof.views.svg import IDLE, KIND_COLOURS, decimal, is_dark, label_in, px, rect, svg_page, text

_LEFT, _RIGHT = 60, 12
"""Width next to the time axis, in pixels at full size."""
_LEAST, _MOST, _SHORTEST = 888, 6000, 15
"""Length of the time axis: long enough for the shortest block to have this width, within these bounds."""
_TICK = 75
"""Least distance of two times on the axis."""
_TOP, _ROW, _BLOCK, _BELOW = 56, 36, 30, 44
"""Above the rows; from row to row; height of a block; below the rows, for the legend."""
_GAP = 1
"""Between blocks that follow each other at once."""

_KINDS = {
    OpKind.FORWARD: "forward",
    OpKind.BACKWARD: "backward",
    OpKind.BACKWARD_INPUT: "gradient of inputs",
    OpKind.BACKWARD_WEIGHT: "gradient of weights",
}

_FILLS = tuple(
    (f"{kind.value}{number}", colour) for kind, pair in KIND_COLOURS.items() for number, colour in enumerate(pair)
)
"""Classes of blocks with their colours."""
_STYLE = f"""\
.lane{{fill:{IDLE}}}.tick{{stroke:#8c959f;stroke-width:.5}}
""" + "\n".join("".join(f".{name}{{fill:{colour}}}" for name, colour in _FILLS[i : i + 4]) for i in (0, 4))
_DARK = ".lane{fill:#1c2128}"
_LIGHT_TEXT = tuple(name for name, colour in _FILLS if is_dark(colour))
"""Classes of blocks whose labels are white."""


def schedule_svg(timed: Timed, title: str, *, in_us: bool = False) -> str:
    """The picture of a schedule, with ``title`` and the makespan above it; times have no unit, or are ``in_us``."""
    height = _TOP + _ROW * len(timed.programs) + _BELOW
    makespan = f"{time_text(timed.makespan)}, axis in us" if in_us else decimal(timed.makespan)
    head = f"{title}: step time {makespan}"
    scale = _Scale(timed.makespan, _length(timed))
    marks = [text(8, 20, head, "title"), *_axis(scale, len(timed.programs))]
    for rank, stages in enumerate(stages_of(timed.programs)):
        marks += _row(timed, rank, stages, scale)
    marks += _legend(timed, height - 18)
    return svg_page((_LEFT + scale.length + _RIGHT, height), head, marks, _STYLE, _DARK)


def timed_of(timeline: Timeline) -> Timed:
    """The computations of the pipeline ranks of one replica, for a picture; times in microseconds."""
    ranks = [
        rank for rank, coords in enumerate(timeline.ranks)
        if not any(coord for axis, coord in coords.items() if axis != "pp")
    ]  # fmt: skip
    rows = [[span for span, _ in timeline.compute_spans(rank)] for rank in ranks]
    return Timed(
        tuple(tuple(parse_op(span.op) for span in row) for row in rows),
        tuple(tuple(timeline.us(span.start) for span in row) for row in rows),
        tuple(tuple(timeline.us(span.end) for span in row) for row in rows),
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    makespan: Time
    length: int

    def x(self, time: Time) -> Fraction:
        """Horizontal position of a time, in pixels."""
        return _LEFT + self.length * Fraction(time) / (Fraction(self.makespan) or 1)


def _length(timed: Timed) -> int:
    """Of the time axis, in pixels."""
    times = (zip(*both, strict=True) for both in zip(timed.starts, timed.ends, strict=True))
    shortest = min((end - start for rank in times for start, end in rank if start < end), default=0)
    wanted = ceil(_SHORTEST * timed.makespan / shortest) if shortest else _LEAST
    return max(_LEAST, min(wanted, _MOST))


@dataclass(frozen=True, slots=True)
class _Block:
    """One computation, or one of two that run side by side: ``part`` of ``parts`` from the top."""

    op: Op
    start: Time
    end: Time
    part: int = 0
    parts: int = 1


def _axis(scale: _Scale, num_ranks: int) -> Iterator[str]:
    """Times above the rows, and a line through them at each."""
    bottom = _TOP + _ROW * num_ranks - (_ROW - _BLOCK)
    if not scale.makespan:
        return
    step = tick_interval(Fraction(scale.makespan) * _TICK / scale.length)
    for count in range(floor(scale.makespan / step) + 1):
        x = scale.x(count * step)
        yield text(x, _TOP - 10, decimal(count * step), "mid")
        yield f'<path class="tick" d="M{px(x)} {_TOP - 6}V{bottom}"/>'


def _row(timed: Timed, rank: int, stages: Sequence[int], scale: _Scale) -> Iterator[str]:
    top = _TOP + _ROW * rank
    yield text(8, top + _BLOCK // 2 + 4, f"rank {rank}")
    yield rect("lane", _LEFT, top, scale.length, _BLOCK)
    yield '<g class="block">'
    for block in _blocks(timed, rank):
        if block.start < block.end:
            yield _drawn(block, stages.index(block.op.stage), top, scale)
    yield "</g>"


def _blocks(timed: Timed, rank: int) -> Iterator[_Block]:
    """Computations of a rank; two with the same times overlap, since a rank does one thing at a time."""
    program = timed.programs[rank]
    times = list(zip(timed.starts[rank], timed.ends[rank], strict=True))
    for index, (op, (start, end)) in enumerate(zip(program, times, strict=True)):
        with_before = index > 0 and times[index - 1] == (start, end) and start < end
        with_next = index + 1 < len(program) and times[index + 1] == (start, end) and start < end
        yield _Block(op, start, end, int(with_before), 2 if with_before or with_next else 1)


def _drawn(block: _Block, chunk: int, row_top: int, scale: _Scale) -> str:
    look = f"{block.op.kind.value}{chunk % 2}"
    left, right = scale.x(block.start), scale.x(block.end)
    height = Fraction(_BLOCK, block.parts)
    top = row_top + block.part * height
    width = max(right - left - _GAP, Fraction(1, 2))
    middle, room = (float(left + width / 2), float(top + height / 2)), (float(width), float(height))
    letter = block.op.kind.value
    number = work_item_text(block.op)
    labels = (
        label_in(middle, room, lines, on_dark=look in _LIGHT_TEXT) for lines in ([letter + number], [letter, number])
    )
    return rect(look, left, top, width, height) + next(filter(None, labels), "")


def _legend(timed: Timed, y: int) -> Iterator[str]:
    """The kinds of computation in the picture, and the meaning of paler blocks."""
    there = {op.kind for program in timed.programs for op in program}
    x = _LEFT
    for kind, word in _KINDS.items():
        if kind in there:
            yield rect(f"{kind.value}0", x, y - 10, 12, 12)
            label = f"{kind.value} {word}"
            yield text(x + 17, y, label)
            x += 32 + 6 * len(label)
    sentences = []
    most = max(map(len, stages_of(timed.programs)), default=0)
    if most > 1:
        sentences.append(f"paler: {'the' if most == 2 else 'every'} second stage of a rank")
    if any(block.parts > 1 for rank in range(len(timed.programs)) for block in _blocks(timed, rank)):
        sentences.append("one above the other: side by side")
    if any(op.split is not None for program in timed.programs for op in program):
        sentences.append("0.1: micro-batch 0, piece 1 of its sequences")
    if sentences:
        yield text(x, y, "; ".join(sentences))
