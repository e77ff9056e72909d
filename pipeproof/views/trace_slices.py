"""Slices of trace files, in any format: row, time and content of each operation of a timeline."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType

from pipeproof.atomic_write import output_file
from pipeproof.schedule.formats.op_text import kinds_of
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    PART_KINDS,
    TRANSFER_KINDS,
    UPDATE_KINDS,
    Op,
    OpKind,
    parse_op,
)
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Time, Timeline
from pipeproof.specs.axis_layout import dtype_bytes

_MOVING_KINDS = TRANSFER_KINDS | COLLECTIVE_KINDS | UPDATE_KINDS

Queue = tuple[int, str]
"""A rank, and the name of one of its queues."""


def _category(kind: OpKind) -> str:
    if kind in COMPUTE_KINDS | PART_KINDS:
        return "compute"
    if kind in TRANSFER_KINDS:
        return "transfer"
    if kind in COLLECTIVE_KINDS:
        return "collective"
    return "wait" if kind is OpKind.WAIT else "other"


_CATEGORIES: Mapping[OpKind, str] = MappingProxyType({kind: _category(kind) for kind in OpKind})


def _is_short(span: Span) -> bool:
    """True if it has no length; equal times are mostly one object, and fractions are slow to compare."""
    return span.start is span.end or span.start == span.end


class Slices:
    """A timeline for writing trace files; ``graph``, where it is at hand, adds bytes."""

    def __init__(self, timeline: Timeline, graph: OpGraph | None = None) -> None:
        self.timeline, self.graph = timeline, graph
        self._origin = timeline.first_start.as_integer_ratio()
        self._tick_ns = (timeline.tick_us * 1000).as_integer_ratio()
        self._us: dict[Time, Fraction] = {}

    @cached_property
    def ops(self) -> Mapping[str, Op]:
        """Each operation by its text."""
        return {text: parse_op(text) for text in {span.op for span in self.timeline.spans}}

    @cached_property
    def kinds(self) -> Mapping[str, OpKind]:
        """The kind of each operation by its text, for those who need no more of it."""
        texts = [span.op for span in self.timeline.spans]
        return dict(zip(texts, kinds_of(texts), strict=True))

    @cached_property
    def shown(self) -> tuple[Span, ...]:
        """The spans that are drawn: all but those of no length, computations and transfers excepted."""
        return tuple(
            span
            for span in self.timeline.spans
            if span.queue != COMPUTE_QUEUE or self.kinds[span.op] in COMPUTE_KINDS or not _is_short(span)
        )

    @cached_property
    def queues(self) -> tuple[Queue, ...]:
        """The queues of each rank in order: the compute queue, then the channels by their labels."""
        found = {(span.rank, span.queue != COMPUTE_QUEUE, span.queue) for span in self.timeline.spans}
        return tuple((rank, queue) for rank, _, queue in sorted(found))

    @cached_property
    def rank_names(self) -> tuple[str, ...]:
        """``rank 3 (pp 1, tp 1)``, with the axes on which ranks differ."""
        ranks = self.timeline.ranks
        used = {axis for coords in ranks for axis, place in coords.items() if place > 0}
        names = []
        for rank, coords in enumerate(ranks):
            where = ", ".join(f"{axis} {place}" for axis, place in coords.items() if axis in used)
            names.append(f"rank {rank} ({where})" if where else f"rank {rank}")
        return tuple(names)

    def category(self, span: Span) -> str:
        """``compute``, ``transfer``, ``collective``, ``wait`` or ``other``."""
        return _CATEGORIES[self.kinds[span.op]]

    def nanoseconds(self, time: Time) -> int:
        """A time since the timeline's first start, rounded half to even: what viewers store.

        That is ``round`` of an exact fraction, in integers: there are two times for each of up to millions of spans.
        """
        (above, below), (first, first_below), (tick, tick_below) = time.as_integer_ratio(), self._origin, self._tick_ns
        above, below = (above * first_below - first * below) * tick, below * first_below * tick_below
        whole, rest = divmod(above, below)
        return whole + (2 * rest > below or (2 * rest == below and whole % 2 == 1))

    def us(self, time: Time) -> Fraction:
        """A time since the timeline's first start, in exact microseconds."""
        known = self._us.get(time)
        if known is None:
            known = self._us[time] = self.timeline.us(time) - self._first
        return known

    @cached_property
    def _first(self) -> Fraction:
        return self.timeline.us(self.timeline.first_start)

    def bytes_of(self, span: Span) -> int | None:
        """Bytes that a transfer or collective moves of its rank's own tensor; None if unknown."""
        graph, op_id = self.graph, span.op_id
        if graph is None or self.ops[span.op].kind not in _MOVING_KINDS or graph.tensor[op_id] == NONE:
            return None
        dtype = graph.tensors[int(graph.tensor[op_id])].dtype
        return int(graph.stop[op_id] - graph.start[op_id]) * dtype_bytes(dtype)

    @cached_property
    def messages(self) -> tuple[tuple[Span, Span], ...]:
        """(send, receive) of each message, by step."""
        transfers = {(span.step, span.op_id): span for span in self.timeline.spans if span.queue != COMPUTE_QUEUE}
        found = []
        for step in sorted({step for step, _ in transfers}):
            for send_id, recv_id in self.timeline.matches:
                send, recv = transfers.get((step, send_id)), transfers.get((step, recv_id))
                if send is not None and recv is not None:
                    found.append((send, recv))
        return tuple(found)

    @cached_property
    def peer_of(self) -> Mapping[tuple[int, int], int]:
        """The rank at the other end of a transfer, by (step, op id)."""
        return {(one.step, one.op_id): other.rank for pair in self.messages for one, other in (pair, pair[::-1])}


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
