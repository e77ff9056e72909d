"""Slices of trace files, in any format: row, time and content of each operation of a timeline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType

from pipeproof.schedule.formats.op_text import kinds_of
from pipeproof.schedule.ops import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    PART_KINDS,
    TRANSFER_KINDS,
    OpKind,
)
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Time, Timeline

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
    """A timeline for writing trace files."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._origin = timeline.first_start.as_integer_ratio()
        self._tick_ns = (timeline.tick_us * 1000).as_integer_ratio()

    @cached_property
    def kinds(self) -> Mapping[str, OpKind]:
        """The kind of each operation by its text."""
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
        keys = {(span.rank, span.queue != COMPUTE_QUEUE, span.queue) for span in self.timeline.spans}
        return tuple((rank, queue) for rank, _, queue in sorted(keys))

    @cached_property
    def rank_names(self) -> tuple[str, ...]:
        """``rank 3 (pp 1, tp 1)``, with the axes on which ranks differ."""
        ranks = self.timeline.ranks
        used = {axis for coords in ranks for axis, coord in coords.items() if coord > 0}
        names = []
        for rank, coords in enumerate(ranks):
            where = ", ".join(f"{axis} {coord}" for axis, coord in coords.items() if axis in used)
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

    @cached_property
    def messages(self) -> tuple[tuple[Span, Span], ...]:
        """(send, receive) of each message, by step."""
        transfers = {(span.step, span.op_id): span for span in self.timeline.spans if span.queue != COMPUTE_QUEUE}
        pairs = []
        for step in sorted({step for step, _ in transfers}):
            for send_id, recv_id in self.timeline.matches:
                send, recv = transfers.get((step, send_id)), transfers.get((step, recv_id))
                if send is not None and recv is not None:
                    pairs.append((send, recv))
        return tuple(pairs)
