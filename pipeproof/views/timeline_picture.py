"""A timeline as a picture for paper: PNG, SVG or PDF, drawn with matplotlib (extra ``plot``).

A row for each rank, time to the right, what each rank holds under the same
axis. Colours are those of the other pictures, and letters carry the same information where
they fit. Blocks are drawn as a few collections, so that tens of thousands take
seconds; where there are many, SVG and PDF hold them as an image.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeproof.diagnostics.units import size_text, time_text
from pipeproof.schedule.ops import CHILD_KINDS, COLLECTIVE_KINDS, COMPUTE_KINDS, PART_KINDS, UPDATE_KINDS, Op, OpKind
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Timeline, figures_of
from pipeproof.views import colours
from pipeproof.views.colours import COLLECTIVE, KIND_COLOURS, OTHER, colour_of
from pipeproof.views.memory_curves import Curve, all_curves
from pipeproof.views.picture_rows import RankRow, rows_of, work_item_text
from pipeproof.views.plot_file import default_style, new_figure, write_figure
from pipeproof.views.trace_slices import Slices

# --- The parts of a timeline picture, independent of the drawing library: boxes, labels, messages, curves ---
# x is time in microseconds since the first start, y counts rows downwards: row r has its lane from r to r + 1.


MOST_MESSAGES = 160
"""A picture with more messages shows none."""
_LANES = (0.86, 0.74)
"""Height of a row's lane without messages, and where the rest of the row is for them."""
_INNER = 0.2
"""The share of a block's height at its foot that shows the collectives inside of it."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(slots=True)
class Parts:
    """Everything that is drawn of the rows: blocks by colour, labels by block, messages between rows.

    ``lane`` is the height of a row's blocks; the rows are 1 apart.
    """

    lane: float
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    """By colour; later colours lie above earlier ones."""
    labels: list[tuple[Box, str, str]] = field(default_factory=list)
    """Free area of a block, its full text, and its colour."""
    messages: list[Box] = field(default_factory=list)
    """From left and top to right and bottom, none where they are too many."""
    kinds: set[OpKind] = field(default_factory=set)
    num_chunks: int = 1
    has_collectives: bool = False
    has_others: bool = False
    has_pairs: bool = False

    @property
    def shortest(self) -> float:
        """A length that nine tenths of all labelled blocks have at least, in microseconds; 0 without any."""
        lengths = [right - left for (left, _, right, _), _, _ in self.labels]
        return float(np.quantile(lengths, 0.1)) if lengths else 0.0


def parts_of(slices: Slices, rows: Sequence[RankRow]) -> Parts:
    """The parts of a picture whose rows are these; a row shows the first of its ranks."""
    shown = _shown_messages(slices, rows)
    parts = Parts(_LANES[bool(shown)])
    parts.messages = [_message(slices, *message, parts.lane) for message in shown]
    by_rank: dict[int, list[Span]] = {row.ranks[0]: [] for row in rows}
    for span in slices.shown:
        is_here = span.queue == COMPUTE_QUEUE or _is_inner(slices.ops[span.op])
        if is_here and span.start < span.end and span.rank in by_rank:
            by_rank[span.rank].append(span)
    inner: list[tuple[str, Box]] = []
    for place, row in enumerate(rows):
        inner += _row(slices, row.ranks[0], by_rank[row.ranks[0]], place, parts)
    for colour, box in inner:  # above everything
        parts.boxes.setdefault(colour, []).append(box)
    return parts


def _row(slices: Slices, rank: int, spans: list[Span], place: int, parts: Parts) -> Iterator[tuple[str, Box]]:
    """Adds a row's blocks; yields what runs inside of them."""
    stages = {stage: chunk for chunk, stage in enumerate(slices.timeline.stages(rank))}
    parts.num_chunks = max(parts.num_chunks, len(stages))
    children = [span for span in spans if _is_inner(slices.ops[span.op])]
    with_children = {(span.step, slices.ops[span.op].target) for span in children}
    in_parts = {(s.step, slices.ops[s.op].target) for s in children if slices.ops[s.op].kind in PART_KINDS}
    blocks: dict[tuple[int, Op | None], Box] = {}
    lane: Box = (0.0, float(place), 0.0, place + parts.lane)

    def add_block(kind: OpKind, computation: Op, box: Box, free: Box) -> None:
        colour = colour_of(kind, stages[computation.stage], len(stages))
        parts.boxes.setdefault(colour, []).append(box)
        parts.kinds.add(kind)
        parts.labels.append((free, f"{kind.value}{work_item_text(computation)}", colour))

    whole = [span for span in spans if slices.ops[span.op].kind in COMPUTE_KINDS]
    for span, above, below in _heights([s for s in whole if (s.step, slices.ops[s.op]) not in in_parts]):
        op = slices.ops[span.op]
        box = _box(slices, span, place + above * parts.lane, place + below * parts.lane)
        blocks[span.step, op] = box
        parts.has_pairs |= below - above < 1
        add_block(op.kind, op, box, (*box[:3], _foot(box)) if (span.step, op) in with_children else box)
    for span in spans:
        op = slices.ops[span.op]
        if op.kind in COMPUTE_KINDS or op.kind is OpKind.WAIT:
            continue
        if op.kind in PART_KINDS:
            assert op.target is not None
            kind = OpKind.BACKWARD_WEIGHT if op.kind is OpKind.WEIGHTS else op.target.kind
            box = _box(slices, span, lane[1], _foot(lane))
            add_block(kind, op.target, box, box)
            continue
        is_collective = op.kind in COLLECTIVE_KINDS | UPDATE_KINDS
        parts.has_collectives |= is_collective
        parts.has_others |= not is_collective
        # A computation that is drawn as its parts has the whole lane.
        around = blocks.get((span.step, op.target), lane) if _is_inner(op) else None
        top, bottom = (_foot(around), around[3]) if around else (lane[1], lane[3])
        yield COLLECTIVE if is_collective else OTHER, _box(slices, span, top, bottom)


def _is_inner(op: Op) -> bool:
    """True for a collective inside a computation, on any queue, and for a part of one."""
    return op.kind in CHILD_KINDS | PART_KINDS and op.target is not None and op.target.kind in COMPUTE_KINDS


def _foot(block: Box) -> float:
    """Top of the foot of a block, the part that shows the operations inside it."""
    _, top, _, bottom = block
    return bottom - _INNER * (bottom - top)


def _heights(spans: Sequence[Span]) -> Iterator[tuple[Span, float, float]]:
    """Each computation with its top and bottom, as shares of the lane: two that run side by side share its height."""
    spans = sorted(spans, key=lambda span: (span.start, span.end, span.step, span.op_id))
    together: list[Span] = []
    for span in [*spans, None]:
        if together and (span is None or span.start >= max(before.end for before in together)):
            for layer, one in enumerate(together):
                yield one, layer / len(together), (layer + 1) / len(together)
            together = []
        if span is not None:
            together.append(span)


def _box(slices: Slices, span: Span, top: float, bottom: float) -> Box:
    return float(slices.us(span.start)), top, float(slices.us(span.end)), bottom


def _shown_messages(slices: Slices, rows: Sequence[RankRow]) -> list[tuple[Span, Span, int, int]]:
    """(send, receive, row of the one, row of the other) of all messages between rows, or none if they are many."""
    place_of = {rank: place for place, row in enumerate(rows) for rank in row.ranks}
    first = {row.ranks[0] for row in rows}
    found = []
    for send, recv in slices.messages:
        if send.rank in first and place_of[send.rank] != place_of[recv.rank]:
            found.append((send, recv, place_of[send.rank], place_of[recv.rank]))
            if len(found) > MOST_MESSAGES:
                return []
    return found


def _message(slices: Slices, send: Span, recv: Span, source: int, target: int, lane: float) -> Box:
    """From the start of a send to the end of its receive, between the edges of the lanes that face each other."""
    down = source < target
    top, bottom = source + (lane if down else 0.0), target + (0.0 if down else lane)
    return float(slices.us(send.start)), top, float(slices.us(recv.end)), bottom


def corners_of(boxes: Sequence[Box]) -> Any:
    """An array [box, corner, x and y] of float64, corners in order around each box."""
    left, top, right, bottom = np.asarray(boxes, dtype=float).T
    return np.stack([np.column_stack(c) for c in ((left, top), (right, top), (right, bottom), (left, bottom))], axis=1)


def steps_of(slices: Slices, curve: Curve, rank: int, until: float) -> tuple[list[float], list[int]]:
    """The corners of a rank's curve: times in microseconds, and the value from each on; the last at ``until``."""
    times, values = [0.0], [0]
    for time, value in curve.ranks[rank]:
        times.append(float(slices.us(time)))
        values.append(value)
    return [*times, until], [*values, values[-1]]


_MOST_VECTORS = 4000
"""More blocks than this are an image within SVG and PDF."""
_WIDTHS = (9.0, 20.0)
_LEFT, _RIGHT, _ABOVE, _BELOW, _BETWEEN = 0.95, 0.55, 0.56, 0.42, 0.06
"""Of the picture, and its margins, in inches."""
_LEAST = 0.66
"""Height of all strips of a curve, for its name next to them."""
_SIZES = (8.0, 6.5, 5.0)
"""Of labels, in points; one that fits in none of them is left out."""
_UNITS = (("s", 1e6), ("ms", 1e3), ("us", 1.0))
"""Units of the time axis in microseconds; the axis has the longest that the makespan has ten of."""
_NARROWEST = 2.0
"""No label is narrower than this, in points."""
_WORDS = {kind.value: word for kind, word in zip(
    KIND_COLOURS, ("F forward", "B backward", "I gradient of inputs", "W gradient of weights"), strict=True
)}  # fmt: skip


@default_style()
def write_picture(timeline: Timeline, path: Path, title: str, curves: Sequence[Curve] = ()) -> None:
    """Write the picture in the form that the suffix names, overwriting what is there.

    ``curves`` are drawn below the activations held. The same bytes for the same timeline and version of matplotlib.

    Raises:
        ValueError: the suffix is none of png, svg and pdf.
        OSError: the file cannot be written.
        ModuleNotFoundError: matplotlib is not installed.
    """
    drawing = drawing_of(timeline, title, curves)
    write_figure(drawing.figure, path, drawing.heading)


@default_style()
def drawing_of(timeline: Timeline, title: str, curves: Sequence[Curve] = ()) -> Drawing:
    """The picture that ``write_picture`` writes.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    return Drawing(Slices(timeline), title, all_curves(timeline, curves))


class Drawing:
    """A matplotlib ``figure`` with the ``parts`` that are drawn in it, and its ``heading``."""

    def __init__(self, slices: Slices, title: str, curves: Sequence[Curve]) -> None:
        self.slices, self.rows = slices, rows_of(slices.timeline)
        self.curves = [curve for curve in curves if curve.peak]
        self.until = float(slices.timeline.makespan_us) or 1.0
        self.parts = parts_of(slices, self.rows)
        self.width = _width(self.parts, self.until)
        self.row = _row_height(len(self.rows), self.parts)
        strip = max(min(self.row * 0.8, 0.3, 4 / len(self.rows)), 0.08, _LEAST / len(self.rows))
        heights = [self.row * len(self.rows), *(strip * len(self.rows) for _ in self.curves)]
        marks = self._marks()
        num_columns = min(len(marks), int((self.width - 0.2) / 1.75))
        foot = 0.16 * -(-len(marks) // num_columns) + 0.06
        height = _ABOVE + sum(heights) + _BETWEEN * len(self.curves) + _BELOW + foot
        self.figure = new_figure(figsize=(self.width, height), facecolor=colours.PAPER)
        self.heading = self._heading(title)
        self._title(height)
        top = height - _ABOVE
        for place, tall in enumerate(heights):
            inner = (_LEFT / self.width, (top - tall) / height, self._inner / self.width, tall / height)
            axes = self.figure.add_axes(inner)
            self._frame(axes, last=place == len(heights) - 1, tall=tall)
            if place == 0:
                self._blocks(axes)
            else:
                self._curve(axes, self.curves[place - 1])
            top -= tall + _BETWEEN
        self._legend(marks, num_columns, height)

    @property
    def _inner(self) -> float:
        return self.width - _LEFT - _RIGHT

    def _points(self, duration: float) -> float:
        """The length of a time on paper, in points."""
        return duration / self.until * self._inner * 72

    def _heading(self, title: str) -> str:
        timeline = self.slices.timeline
        figures = figures_of(timeline)
        idle = sum(float(rank.bubble_makespan_ratio) for rank in figures) / max(1, len(figures))
        peak = max((rank.peak_activations for rank in figures), default=0)
        parts = [
            f"makespan {time_text(timeline.makespan_us)}",
            f"idle {idle * 100:.1f} %",
            f"peak {peak} activation{'s' * (peak != 1)}",
        ]
        parts += [f"{curve.name} {_short(curve.peak, curve.unit)}" for curve in self.curves[1:]]
        name = title if timeline.clock in title else f"{title}, {timeline.clock}"
        return f"{name}: {', '.join(parts)}"

    def _title(self, height: float) -> None:
        """The name above the figures; a name too long for the picture loses its end."""
        name, _, figures = self.heading.rpartition(": ")
        most = int((self.width - 0.3) * 72 / (9.5 * 0.62))
        name = name if len(name) <= most else f"{name[: most - 3]}..."
        left = 0.12 / self.width
        self.figure.text(left, 1 - 0.18 / height, name, size=9.5, weight="bold", color=colours.TEXT, va="center")
        self.figure.text(left, 1 - 0.38 / height, figures, size=8, color=colours.FAINT, va="center")

    def _frame(self, axes: Any, *, last: bool, tall: float) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        axes.set_xlim(0, self.until)
        axes.set_ylim(len(self.rows), 0)
        for side in axes.spines.values():
            side.set_visible(False)
        labels = [row.label.removeprefix("rank ") for row in self.rows]
        step = max(1, -(-9 * len(labels) // int(tall * 72)))  # a label takes nine points
        places = list(range(0, len(labels), step))
        axes.set_yticks(
            [place + self.parts.lane / 2 for place in places], [labels[place] for place in places], size=6.5
        )
        axes.set_ylabel("rank", size=7.5, color=colours.FAINT)
        axes.yaxis.set_label_coords(-0.72 / self._inner, 0.5)
        axes.tick_params(axis="both", length=0, colors=colours.TEXT, labelsize=6.5, labelbottom=last)
        axes.xaxis.set_major_locator(MaxNLocator(max(2, int(self._inner * 1.1)), steps=[1, 2, 5, 10]))
        unit, length = next((unit for unit in _UNITS if self.until >= 10 * unit[1]), _UNITS[-1])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time / length:.6g}"))
        axes.grid(axis="x", color="#8c959f", linewidth=0.3, alpha=0.6)
        axes.set_axisbelow(True)
        if last:
            axes.set_xlabel(f"time, {unit}", size=7.5, color=colours.FAINT, labelpad=2)

    def _blocks(self, axes: Any) -> None:
        from matplotlib.collections import PolyCollection

        parts, slim = self.parts, self._points(self.parts.shortest) < 3
        as_image = sum(map(len, parts.boxes.values())) > _MOST_VECTORS
        lanes = [(0.0, float(place), self.until, place + self.parts.lane) for place in range(len(self.rows))]
        for colour, boxes in [(colours.IDLE, lanes), *parts.boxes.items()]:
            edge = "none" if slim or colour in (colours.IDLE, colours.COLLECTIVE) else colours.PAPER
            axes.add_collection(
                PolyCollection(
                    corners_of(boxes), facecolors=colour, edgecolors=edge, linewidths=0.4, rasterized=as_image, zorder=2
                ),
                autolim=False,
            )
        self._labels(axes)
        arrow = {"arrowstyle": "-|>,head_width=0.09,head_length=0.18", "color": colours.MESSAGE, "linewidth": 0.4}
        for left, top, right, bottom in parts.messages:
            axes.annotate(
                "", (right, bottom), (left, top), zorder=1.5, annotation_clip=False,
                arrowprops={**arrow, "shrinkA": 0, "shrinkB": 0},
            )  # fmt: skip

    def _labels(self, axes: Any) -> None:
        """Letters and numbers where they fit, as outlines: one collection for each text, size and colour."""
        from matplotlib.collections import PathCollection
        from matplotlib.font_manager import FontProperties
        from matplotlib.textpath import TextPath
        from matplotlib.transforms import Affine2D, IdentityTransform

        font = FontProperties(family="DejaVu Sans")
        paths: dict[str, tuple[Any, float, float]] = {}

        def path_of(text: str) -> tuple[Any, float, float]:
            """The outline at size 1 around its middle, its width and height."""
            if text not in paths:
                path = TextPath((0, 0), text, size=100, prop=font)
                box = path.get_extents()
                middle = Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2).scale(0.01)
                paths[text] = path.transformed(middle), box.width / 100, box.height / 100
            return paths[text]

        placed: dict[tuple[str, float, str], list[tuple[float, float]]] = defaultdict(list)
        for (left, top, right, bottom), text, colour in self.parts.labels:
            room = self._points(right - left) - 2.2, (bottom - top) * self.row * 72 - 1.6
            for choice in (text, text[1:]) if room[0] > _NARROWEST else ():
                _, wide, tall = path_of(choice)
                size = next((size for size in _SIZES if wide * size <= room[0] and tall * size <= room[1]), None)
                if size is not None:
                    ink = colours.PAPER if colours.is_dark(colour) else "#111111"
                    placed[choice, size, ink].append(((left + right) / 2, (top + bottom) / 2))
                    break
        for (text, size, ink), middles in placed.items():
            collection = PathCollection(
                [path_of(text)[0]], sizes=[size**2], offsets=middles, offset_transform=axes.transData,
                transform=IdentityTransform(), facecolors=ink, edgecolors="none", zorder=3,
            )  # fmt: skip
            axes.add_collection(collection, autolim=False)

    def _curve(self, axes: Any, curve: Curve) -> None:
        """A strip for each row, filled up to what its rank holds; all have one scale."""
        from matplotlib.collections import PolyCollection

        shapes, peaks = [], []
        for place, row in enumerate(self.rows):
            times, values = steps_of(self.slices, curve, row.ranks[0], self.until)
            foot, unit = place + 0.92, 0.86 / curve.peak
            corners_x = np.repeat(times, 2)[1:-1]
            corners_y = foot - unit * np.repeat(values[:-1], 2)
            shapes.append(np.column_stack((np.r_[times[0], corners_x, times[-1]], np.r_[foot, corners_y, foot])))
            peaks.append(max(values))
        axes.add_collection(
            PolyCollection(shapes, facecolors=colours.HELD, edgecolors="none", alpha=0.75), autolim=False
        )
        axes.hlines(np.arange(len(self.rows)) + 0.92, 0, self.until, color=colours.HELD, linewidth=0.3)
        room = axes.get_position().height * self.figure.get_size_inches()[1] / len(self.rows) * 72
        step = max(1, int(np.ceil(8 / room)))
        for place in range(0, len(self.rows), step):
            axes.annotate(
                _short(peaks[place], curve.unit), (1, place + 0.5), (4, 0), xycoords=axes.get_yaxis_transform(),
                textcoords="offset points", size=6, color=colours.TEXT, va="center",
            )  # fmt: skip
        axes.set_ylabel(curve.name.removesuffix(" held"), size=7.5, color=colours.FAINT)

    def _marks(self) -> list[Any]:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        parts = self.parts
        marks: list[Any] = [
            Patch(facecolor=shades[0], label=_WORDS[kind.value])
            for kind, shades in KIND_COLOURS.items()
            if kind in parts.kinds
        ]
        if parts.num_chunks > 1:
            pale = next(shades[1] for kind, shades in KIND_COLOURS.items() if kind in parts.kinds)
            marks.append(Patch(facecolor=pale, label="paler: later stage of a rank"))
        if parts.has_pairs:
            marks.append(Line2D([], [], linestyle="none", label="halves: side by side"))
        if parts.has_collectives:
            marks.append(Patch(facecolor=colours.COLLECTIVE, label="collective"))
        if parts.has_others:
            marks.append(Patch(facecolor=colours.OTHER, label="other"))
        marks.append(Patch(facecolor=colours.IDLE, label="idle"))
        if parts.messages:
            marks.append(Line2D([], [], color=colours.MESSAGE, linewidth=0.8, label="message"))
        if self.curves:
            marks.append(Patch(facecolor=colours.HELD, alpha=0.75, label="held; peak at right"))
        return marks

    def _legend(self, marks: list[Any], num_columns: int, height: float) -> None:
        self.figure.legend(
            handles=marks, loc="lower left", bbox_to_anchor=(0.1 / self.width, 0.02 / height), fontsize=6.5,
            ncols=num_columns, frameon=False, labelcolor=colours.TEXT, handlelength=1.2, handleheight=0.9,
            columnspacing=1.4, borderpad=0.2, handletextpad=0.5, labelspacing=0.4,
        )  # fmt: skip


def _width(parts: Parts, until: float) -> float:
    """Wide enough for most labels, within bounds."""
    wanted = 16 / 72 * until / parts.shortest if parts.labels else 0.0
    return min(max(wanted + _LEFT + _RIGHT, _WIDTHS[0]), _WIDTHS[1])


def _row_height(num_rows: int, parts: Parts) -> float:
    """Height of a rank's row in inches: all rows within about 14, and high enough to be distinguished."""
    highest = 0.46 if parts.messages else 0.38
    return min(highest, max(0.13, 14 / max(1, num_rows)))


def _short(value: int, unit: str) -> str:
    """A value for people: bytes in a unit of their own, anything else as it is."""
    return size_text(value) if unit == "bytes" else f"{value}"
