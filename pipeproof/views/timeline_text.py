"""A timeline and its figures in a terminal.

The timeline needs no colour to be read: every operation is a block that
starts with its letter and, where it fits, its micro-batch (``F0--``), gradient
reductions and the optimizer are ``u``, and idle time is dots. Blocks of a
rank's further stages are filled with other signs (``F0==``), and two
operations that overlap are one block (``F3+B0``). Colours only
help to distinguish letters and stages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd, lcm

from rich.console import Console
from rich.text import Text

from pipeproof.cost.step_error import FEW_MODELS, NOT_MEASURED, StepError
from pipeproof.diagnostics.units import time_text
from pipeproof.schedule.ops import Op, OpKind, parse_op
from pipeproof.sim.simulate import Simulation
from pipeproof.sim.timeline import COMPUTE_QUEUE, RankFigures, Span, Time, Timeline
from pipeproof.views.picture_rows import rows_of, tick_interval, work_item_text
from pipeproof.views.tables import print_lines, print_table, table_lines

_STYLES = {
    OpKind.FORWARD: ("bold white on blue", "bold black on bright_blue"),
    OpKind.BACKWARD: ("bold black on green", "bold black on bright_green"),
    OpKind.BACKWARD_INPUT: ("bold black on cyan", "bold black on bright_cyan"),
    OpKind.BACKWARD_WEIGHT: ("bold black on yellow", "bold black on bright_yellow"),
}
"""By kind, for a rank's first stage, its second, its third as its first, and so on."""
_PAIR_STYLE = "bold white on magenta"
_FILLS = "-=~:"
"""Fill characters of the blocks of a rank's first stage, its second and so on, cyclically."""
_WORDS = {
    OpKind.FORWARD: "F forward",
    OpKind.BACKWARD: "B backward",
    OpKind.BACKWARD_INPUT: "I backward for inputs",
    OpKind.BACKWARD_WEIGHT: "W backward for weights",
}


TimeText = Callable[[Fraction], str]
"""Text of a time in the unit of a picture."""


def render_timeline(timeline: Timeline, console: Console, title: str = "", text: TimeText = time_text) -> None:
    """Print one row per rank over a time axis that is fitted to the console's width.

    Ranks that differ only outside ``pp`` and have equal timelines share a row,
    and a line below gives the number of ranks of each row. ``title`` begins the
    line above the picture, which names the makespan; ``text`` writes times.
    """
    rows, updates = rows_of(timeline), _updates(timeline)
    label_width = max((len(row.label) for row in rows), default=0) + 1
    scale = _fit(timeline, max(_MIN_COLUMNS, console.width - label_width - 1))
    head = f"{title}, {timeline.clock}" if title else timeline.clock
    column = text(1 / scale.columns_per_us) if scale.columns_per_us else "0"
    makespan, of_column = f"{head}: step time {text(timeline.makespan_us)}", f"one column is {column}"
    together = f"{makespan}, {of_column}"
    for words in (together,) if len(together) <= console.width else (f"{makespan},", of_column):
        console.print(Text(words), soft_wrap=True)
    lines = [Text(" " * label_width + _axis(scale, text))]
    for row in rows:
        line = Text(row.label.ljust(label_width))
        line.append_text(_picture(timeline, row.ranks[0], updates[row.ranks[0]], scale))
        lines.append(line)
    print_lines(lines, console)
    drawn = "\n".join(line.plain[label_width:] for line in lines[1:])
    num_stages = max((len(timeline.stages(row.ranks[0])) for row in rows), default=0)
    if legend := "; ".join(_legend(drawn, num_stages)):
        console.print(Text(f"{legend}."))
    shared = len(rows[0].ranks) if rows else 1
    if shared > 1:
        console.print(Text(f"Each row represents {shared} ranks with the same timeline."))


def render_figures(simulation: Simulation, console: Console, note: str = "") -> None:
    """Print a note on the times, if any, and the table of figures, below an empty line; ranks as in the timeline."""
    console.print()
    if note:
        console.print(Text(note), soft_wrap=True)
    console.print(Text(f"p2p {_p2p_text(simulation)}; engine {simulation.engine}"))
    rows = [(row.label.removeprefix("rank "), simulation.figures[row.ranks[0]]) for row in rows_of(simulation.timeline)]
    lines = figures_lines(rows)
    if max(line.cell_len for line in lines) <= console.width:
        print_lines(lines, console)
        return
    cells = [
        (
            name,
            time_text(figures.span_us),
            time_text(figures.busy_us),
            f"{float(figures.bubble_makespan_ratio * 100):.1f} %",
            _peak_text(figures),
        )
        for name, figures in rows
    ]
    print_table(("rank", ">span", ">busy", ">bubble", ">peak"), cells, console)  # 40 columns are wide enough
    console.print(Text("bubble: of the step time; peak: of activations"))


def render_interval(simulation: Simulation, error: StepError | None, console: Console) -> None:
    """Print the 80 % interval of a step with computed times, or that nothing comparable was measured."""
    if error is None:
        console.print(Text(f"{NOT_MEASURED[0].upper()}{NOT_MEASURED[1:]}."), soft_wrap=True)
        return
    low, high = (time_text(end) for end in error.interval(float(simulation.makespan)))
    measured = f"{error.num_rows} measured steps of {error.num_models} models ({error.kind})"
    few = "; few models, so other devices count too" if error.num_models < FEW_MODELS else ""
    console.print(Text(f"80 % interval: {low} to {high}, from the errors of {measured}{few}."), soft_wrap=True)


def figures_lines(rows: Iterable[tuple[str, RankFigures]], text: TimeText = time_text) -> list[Text]:
    """A table of figures by the name of their rank, or ranks."""
    headings = ("rank", ">span", ">busy", ">bubble of span", ">bubble of the step", ">peak activations")
    return table_lines(
        headings,
        (
            (
                name,
                text(figures.span_us),
                text(figures.busy_us),
                _with_percent(text(figures.bubble_span_us), figures.bubble_span_ratio),
                _with_percent(text(figures.bubble_makespan_us), figures.bubble_makespan_ratio),
                _peak_text(figures),
            )
            for name, figures in rows
        ),
    )


def _p2p_text(simulation: Simulation) -> str:
    if simulation.p2p == "backend":
        return f"backend (a send is {simulation.send_completes})"
    return simulation.p2p


def _with_percent(time: str, ratio: Fraction) -> str:
    return f"{time} ({float(ratio * 100):.1f} %)"


def _peak_text(figures: RankFigures) -> str:
    if figures.peak_activations == figures.peak_activations_at_i:
        return str(figures.peak_activations)
    return f"{figures.peak_activations} ({figures.peak_activations_at_i} at I)"


_MIN_COLUMNS = 20
_MIN_TICK_COLUMNS = 12
_MOST_COLUMNS_PER_STEP = 4
"""Limit for short schedules: they need not fill a wide terminal."""
_PIECE = re.compile(r"\d\.\d")
_ORDERS = ("first", "second", "third", "fourth")


@dataclass(frozen=True, slots=True)
class _Scale:
    """Scale of time over columns: column i begins ``i / columns_per_us`` after the first start."""

    columns_per_us: Fraction
    num_columns: int
    step_us: Fraction
    """The unit that all times of the picture are whole multiples of."""


def _fit(timeline: Timeline, width: int) -> _Scale:
    """Whole columns per unit of time if the picture fits; else the makespan over the whole width."""
    makespan = timeline.makespan_us
    if makespan == 0:
        return _Scale(Fraction(0), 0, Fraction(0))
    first = timeline.us(timeline.first_start)
    times = {makespan}
    for rank in range(len(timeline.ranks)):
        for span, _ in timeline.compute_spans(rank):
            times |= {timeline.us(span.start) - first, timeline.us(span.end) - first}
    denominator = lcm(*(time.denominator for time in times))
    step = Fraction(gcd(*(int(time * denominator) for time in times)), denominator)
    num_steps = int(makespan / step)
    if num_steps <= width:
        columns_per_step = min(width // num_steps, _MOST_COLUMNS_PER_STEP)
        return _Scale(columns_per_step / step, columns_per_step * num_steps, step)
    return _Scale(width / makespan, width, step)


def _axis(scale: _Scale, text: TimeText) -> str:
    """Times along the columns, each starting at its own column."""
    if not scale.num_columns:
        return "0"
    interval = tick_interval(_MIN_TICK_COLUMNS / scale.columns_per_us)
    line = ""
    for count in range(ceil(scale.num_columns / (interval * scale.columns_per_us))):
        column, label = floor(count * interval * scale.columns_per_us), f"|{text(count * interval) if count else 0}"
        if column + len(label) <= scale.num_columns:
            line = line.ljust(column) + label
    return line


def _updates(timeline: Timeline) -> list[list[tuple[Time, Time]]]:
    """By rank, the times in order when its gradients are reduced, its optimizer steps and weights are gathered.

    Reductions and gathers include their collectives; operations that overlap computations are left out.
    """
    by_rank: list[list[tuple[Time, Time]]] = [[] for _ in timeline.ranks]
    for span in timeline.spans:
        is_update = any(name in span.op for name in ("REDUCE_GRAD", "STEP", "GATHER_WEIGHT"))
        if span.end > span.start and span.queue == COMPUTE_QUEUE and is_update and not span.op.startswith("WAIT"):
            by_rank[span.rank].append((span.start, span.end))
    return [sorted(intervals) for intervals in by_rank]


def _picture(timeline: Timeline, rank: int, updates: Sequence[tuple[Time, Time]], scale: _Scale) -> Text:
    first = timeline.us(timeline.first_start)
    stages = timeline.stages(rank)
    line = Text()
    blocks: list[tuple[Time, Time, list[Span]]] = [(start, end, []) for start, end in updates]
    blocks += [
        (min(span.start for span in together), max(span.end for span in together), together)
        for together in _side_by_side(timeline, rank)
    ]
    for *ends, together in sorted(blocks, key=lambda block: block[:2]):
        start, end = (_column(timeline.us(time) - first, scale) for time in ends)
        start = max(start, len(line))
        if start < end:
            line.append("." * (start - len(line)), style="dim")
            if together:
                line.append(*_block([parse_op(span.op) for span in together], stages, end - start))
            else:
                line.append("u" * (end - start))
    line.append("." * (scale.num_columns - len(line)), style="dim")
    return line


def _side_by_side(timeline: Timeline, rank: int) -> Iterator[list[Span]]:
    """The compute operations of a rank in order of time, those that overlap together."""
    together: list[Span] = []
    for span, _ in timeline.compute_spans(rank):
        if together and span.start >= max(before.end for before in together):
            yield together
            together = []
        together.append(span)
    if together:
        yield together


def _legend(drawn: str, num_stages: int) -> Iterator[str]:
    """Meaning of the letters and signs that occur in drawn rows of ranks with at most so many stages."""
    words = [word for kind, word in _WORDS.items() if kind.value in drawn]
    if words:
        yield ", ".join(words) + (", with the micro-batch where it fits" if any(map(str.isdigit, drawn)) else "")
    if "." in _PIECE.sub("", drawn):
        yield "dots are idle"
    fills = [f"{fill} its {order}" for fill, order in zip(_FILLS, _ORDERS[:num_stages], strict=False) if fill in drawn]
    if num_stages > 1 and fills:
        more = " and so on" if num_stages > len(_FILLS) else ""
        yield f"blocks are filled by the stage of the rank: {', '.join(fills)}{more}"
    if "+" in drawn:
        yield "F3+B0 are side by side"
    if _PIECE.search(drawn):
        yield "F0.1 is piece 1 of the sequences of micro-batch 0"
    if "u" in drawn:
        yield "u: the update, gradient reductions and the optimizer"


def _column(time: Fraction, scale: _Scale) -> int:
    """The first column whose middle is at or after ``time``."""
    return ceil(time * scale.columns_per_us - Fraction(1, 2))


def _block(ops: Sequence[Op], stages: Sequence[int], width: int) -> tuple[str, str]:
    """``F12---`` and its style; only the letter, ``F-----``, where the micro-batch does not fit."""
    labels = "+".join(op.kind.value + work_item_text(op) for op in ops), "+".join(op.kind.value for op in ops), "+"
    label = next((label for label in labels if len(label) <= width), "")
    chunk = stages.index(ops[0].stage)
    style = _STYLES[ops[0].kind][chunk % 2] if len(ops) == 1 else _PAIR_STYLE
    return label.ljust(width, _FILLS[chunk % len(_FILLS)]), style
