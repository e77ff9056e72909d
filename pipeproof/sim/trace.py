"""A timeline as Chrome trace JSON, which https://ui.perfetto.dev and chrome://tracing open.

One process per rank, one thread per queue (the compute queue first), one
complete event per span, and a flow arrow from each send to its receive.

Times are microseconds since the first start, with three digits: whole
nanoseconds is what viewers store. Both ends of a span are rounded and its
duration is their difference, so that neighbouring slices never come to overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from pipeproof.schedule.ops import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    OpKind,
    parse_op,
)
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Timeline

_Event = dict[str, Any]
_SEND, _ARROW_HEAD, _SLICE = range(3)
"""Order of events at one time. A viewer binds an arrow to the slice that is open on the thread when it
reads the arrow: a tail must follow its send, and a head must come before the next slice of its thread."""


def trace_json(timeline: Timeline) -> str:
    """The trace file's text, one event a line; the same bytes for the same timeline."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace_events(timeline))
    other = json.dumps({"clock": timeline.clock}, separators=(",", ":"))
    return f'{{"traceEvents":[\n{lines}\n],"displayTimeUnit":"ns","otherData":{other}}}\n'


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace file, overwriting what is there.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(trace_json(timeline), encoding="utf-8", newline="\n")


def trace_events(timeline: Timeline) -> list[_Event]:
    """The events in file order: the names of processes and threads, then slices and arrows by time.

    Spans of no length are left out, except compute and transfers.
    """
    threads = _threads(timeline)
    spans = [span for span in timeline.spans if _says_something(span)]
    timed = [*_slices(timeline, spans, threads), *_arrows(timeline, spans, threads)]
    timed.sort(key=itemgetter(0))
    return [*_names(timeline, threads), *(event for _, event in timed)]


_Key = tuple[int, int, int, int, int, int, int]
"""(time, order at one time, process, thread, step, op id, slice before its arrow)."""
_Threads = dict[tuple[int, str], int]


def _threads(timeline: Timeline) -> _Threads:
    """(rank, queue) to thread id: 0 is the compute queue, then the channels by label."""
    queues = sorted({(span.rank, span.queue != COMPUTE_QUEUE, span.queue) for span in timeline.spans})
    result: _Threads = {}
    counts = [0] * len(timeline.ranks)
    for rank, _, queue in queues:
        result[rank, queue] = counts[rank]
        counts[rank] += 1
    return result


def _names(timeline: Timeline, threads: _Threads) -> Iterator[_Event]:
    used_axes = {axis for coords in timeline.ranks for axis, place in coords.items() if place > 0}
    for rank, coords in enumerate(timeline.ranks):
        where = ", ".join(f"{axis} {place}" for axis, place in coords.items() if axis in used_axes)
        name = f"rank {rank} ({where})" if where else f"rank {rank}"
        yield _metadata("process_name", rank, 0, {"name": name})
        yield _metadata("process_sort_index", rank, 0, {"sort_index": rank})
    for (rank, queue), thread in threads.items():
        yield _metadata("thread_name", rank, thread, {"name": queue})
        yield _metadata("thread_sort_index", rank, thread, {"sort_index": thread})


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> _Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _slices(timeline: Timeline, spans: Iterable[Span], threads: _Threads) -> Iterator[tuple[_Key, _Event]]:
    for span in spans:
        start, end = _nanoseconds(timeline, span)
        kind = parse_op(span.op).kind
        thread = threads[span.rank, span.queue]
        phase = _SEND if kind in SEND_KINDS else _SLICE
        yield (
            (start, phase, span.rank, thread, span.step, span.op_id, 0),
            {
                "name": span.op,
                "cat": _category(kind),
                "ph": "X",
                "pid": span.rank,
                "tid": thread,
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "args": {"op_id": span.op_id, "step": span.step},
            },
        )


def _arrows(timeline: Timeline, spans: Iterable[Span], threads: _Threads) -> Iterator[tuple[_Key, _Event]]:
    transfers = {(span.step, span.op_id): span for span in spans if span.queue != COMPUTE_QUEUE}
    number = 0
    for step in sorted({step for step, _ in transfers}):
        for send_id, recv_id in timeline.matches:
            send, recv = transfers.get((step, send_id)), transfers.get((step, recv_id))
            if send is None or recv is None:
                continue
            sent, _ = _nanoseconds(timeline, send)
            begun, arrived = _nanoseconds(timeline, recv)
            tail, head = threads[send.rank, send.queue], threads[recv.rank, recv.queue]
            common = {"name": "message", "cat": "message", "id": number}
            number += 1
            yield (
                (sent, _SEND, send.rank, tail, step, send_id, 1),
                {**common, "ph": "s", "pid": send.rank, "tid": tail, "ts": sent / 1000},
            )
            # A receive of no length is written at the time of the head, which must follow it.
            place = _SLICE if begun == arrived else _ARROW_HEAD
            yield (
                (arrived, place, recv.rank, head, step, recv_id, 1),
                {**common, "ph": "f", "bp": "e", "pid": recv.rank, "tid": head, "ts": arrived / 1000},
            )


def _nanoseconds(timeline: Timeline, span: Span) -> tuple[int, int]:
    """Start and end since the timeline's first start, each rounded."""
    first = timeline.first_start
    return round(timeline.us(span.start - first) * 1000), round(timeline.us(span.end - first) * 1000)


def _says_something(span: Span) -> bool:
    return span.start != span.end or span.queue != COMPUTE_QUEUE or parse_op(span.op).kind in COMPUTE_KINDS


def _category(kind: OpKind) -> str:
    if kind in COMPUTE_KINDS:
        return "compute"
    if kind in SEND_KINDS or kind in RECV_KINDS:
        return "transfer"
    if kind in COLLECTIVE_KINDS:
        return "collective"
    return "wait" if kind is OpKind.WAIT else "other"
