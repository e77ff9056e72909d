"""Writes the page: one HTML file with its style, its script and the data, which loads nothing from anywhere.

A timeline is the columns that the page draws: typed arrays in base64, each as narrow as its values allow. Spans are
grouped by *track*. A lane (a queue of a rank) has one track, and a further one for spans that overlap others or lie
inside them: the spans of a track follow each other in time, and the page finds visible spans by binary search.
Times are microseconds since the first start, as doubles.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from html import escape
from importlib.resources import files
from math import lcm
from string import Template
from typing import Any

import numpy as np

from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    PART_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    TRANSFER_KINDS,
    Op,
    OpKind,
)
from pipeproof.sim.timeline import COMPUTE_QUEUE, Time, Timeline
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.views.html.relations import Cause, Relations, cause, critical_path, idle_times
from pipeproof.views.memory_curves import Curve, Steps, activations_held

_SCRIPTS = ("data.js", "layout.js", "draw.js", "units.js", "describe.js", "numbers.js", "app.js")
"""In the order in which they need each other; together they are one script."""


def timeline_html(
    title: str, timeline: Timeline, graph: OpGraph, held: Curve | None = None, mfu: float | None = None
) -> str:
    """The text of the page; the same bytes for the same timeline. Arguments are as in ``payload``.

    Raises:
        ValueError: it has operations that its graph does not have.
    """
    parts = files(__package__)
    data = {"categories": CATEGORIES, "timelines": [payload(title, timeline, graph, held, mfu)]}
    script = "\n".join((parts / "page" / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return Template((parts / "page" / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        style=(parts / "page" / "page.css").read_text(encoding="utf-8"),
        script=script,
        # a browser ends a script at the first `</`, in strings too
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )


CATEGORIES = ("F", "B", "I", "W", "send", "recv", "wait", "collective", "other")
"""Categories with a colour of their own on the page; a span's category is an index into this."""

_WIDTHS = (("u8", np.uint8), ("u16", np.uint16), ("u32", np.uint32))


def payload(
    title: str, timeline: Timeline, graph: OpGraph, held: Curve | None = None, mfu: float | None = None
) -> dict[str, Any]:
    """Data of one timeline for the page, ready for JSON.

    ``graph`` adds bytes and members of collectives. ``held`` is drawn below
    each rank, in times of ``timeline``; without it, the activations held.
    ``mfu`` is the model FLOPs utilization of the step, a share of 1, if
    known.

    Raises:
        ValueError: ``timeline`` has an op that ``graph`` does not have, or ``held`` has not one entry for each rank.
    """
    held = activations_held(timeline) if held is None else held
    if len(held.ranks) != len(timeline.ranks):
        raise ValueError(f"{held.name}: {len(held.ranks)} curves for {len(timeline.ranks)} ranks")
    curves = [{"time": _times(timeline, [at for at, _ in steps]), "count": _counts(steps)} for steps in held.ranks]
    if any(not 0 <= span.op_id < graph.num_ops for span in timeline.spans):
        raise ValueError(f"{title}: the timeline has operations that its graph does not have")
    timeline = _in_ticks(timeline)
    relations = Relations(timeline, graph)
    shown = [i for i in range(len(timeline.spans)) if _is_shown(relations, i)]
    lanes = sorted({(s.rank, s.queue != COMPUTE_QUEUE, s.queue) for s in (relations.spans[i] for i in shown)})
    tracks = _tracks(relations, shown)
    keys = sorted(tracks)
    order = [i for key in keys for i in tracks[key]]
    positions = {i: at for at, i in enumerate(order)}
    lane_place = {lane: at for at, lane in enumerate(lanes)}
    names = sorted({relations.spans[i].op for i in order})
    name_place = {name: at for at, name in enumerate(names)}
    chunks = [{stage: at for at, stage in enumerate(timeline.stages(rank))} for rank in range(len(timeline.ranks))]
    path = critical_path(relations)
    worked = [part for part in path if part.source is None and part.end > part.begin]
    on_path = {part.span for part in worked} | {j for p in path if p.source is not None for j in (p.span, p.source)}
    return {
        "title": title,
        "clock": timeline.clock,
        "makespan": float(timeline.makespan_us),
        "mfu": mfu,
        "ranks": _ranks(timeline),
        "lanes": [[rank, queue] for rank, _, queue in lanes],
        "tracks": [[lane_place[lane], depth] for lane, depth in keys],
        "offsets": _narrow([0, *np.cumsum([len(tracks[key]) for key in keys]).tolist()]),
        "start": _times(timeline, [relations.spans[i].start for i in order]),
        "end": _times(timeline, [relations.spans[i].end for i in order]),
        "category": _narrow([_category(relations.ops[i]) for i in order]),
        "chunk": _narrow([chunks[relations.spans[i].rank].get(relations.ops[i].stage, 0) for i in order]),
        "names": names,
        "name": _narrow([name_place[relations.spans[i].op] for i in order]),
        "step": _narrow([relations.spans[i].step for i in order]),
        "bytes": _doubles([_bytes_of(graph, relations, i) for i in order]),
        "critical": _narrow([i in on_path for i in order]),
        "path": {
            "span": _narrow([positions[part.span] for part in worked]),
            "start": _times(timeline, [part.begin for part in worked]),
            "end": _times(timeline, [part.end for part in worked]),
        },
        "causes": _causes(relations, positions, order),
        "arrows": _arrows(relations, positions, {(part.source, part.span) for part in path}),
        "idle": _idle(timeline, relations),
        "held": curves,
        "held_unit": held.unit,
    }


def _in_ticks(timeline: Timeline) -> Timeline:
    """The timeline with fractional times as whole numbers of shorter ticks: exact, and much faster to compare."""
    times = {time for span in timeline.spans for time in (span.start, span.end)}
    if not all(isinstance(time, int | Fraction) for time in times):
        return timeline
    scale = lcm(*(time.denominator for time in times if not isinstance(time, float)))
    ticks = {time: int(time * scale) for time in times}
    spans = tuple(replace(span, start=ticks[span.start], end=ticks[span.end]) for span in timeline.spans)
    return replace(timeline, spans=spans, tick_us=timeline.tick_us / scale)


def _is_shown(relations: Relations, i: int) -> bool:
    span = relations.spans[i]
    return span.start != span.end or span.queue != COMPUTE_QUEUE or relations.ops[i].kind in COMPUTE_KINDS


def _ranks(timeline: Timeline) -> list[dict[str, Any]]:
    used = [axis for axis in timeline.ranks[0] if any(coords[axis] for coords in timeline.ranks)]
    return [
        {
            "name": " ".join([f"rank {rank}", *(f"{axis}{coords[axis]}" for axis in used)]),
            "busy": float(timeline.busy_us(rank)),
            "stages": list(timeline.stages(rank)),
            "peak": timeline.peak_activations(rank),
        }
        for rank, coords in enumerate(timeline.ranks)
    ]


_Lane = tuple[int, bool, str]


def _tracks(relations: Relations, shown: Sequence[int]) -> dict[tuple[_Lane, int], list[int]]:
    """(lane, depth) to spans in order of time, without overlaps."""
    spans = relations.spans
    by_lane = grouped(((spans[i].rank, spans[i].queue != COMPUTE_QUEUE, spans[i].queue), i) for i in shown)
    tracks: dict[tuple[_Lane, int], list[int]] = {}
    for lane, mine in by_lane.items():
        # longer spans come first: spans inside them are drawn over them
        mine.sort(key=lambda i: (spans[i].start, -(spans[i].end - spans[i].start), spans[i].step, spans[i].op_id))
        free_at: list[Time] = []
        for i in mine:
            depth = next((d for d, time in enumerate(free_at) if time <= spans[i].start), len(free_at))
            if depth == len(free_at):
                free_at.append(spans[i].end)
            free_at[depth] = spans[i].end
            tracks.setdefault((lane, depth), []).append(i)
    return tracks


def _category(op: Op) -> int:
    kind = op.kind
    if kind in COMPUTE_KINDS:
        return CATEGORIES.index(kind.value)
    if kind in PART_KINDS and op.target is not None:
        return CATEGORIES.index("W" if kind is OpKind.WEIGHTS else op.target.kind.value)
    if kind in SEND_KINDS:
        return CATEGORIES.index("send")
    if kind in RECV_KINDS:
        return CATEGORIES.index("recv")
    if kind is OpKind.WAIT:
        return CATEGORIES.index("wait")
    return CATEGORIES.index("collective" if kind in COLLECTIVE_KINDS else "other")


def _bytes_of(graph: OpGraph, relations: Relations, i: int) -> int:
    """Bytes that a transfer or collective of one rank moves, -1 if unknown."""
    op_id, kind = relations.spans[i].op_id, relations.ops[i].kind
    if kind not in TRANSFER_KINDS | COLLECTIVE_KINDS or graph.tensor[op_id] == NONE:
        return -1
    dtype = graph.tensors[int(graph.tensor[op_id])].dtype
    return int(graph.stop[op_id] - graph.start[op_id]) * dtype_bytes(dtype)


def _causes(relations: Relations, positions: dict[int, int], order: Sequence[int]) -> dict[str, dict[str, str]]:
    """The causes of each span, as index plus 1, or 0; spans that are not drawn are skipped."""
    causes = [cause(relations, i) for i in order]
    return {
        "source": _narrow([0 if source is None else positions.get(source, -1) + 1 for source, _ in causes]),
        "before": _narrow([_first_drawn(relations, positions, before) + 1 for _, before in causes]),
    }


def _first_drawn(relations: Relations, positions: dict[int, int], i: int | None) -> int:
    """The index of the first drawn span from i back, -1 without one."""
    seen: set[int] = set()  # a measured clock may run backwards between ranks
    while i is not None and i not in positions and i not in seen:
        seen.add(i)
        _, i = cause(relations, i)
    return -1 if i is None else positions.get(i, -1)


def _arrows(
    relations: Relations, positions: dict[int, int], on_path: set[tuple[int | None, int]]
) -> dict[str, dict[str, str]]:
    """Messages from send to receive, and whether the critical path goes along them in either direction."""
    pairs = [
        (i, other)
        for i in positions
        if relations.ops[i].kind in SEND_KINDS and (other := relations.partner(i)) is not None and other in positions
    ]
    pairs.sort(key=lambda pair: (relations.spans[pair[0]].start, positions[pair[0]]))
    return {
        "from": _narrow([positions[send] for send, _ in pairs]),
        "to": _narrow([positions[recv] for _, recv in pairs]),
        "critical": _narrow([pair in on_path or pair[::-1] in on_path for pair in pairs]),
    }


def _idle(timeline: Timeline, relations: Relations) -> dict[str, Any]:
    idles = idle_times(relations, len(timeline.ranks))
    counts = np.bincount([idle.rank for idle in idles], minlength=len(timeline.ranks))
    assert max(Cause) < np.iinfo(np.uint8).max
    return {
        "offsets": _narrow([0, *np.cumsum(counts).tolist()]),
        "start": _times(timeline, [idle.start for idle in idles]),
        "end": _times(timeline, [idle.end for idle in idles]),
        "cause": _narrow([idle.cause for idle in idles]),
        "peer": _narrow([0 if idle.peer is None else idle.peer + 1 for idle in idles]),
    }


def _counts(steps: Steps) -> dict[str, str]:
    return _doubles([float(value) for _, value in steps])


def _times(timeline: Timeline, times: Sequence[Time]) -> dict[str, str]:
    """Microseconds since the first start, each rounded once."""
    first, numerator, denominator = timeline.first_start, timeline.tick_us.numerator, timeline.tick_us.denominator
    return _doubles([float((time - first) * numerator / denominator) for time in times])


def _doubles(values: Sequence[float]) -> dict[str, str]:
    return _column("f64", np.asarray(values, dtype="<f8"))


def _narrow(values: Sequence[int]) -> dict[str, str]:
    """Counts and indices (not negative) in the narrowest type that holds them."""
    column = np.asarray(values, dtype=np.int64)
    most = int(column.max(initial=0))
    name, dtype = next((name, dtype) for name, dtype in _WIDTHS if most <= np.iinfo(dtype).max)
    return _column(name, column.astype(np.dtype(dtype).newbyteorder("<")))


def _column(name: str, values: Any) -> dict[str, str]:
    return {"type": name, "data": base64.b64encode(values.tobytes()).decode("ascii")}
