"""A timeline as the columns that the page draws: typed arrays in base64, each as narrow as its values allow.

Spans are grouped by *track*. A lane (a queue of a rank) has one track, and a
further one for spans that overlap others or lie inside them, so that the
spans of a track follow each other in time and the page finds what is visible
by binary search. Times are microseconds since the first start, as doubles.
"""

from __future__ import annotations

import base64
from collections import defaultdict

# --- The critical path of a timeline: the chain of work and messages that its makespan consists of ---
# It is walked back from the last end. What an operation follows is what ended
# last of all that it had to wait for: the operation before it on its rank, the
# transfer before it on its queue, the part before it of its computation, the
# other end of a message, or the last member to come to a collective. The first collective inside a computation
# follows the work of that. On simulated timelines the parts then abut
# exactly; on measured ones there are gaps where clocks and hosts have theirs.
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np

from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    PART_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    TRANSFER_KINDS,
    UPDATE_KINDS,
    Op,
    OpKind,
)
from pipeproof.sim.timeline import COMPUTE_QUEUE, Time, Timeline
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.views.html.relations import Relations
from pipeproof.views.memory_curves import Curve, Steps, activations_held

# --- The bubbles of each rank, and what each of them is due to ---
# A rank is idle where it runs nothing on its compute queue. Before its first
# computation of a step that is warm-up, after its last one cool-down; between
# them it waits for a message, in a collective for its last member, or is held
# up by something that the timeline does not show. A reduction of gradients is
# nothing but the collectives inside it.


class Cause(IntEnum):
    """Why a rank is idle; the value is its code in the page."""

    WARM_UP = 0
    MESSAGE = 1
    COLLECTIVE = 2
    COOL_DOWN = 3
    OTHER = 4


@dataclass(frozen=True, slots=True)
class Idle:
    """A stretch of idle time of one rank, in ticks; ``peer`` is the rank that it waits for, where that is known."""

    rank: int
    start: Time
    end: Time
    cause: Cause
    peer: int | None = None


def idle_times(relations: Relations, num_ranks: int) -> tuple[Idle, ...]:
    """All bubbles, by rank and time. On each rank and in each step they and the work fill the step exactly."""
    spans = relations.spans
    steps: dict[int, tuple[Time, Time]] = {}
    host: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, span in enumerate(spans):
        begin, end = steps.get(span.step, (span.start, span.end))
        steps[span.step] = min(begin, span.start), max(end, span.end)
        is_shown = span.end > span.start and relations.ops[i].kind not in UPDATE_KINDS
        if span.queue == COMPUTE_QUEUE and is_shown:
            host[span.rank, span.step].append(i)
    result: list[Idle] = []
    for rank in range(num_ranks):
        for step in sorted(steps):
            mine = sorted(host[rank, step], key=lambda i: (spans[i].start, spans[i].end))
            result += _merged(_of_step(relations, rank, mine, *steps[step]))
    return tuple(result)


def _of_step(relations: Relations, rank: int, mine: list[int], begin: Time, end: Time) -> Iterator[Idle]:
    spans, ops = relations.spans, relations.ops
    computes = [i for i in mine if ops[i].kind in COMPUTE_KINDS]
    first = min((spans[i].start for i in computes), default=end)
    last = max((spans[i].end for i in computes), default=end)
    edges = sorted({begin, first, last, end})
    for left, right in pairwise(edges):
        for idle in _gaps(relations, rank, mine, left, right):
            if idle.end <= first:
                yield replace(idle, cause=Cause.WARM_UP)
            elif idle.start >= last:
                yield replace(idle, cause=Cause.COOL_DOWN)
            else:
                yield idle


def _gaps(relations: Relations, rank: int, mine: list[int], begin: Time, end: Time) -> Iterator[Idle]:
    """Idle intervals of a rank from ``begin`` to ``end``, split where the cause changes."""
    at = begin
    for i in mine:
        span = relations.spans[i]
        start, stop = max(span.start, at), min(span.end, end)
        if start >= stop:
            continue
        if start > at:
            yield _held(relations, rank, at, start, before=i)
        idle = _waiting(relations, i, start, stop)
        if idle is not None:
            yield idle
        at = stop
    if at < end:
        yield Idle(rank, at, end, Cause.OTHER)


def _waiting(relations: Relations, i: int, start: Time, end: Time) -> Idle | None:
    """The part of this time in which span i waits, with its reason; None where all of it is work."""
    span, kind = relations.spans[i], relations.ops[i].kind
    if kind is OpKind.WAIT:
        target = relations.waits_for(i)
        return Idle(span.rank, start, end, Cause.MESSAGE, _peer(relations, target))
    if kind in COLLECTIVE_KINDS:
        last = relations.last_to_come(i)
        if last is None:  # it came last itself
            return None if relations.knows_members else Idle(span.rank, start, end, Cause.COLLECTIVE)
        came = min(end, relations.spans[last].start)
        return Idle(span.rank, start, came, Cause.COLLECTIVE, relations.spans[last].rank) if came > start else None
    return None


def _held(relations: Relations, rank: int, start: Time, end: Time, *, before: int) -> Idle:
    """Idle time without a wait: the host may have been held by a transfer that it had posted."""
    transfer = relations.transfer_before(before)
    if transfer is not None and relations.spans[transfer].end == end and relations.spans[before].start == end:
        return Idle(rank, start, end, Cause.MESSAGE, _peer(relations, transfer))
    return Idle(rank, start, end, Cause.OTHER)


def _peer(relations: Relations, transfer: int | None) -> int | None:
    partner = None if transfer is None else relations.partner(transfer)
    return None if partner is None else relations.spans[partner].rank


def _merged(idles: Iterable[Idle]) -> list[Idle]:
    """Neighbours with one cause and peer as one."""
    result: list[Idle] = []
    for idle in idles:
        last = result[-1] if result else None
        if last is not None and (last.end, last.cause, last.peer) == (idle.start, idle.cause, idle.peer):
            result[-1] = replace(last, end=idle.end)
        else:
            result.append(idle)
    return result


@dataclass(frozen=True, slots=True)
class PathPart:
    """One part of the path: a span, by its place in the timeline, and the time that the path spends in it, in ticks.

    A message is the part of the receive, or of the send, that it ends; it
    begins when its other end, ``source``, was there.
    """

    span: int
    begin: Time
    end: Time
    source: int | None = None


def critical_path(relations: Relations) -> tuple[PathPart, ...]:
    """The parts of the path from the first to the last; empty for a timeline without spans. Linear in its length."""
    spans = relations.spans
    if not spans:
        return ()
    at: int | None = max(range(len(spans)), key=lambda i: (spans[i].end, -spans[i].rank, spans[i].op_id))
    parts: list[PathPart] = []
    seen: set[int] = set()  # a measured clock may run backwards between ranks; a path still has an end
    while at is not None and at not in seen:
        seen.add(at)
        part, before = _back(relations, at)
        parts.append(part)
        parent = relations.parent(at if part.source is None else part.source)
        if parent is not None and (before is None or spans[before].end <= spans[parent].start):
            parts.append(PathPart(parent, spans[parent].start, part.begin))  # its own work, up to its first collective
            seen.add(parent)
            before = _before(relations, parent)
        at = before
    return tuple(reversed(parts))


def cause(relations: Relations, i: int) -> tuple[int | None, int | None]:
    """(other end that span i waited for, span that had to end before both); None where there is none.

    From the second on, the chain of causes continues; it ends at the beginning of the step.
    """
    part, before = _back(relations, i)
    parent = relations.parent(i if part.source is None else part.source)
    if parent is not None and (before is None or relations.spans[before].end <= relations.spans[parent].start):
        before = parent
    return part.source, before


def _back(relations: Relations, i: int) -> tuple[PathPart, int | None]:
    """The part of the path that ends with span i, and the span that ends where the part begins."""
    spans, kind = relations.spans, relations.ops[i].kind
    span = spans[i]
    if kind in TRANSFER_KINDS:
        other = _held_by(relations, i)
        if other is None:
            return PathPart(i, span.start, span.end), _before(relations, i)
        return PathPart(i, spans[other].start, span.end, other), _before(relations, other)
    if kind is OpKind.WAIT:
        target = relations.waits_for(i)
        if target is not None and spans[target].end > span.start:
            return PathPart(i, min(spans[target].end, span.end), span.end), target
    last = relations.last_to_come(i)
    if last is not None:
        return PathPart(i, spans[last].start, span.end, last), _before(relations, last)
    return PathPart(i, span.start, span.end), _before(relations, i)


def _held_by(relations: Relations, i: int) -> int | None:
    """The other end of a transfer if this one ended late because of it."""
    other, span = relations.partner(i), relations.spans[i]
    if other is None or span.end == span.start:
        return None
    partner = relations.spans[other]
    arrived = relations.ops[i].kind in RECV_KINDS and partner.end < span.end
    return other if partner.start > span.start or arrived else None


def _before(relations: Relations, i: int) -> int | None:
    """The last to end among the operations that had to end before span i could begin."""
    spans, found = relations.spans, [relations.before_on_host(i), relations.part_before(i)]
    if spans[i].queue != COMPUTE_QUEUE:
        found.append(relations.before_on_queue(i))
    known = [j for j in found if j is not None]
    if all(spans[j].end < spans[i].start for j in known):  # the host may have been held by a transfer that it posted
        held = relations.transfer_before(i)
        known += [] if held is None else [held]
    return max(known, key=lambda j: spans[j].end, default=None)  # of equal ends the first, that is the host's


CATEGORIES = ("F", "B", "I", "W", "send", "recv", "wait", "collective", "other")
"""Categories with a colour of their own on the page; a span's category is an index into this."""

_WIDTHS = (("u8", np.uint8), ("u16", np.uint16), ("u32", np.uint32))


def payload(
    title: str, timeline: Timeline, graph: OpGraph | None, held: Curve | None = None, mfu: float | None = None
) -> dict[str, Any]:
    """Data of one timeline for the page, ready for JSON.

    ``graph`` adds bytes and members of collectives. ``held`` is drawn below
    each rank, in times of ``timeline``; without it, the activations held.
    ``mfu`` is the model FLOPs utilization of the step, a share of 1, where it
    is known.

    Raises:
        ValueError: ``timeline`` has an op that ``graph`` does not have, or ``held`` has not one entry for each rank.
    """
    held = activations_held(timeline) if held is None else held
    if len(held.ranks) != len(timeline.ranks):
        raise ValueError(f"{held.name}: {len(held.ranks)} curves for {len(timeline.ranks)} ranks")
    curves = [{"time": _times(timeline, [at for at, _ in steps]), "count": _counts(steps)} for steps in held.ranks]
    if graph is not None and any(not 0 <= span.op_id < graph.num_ops for span in timeline.spans):
        raise ValueError(f"{title}: the timeline has operations that its graph does not have")
    timeline = _in_ticks(timeline)
    relations = Relations(timeline, graph)
    shown = [i for i in range(len(timeline.spans)) if _is_shown(relations, i)]
    lanes = sorted({(s.rank, s.queue != COMPUTE_QUEUE, s.queue) for s in (relations.spans[i] for i in shown)})
    tracks = _tracks(relations, shown)
    keys = sorted(tracks)
    order = [i for key in keys for i in tracks[key]]
    place = {i: at for at, i in enumerate(order)}
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
            "span": _narrow([place[part.span] for part in worked]),
            "start": _times(timeline, [part.begin for part in worked]),
            "end": _times(timeline, [part.end for part in worked]),
        },
        "causes": _causes(relations, place, order),
        "arrows": _arrows(relations, place, {(part.source, part.span) for part in path}),
        "idle": _idle(timeline, relations),
        "held": curves,
        "held_unit": held.unit,
    }


def _in_ticks(timeline: Timeline) -> Timeline:
    """The same times as whole numbers of shorter ticks where they are fractions: as exact, and compared much faster."""
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
    """(lane, depth) to spans in order of time, none of which overlap."""
    spans = relations.spans
    by_lane: dict[_Lane, list[int]] = defaultdict(list)
    for i in shown:
        by_lane[spans[i].rank, spans[i].queue != COMPUTE_QUEUE, spans[i].queue].append(i)
    tracks: dict[tuple[_Lane, int], list[int]] = {}
    for lane, mine in by_lane.items():
        # what is longer comes first: what runs inside of it is drawn over it
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


def _bytes_of(graph: OpGraph | None, relations: Relations, i: int) -> int:
    """Bytes that a transfer or collective of one rank moves, -1 if unknown."""
    op_id, kind = relations.spans[i].op_id, relations.ops[i].kind
    if graph is None or kind not in TRANSFER_KINDS | COLLECTIVE_KINDS or graph.tensor[op_id] == NONE:
        return -1
    dtype = graph.tensors[int(graph.tensor[op_id])].dtype
    return int(graph.stop[op_id] - graph.start[op_id]) * dtype_bytes(dtype)


def _causes(relations: Relations, place: dict[int, int], order: Sequence[int]) -> dict[str, dict[str, str]]:
    """The causes of each span, as its place and 1, or 0; spans that are not drawn are passed over."""
    causes = [cause(relations, i) for i in order]
    return {
        "source": _narrow([0 if source is None else place.get(source, -1) + 1 for source, _ in causes]),
        "before": _narrow([_first_drawn(relations, place, before) + 1 for _, before in causes]),
    }


def _first_drawn(relations: Relations, place: dict[int, int], i: int | None) -> int:
    """The place of the first drawn span from i back, -1 without one."""
    seen: set[int] = set()  # a measured clock may run backwards between ranks
    while i is not None and i not in place and i not in seen:
        seen.add(i)
        _, i = cause(relations, i)
    return -1 if i is None else place.get(i, -1)


def _arrows(
    relations: Relations, place: dict[int, int], on_path: set[tuple[int | None, int]]
) -> dict[str, dict[str, str]]:
    """Messages from send to receive, and whether the critical path goes along them in either direction."""
    pairs = [
        (i, other)
        for i in place
        if relations.ops[i].kind in SEND_KINDS and (other := relations.partner(i)) is not None and other in place
    ]
    pairs.sort(key=lambda pair: (relations.spans[pair[0]].start, place[pair[0]]))
    return {
        "from": _narrow([place[send] for send, _ in pairs]),
        "to": _narrow([place[recv] for _, recv in pairs]),
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
    """Counts and places, none of them negative, in the narrowest type that holds them."""
    column = np.asarray(values, dtype=np.int64)
    most = int(column.max(initial=0))
    name, dtype = next((name, dtype) for name, dtype in _WIDTHS if most <= np.iinfo(dtype).max)
    return _column(name, column.astype(np.dtype(dtype).newbyteorder("<")))


def _column(name: str, values: Any) -> dict[str, str]:
    return {"type": name, "data": base64.b64encode(values.tobytes()).decode("ascii")}
