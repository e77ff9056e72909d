"""A timeline as a CSV table: one row for each operation, in the order of the timeline's spans."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path

from pipeproof.atomic_write import output_file
from pipeproof.schedule.op_table import OpGraph
from pipeproof.sim.timeline import Timeline
from pipeproof.views.trace_slices import Slices

COLUMNS = (
    "rank", "queue", "op", "kind", "stage", "micro_batch", "split", "start_us", "end_us", "exact", "bytes", "peer",
    "step", "op_id", "clock",
)  # fmt: skip
"""The heading. ``docs/pictures.md`` describes the columns."""

_DIGITS = 9
"""After the point, of a time that has no end as a decimal."""


def write_csv(timeline: Timeline, path: Path, graph: OpGraph | None = None) -> int:
    """Write the table, overwriting what is there; row by row, so that the text is never in memory whole.

    Times are microseconds since the timeline's first start: exact where they
    have a finite decimal form, else rounded to nine digits with ``no`` in the
    column ``exact``. ``graph`` adds the bytes of transfers and collectives.

    Returns:
        How many rows have a rounded time.

    Raises:
        OSError: the file cannot be written.
    """
    rounded = 0
    with output_file(path) as new, new.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row, exact in _rows(timeline, graph):
            rounded += not exact
            writer.writerow(row)
    return rounded


def _rows(timeline: Timeline, graph: OpGraph | None) -> Iterator[tuple[tuple[object, ...], bool]]:
    """Each row, and whether its times are exact; None represents an empty cell."""
    slices = Slices(timeline, graph)

    @cache
    def decimal(time: Fraction | float) -> tuple[str, bool]:
        """Many operations begin and end together."""
        return decimal_text(slices.us(time))

    for span in timeline.spans:
        op = slices.ops[span.op]
        about = op.target or op  # what a wait waits for, what a child collective belongs to
        (start, start_exact), (end, end_exact) = decimal(span.start), decimal(span.end)
        exact = start_exact and end_exact
        yield (
            span.rank, span.queue, span.op, op.kind.value, op.stage, about.micro_batch, about.split, start, end,
            "yes" if exact else "no", slices.bytes_of(span), slices.peer_of.get((span.step, span.op_id)), span.step,
            span.op_id, timeline.clock,
        ), exact  # fmt: skip


def decimal_text(value: Fraction) -> tuple[str, bool]:
    """A number as a decimal without exponent or trailing zeros, and whether it is exact; else with nine digits."""
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    exact = rest == 1
    digits = max(twos, fives) if exact else _DIGITS
    scaled = round(value * 10**digits)
    whole, part = divmod(abs(scaled), 10**digits)
    sign = "-" if scaled < 0 else ""
    return f"{sign}{whole}.{part:0{digits}d}" if digits else f"{sign}{whole}", exact
