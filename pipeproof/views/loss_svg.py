"""Losses by step as an SVG picture: the lines of two trainings, a colour for each of their parts.

The first training's lines are wide and pale, the second's narrow and dark: equal lines are both visible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import count, groupby
from math import ceil, floor, isfinite

from pipeproof.views.picture_rows import tick_interval
from pipeproof.views.svg import COLLECTIVE, KIND_COLOURS, SIZES, px, svg_page, text, width_of

_STRONG = (*(strong for strong, _ in KIND_COLOURS.values()), COLLECTIVE)
_COLOURS = (tuple(pale for _, pale in KIND_COLOURS.values()), (_STRONG[1], _STRONG[4], _STRONG[0], _STRONG[3]))
"""By training; colours repeat for further parts."""
_WIDTHS = (6, 1.5)
_LENGTH, _HEIGHT, _TOP, _LINE, _LANE, _RIGHT = 888, 320, 34, 17, 14, 40
"""The axes in pixels, the first line of the legend, its lines, a lane of marks, and the margin for the last step."""
_TICKS = (75, 40)
"""Least distances of ticks to the right and upward."""
_MOST_POINTS = 60
"""Most points of a part whose points are marked."""
_STYLE = """\
.axis{stroke:#8c959f;stroke-width:.5;fill:none}.curve{fill:none;stroke-linecap:round;stroke-linejoin:round}
.boundary{stroke:#57606a;stroke-dasharray:4 3}.bad{stroke:#cf222e;stroke-width:1.5}"""
_ALWAYS_LIGHT = ".paper{fill:#fff}text{fill:#24292f}.faint{fill:#57606a}"


@dataclass(frozen=True, slots=True)
class LossPart:
    """A part of a training: its label, and the loss of each of its steps, in order."""

    label: str
    losses: tuple[tuple[int, float], ...]


def loss_svg(title: str, trainings: Sequence[Sequence[LossPart]]) -> str:
    """The picture of two trainings, each in one or more parts; at least one loss is needed."""
    marked = [
        (training, part, _COLOURS[training][number % len(_COLOURS[training])])
        for training, parts in enumerate(trainings)
        for number, part in enumerate(parts)
    ]
    notes = [note for _, part, _ in marked for note in _not_finite(part)]
    lanes = [
        training
        for training, parts in enumerate(trainings)
        if not all(isfinite(value) for part in parts for _, value in part.losses)
    ]
    losses = [loss for _, part, _ in marked for loss in part.losses]
    finite = [value for _, value in losses if isfinite(value)]
    top = _TOP + _LINE * (len(marked) + len(notes)) + _LANE * len(lanes) + 14
    values = _padded(min(finite, default=0.0), max(finite, default=0.0))
    y_ticks = _ticks(*values, _HEIGHT // _TICKS[1]) if finite else []
    labels = _labels(y_ticks)
    left = 44 + ceil(max(map(width_of, [*labels, "not finite: A"])) * SIZES[0])
    steps = [step for step, _ in losses]
    area = _Area(left, top, (min(steps), max(steps)), values)
    marks = [text(8, 20, title, "title")]
    for row, (training, part, colour) in enumerate(marked):
        y = _TOP + _LINE * (row + 1) - 6
        marks += [_path(f"M{left} {y - 4}h30", colour, training), text(left + 40, y, _fitted(part.label))]
    marks += [text(left + 40, _TOP + _LINE * (len(marked) + row + 1) - 6, note) for row, note in enumerate(notes)]
    marks += [*area.axes(y_ticks, labels), *_boundaries(trainings, area)]
    for training, part, colour in marked:
        marks += _curve(part, area, colour, training)
    for lane, training in enumerate(lanes):
        y = top - 8 - _LANE * (len(lanes) - lane - 1)
        marks.append(text(left - 8, y, f"not finite: {'AB'[training]}", "end faint"))
        columns = {
            int(area.x(step)) for part in trainings[training] for step, value in part.losses if not isfinite(value)
        }
        marks += [f'<path class="bad" d="M{x - 3} {y - 7}l6 6m-6 0l6 -6"/>' for x in sorted(columns)]
    return svg_page((left + _LENGTH + _RIGHT, top + _HEIGHT + 44), title, marks, _STYLE, _ALWAYS_LIGHT)


def _not_finite(part: LossPart) -> Iterator[str]:
    """A note for each kind of loss that is not finite, with its steps."""
    for kind in ("nan", "inf", "-inf"):
        steps = [step for step, value in part.losses if str(value) == kind]
        if steps:
            where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
            yield _fitted(f"{part.label}: {'NaN' if kind == 'nan' else kind} in {where}")


def _fitted(label: str) -> str:
    """A label in the width of the picture, with the letter of its training and the end of its path."""
    while width_of(label) * SIZES[0] > _LENGTH - 40:
        label = f"{label[:3]}…{label[5:]}"
    return label


def _padded(low: float, high: float) -> tuple[Fraction, Fraction]:
    """The range of the vertical axis; around a constant loss, or one of a range too small for ticks, it is wider."""
    first, last = Fraction(low), Fraction(high)
    least = max(abs(first), abs(last)) / 10**12 or Fraction(1)
    room = (last - first) / 25 if last - first > least > 1e-300 else max(least * 10**9, Fraction(1, 10**9))
    return first - room, last + room


def _ticks(low: Fraction, high: Fraction, most: int, least: int = 0) -> list[Fraction]:
    """Round numbers in a range."""
    step = tick_interval(max((high - low) / max(most, 1), Fraction(least)))
    return [number * step for number in range(ceil(low / step), floor(high / step) + 1)]


def _labels(ticks: Sequence[Fraction]) -> list[str]:
    """Each tick with enough digits to differ from the next."""
    largest = max((abs(tick) for tick in ticks), default=Fraction(0))
    step = ticks[1] - ticks[0] if len(ticks) > 1 else largest or Fraction(1)
    if largest and not Fraction(1, 1000) <= largest < 10**6:
        digits, form = next(n for n in count() if step * 10**n >= largest), "e"
    else:
        digits, form = next(n for n in count() if (step * 10**n).denominator == 1), "f"
    return [f"{Decimal(tick.numerator) / tick.denominator:.{digits}{form}}" if tick else "0" for tick in ticks]


@dataclass(frozen=True, slots=True)
class _Area:
    left: int
    top: int
    steps: tuple[int, int]
    values: tuple[Fraction, Fraction]

    def x(self, step: int) -> float:
        """Horizontal position of a step; a single one is in the middle."""
        first, last = self.steps
        return self.left + (_LENGTH * (step - first) / (last - first) if last > first else _LENGTH / 2)

    def y(self, value: float) -> float:
        """Vertical position of a loss; computed in quarters, because a difference of losses may not be finite."""
        low, high = (float(end / 4) for end in self.values)
        return self.top + (high - value / 4) / (high - low) * _HEIGHT

    def axes(self, y_ticks: Sequence[Fraction], labels: Sequence[str]) -> Iterator[str]:
        """The frame, the ticks with lines through the picture, and the names of both axes."""
        right, bottom = self.left + _LENGTH, self.top + _HEIGHT
        yield f'<path class="axis" d="M{self.left} {self.top}V{bottom}H{right}V{self.top}Z"/>'
        yield text(8, self.top + _HEIGHT / 2 + 4, "loss", "faint")
        yield text(self.left + _LENGTH / 2, bottom + 36, "step", "mid faint")
        for tick, label in zip(y_ticks, labels, strict=True):
            y = self.top + _HEIGHT * (self.values[1] - tick) / (self.values[1] - self.values[0])
            yield f'<path class="axis" d="M{self.left - 4} {px(y)}H{right}"/>'
            yield text(self.left - 8, y + 4, label, "end")
        first, last = map(Fraction, self.steps)
        widest = max(width_of(f"{step}") * SIZES[0] for step in self.steps) + 12
        for tick in _ticks(first, last, int(_LENGTH // max(_TICKS[0], widest)), 1) if last > first else [first]:
            yield f'<path class="axis" d="M{px(self.x(int(tick)))} {self.top}V{bottom + 4}"/>'
            yield text(self.x(int(tick)), bottom + 18, f"{tick}", "mid")


def _boundaries(trainings: Sequence[Sequence[LossPart]], area: _Area) -> Iterator[str]:
    """A line where a part follows another."""
    steps = {part.losses[0][0] for parts in trainings for part in parts[1:]}
    yield from (f'<path class="boundary" d="M{px(area.x(step))} {area.top}v{_HEIGHT}"/>' for step in sorted(steps))


def _path(line: str, colour: str, training: int) -> str:
    return f'<path class="curve" stroke="{colour}" stroke-width="{_WIDTHS[training]}" d="{line}"/>'


def _curve(part: LossPart, area: _Area, colour: str, training: int) -> Iterator[str]:
    """The line of a part, broken where a loss is not finite; for a long one, each column of pixels has its extremes."""
    for is_finite, run in groupby(part.losses, lambda loss: isfinite(loss[1])):
        if not is_finite:
            continue
        points = [(area.x(step), area.y(value)) for step, value in run]
        kept = list[tuple[float, float]]()
        for _, column in groupby(points, lambda point: int(point[0])):
            of_column = list(column)
            heights = [y for _, y in of_column]
            extremes = {0, heights.index(min(heights)), heights.index(max(heights)), len(heights) - 1}
            kept += [of_column[i] for i in sorted(extremes)]
        yield _path("M" + "L".join(f"{px(x)} {px(y)}" for x, y in kept) + "h0", colour, training)
    if len(part.losses) <= _MOST_POINTS:
        for step, value in part.losses:
            if isfinite(value):
                radius = _WIDTHS[training] / 2 + 1.5
                yield f'<circle fill="{colour}" cx="{px(area.x(step))}" cy="{px(area.y(value))}" r="{radius}"/>'
