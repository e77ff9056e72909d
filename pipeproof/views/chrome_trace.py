"""A timeline as Chrome trace JSON, which https://ui.perfetto.dev and chrome://tracing open.

One process per rank, one thread per queue (the compute queue first), one
complete event per span, a flow arrow from each send to the arrival of its
message, and a counter of the activations that each rank holds.

Times are microseconds since the first start, with three digits: viewers store
whole nanoseconds. Both ends of a span are rounded and its duration is their
difference: neighbouring slices never overlap.

A viewer turns an arrow around if its head is on a slice that begins before
the tail's, and a receive is posted early. So each arrow leads to a mark of no
length at the end of the receive, in the category ``arrival``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.atomic_write import write_output
from pipeproof.schedule.formats.op_text import kinds_of
from pipeproof.schedule.ops import COLLECTIVE_KINDS, COMPUTE_KINDS, PART_KINDS, SEND_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Time, Timeline
from pipeproof.views.memory_curves import Curve, all_curves

_Event = str
"""An event written out. A dict for each and its encoding would take most of the time of a large file."""
_SEND, _ARRIVAL, _SLICE, _COUNTER = range(4)
"""Order of events at one time. A viewer binds an arrow to the slice that was opened last on the thread when it
reads the arrow: a tail must follow its send, and a head must come before the next slice of its thread."""

_NOTHING: Mapping[str, str] = MappingProxyType({})

ARRIVAL = "arrival"
"""The category of the marks that arrows lead to; they are not operations."""


def trace_json(timeline: Timeline, curves: Sequence[Curve] = (), about: Mapping[str, str] = _NOTHING) -> str:
    """The trace file's text, one event a line; the same bytes for the same timeline. ``curves`` are counters, too.

    ``about`` is added to ``otherData``, such as the origin of the times.

    First the names of processes and threads, then slices, arrows and counters
    by time. Spans of no length are left out, except compute and transfers.
    """
    slices = Slices(timeline)
    threads = _threads(slices)
    timed = [*_slices(slices, threads), *_arrows(slices, threads), *_counters(slices, all_curves(timeline, curves))]
    timed.sort(key=itemgetter(0))
    lines = ",\n".join([*_names(slices, threads), *(event for _, event in timed)])
    other = json.dumps({"clock": timeline.clock, **about}, separators=(",", ":"))
    return f'{{"traceEvents":[\n{lines}\n],"displayTimeUnit":"ns","otherData":{other}}}\n'


def write_trace(
    timeline: Timeline, path: Path, curves: Sequence[Curve] = (), about: Mapping[str, str] = _NOTHING
) -> None:
    """Write the file of ``trace_json``; an existing file is overwritten.

    Raises:
        OSError: the file cannot be written.
    """
    write_output(path, trace_json(timeline, curves, about))


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
    """Row, time and content of each operation of a timeline."""

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
        """The drawn spans: all except spans of no length that are not computations or transfers."""
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
        """A time since the timeline's first start, rounded half to even, as viewers store it.

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
        keys = ((step, ids) for step in sorted({step for step, _ in transfers}) for ids in self.timeline.matches)
        ends = ((transfers.get((step, send)), transfers.get((step, recv))) for step, (send, recv) in keys)
        return tuple((send, recv) for send, recv in ends if send is not None and recv is not None)


_Key = tuple[int, int, int, int, int, int, int]
"""(time, order at one time, process, thread, step, op id, slice before its arrow)."""
_Threads = Mapping[Queue, int]


def _threads(slices: Slices) -> _Threads:
    result: dict[Queue, int] = {}
    counts = [0] * len(slices.timeline.ranks)
    for rank, queue in slices.queues:
        result[rank, queue] = counts[rank]
        counts[rank] += 1
    return result


def _names(slices: Slices, threads: _Threads) -> Iterator[_Event]:
    for rank, name in enumerate(slices.rank_names):
        yield _metadata("process_name", rank, 0, {"name": name})
        yield _metadata("process_sort_index", rank, 0, {"sort_index": rank})
    for (rank, queue), thread in threads.items():
        yield _metadata("thread_name", rank, thread, {"name": queue})
        yield _metadata("thread_sort_index", rank, thread, {"sort_index": thread})


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> _Event:
    return _written({"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args})


def _written(event: dict[str, Any]) -> _Event:
    return json.dumps(event, separators=(",", ":"))


def _slices(slices: Slices, threads: _Threads) -> Iterator[tuple[_Key, _Event]]:
    for span in slices.shown:
        start, end = slices.nanoseconds(span.start), slices.nanoseconds(span.end)
        thread = threads[span.rank, span.queue]
        phase = _SEND if slices.kinds[span.op] in SEND_KINDS else _SLICE
        what = f'"name":"{span.op}","cat":"{slices.category(span)}","ph":"X"'
        where = f'"pid":{span.rank},"tid":{thread},"ts":{start / 1000},"dur":{(end - start) / 1000}'
        yield (
            (start, phase, span.rank, thread, span.step, span.op_id, 0),
            f'{{{what},{where},"args":{{"op_id":{span.op_id},"step":{span.step}}}}}',
        )


def _arrows(slices: Slices, threads: _Threads) -> Iterator[tuple[_Key, _Event]]:
    for number, (send, recv) in enumerate(slices.messages):
        sent, begun, arrived = (slices.nanoseconds(time) for time in (send.start, recv.start, recv.end))
        tail, head = threads[send.rank, send.queue], threads[recv.rank, recv.queue]
        common = f'"name":"message","cat":"message","id":{number}'
        yield (
            (sent, _SEND, send.rank, tail, send.step, send.op_id, 1),
            f'{{{common},"ph":"s","pid":{send.rank},"tid":{tail},"ts":{sent / 1000}}}',
        )
        # A receive of no length is written at the time of the arrival, which must follow it.
        phase = _SLICE if begun == arrived else _ARRIVAL
        what = f'"name":"{recv.op} is there","cat":"{ARRIVAL}","ph":"X"'
        where = f'"pid":{recv.rank},"tid":{head},"ts":{arrived / 1000}'
        about = f'"args":{{"op_id":{recv.op_id},"step":{recv.step}}}'
        yield (
            (arrived, phase, recv.rank, head, recv.step, recv.op_id, 1),
            f'{{{what},{where},"dur":0,{about}}}',
        )
        yield (
            (arrived, phase, recv.rank, head, recv.step, recv.op_id, 2),
            f'{{{common},"ph":"f","bp":"e",{where}}}',
        )


def _counters(slices: Slices, curves: Sequence[Curve]) -> Iterator[tuple[_Key, _Event]]:
    for index, curve in enumerate(curves):
        for rank, steps in enumerate(curve.ranks):
            for time, value in steps:
                at = slices.nanoseconds(time)
                event = {"name": curve.name, "ph": "C", "pid": rank, "ts": at / 1000, "args": {curve.unit: value}}
                yield (at, _COUNTER, rank, index, 0, 0, 0), _written(event)
