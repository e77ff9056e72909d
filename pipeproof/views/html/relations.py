"""Relations between the spans of a timeline, and their consequences: bubbles of ranks, and the critical path."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import (
    CHILD_KINDS,
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    RECV_KINDS,
    TRANSFER_KINDS,
    UPDATE_KINDS,
    Op,
    OpKind,
    parse_op,
)
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Time, Timeline

_Ends = list[tuple[Time, int, int, int]]
"""(end, step, op id, index of the span), sorted."""


class Relations:
    """Relations of spans, by their index in ``timeline.spans``; ``ops[i]`` is the operation of span i."""

    def __init__(self, timeline: Timeline, graph: OpGraph) -> None:
        self.spans: tuple[Span, ...] = timeline.spans
        parsed = {text: parse_op(text) for text in {span.op for span in self.spans}}
        self.ops: list[Op] = [parsed[span.op] for span in self.spans]
        self._graph = graph
        self._by_key = {(span.step, span.op_id): i for i, span in enumerate(self.spans)}
        self._partner_id = {one: other for pair in timeline.matches for one, other in (pair, pair[::-1])}

    def partner(self, i: int) -> int | None:
        """The span of a transfer's other end."""
        other = self._partner_id.get(self.spans[i].op_id)
        return None if other is None else self._by_key.get((self.spans[i].step, other))

    def waits_for(self, i: int) -> int | None:
        """Target of a WAIT if it is not on the rank's compute queue, such as a transfer; None otherwise."""
        span = self.spans[i]
        target = int(self._graph.waits_for[span.op_id])
        awaited = None if target == NONE else self._by_key.get((span.step, target))
        return awaited if awaited is not None and self.spans[awaited].queue != COMPUTE_QUEUE else None

    def part_before(self, i: int) -> int | None:
        """The part, or the exchange between parts, that span i follows in its computation."""
        before = int(self._graph.part_before[self.spans[i].op_id])
        return None if before == NONE else self._by_key.get((self.spans[i].step, before))

    def last_to_come(self, i: int) -> int | None:
        """The member of a collective that arrived last; None if i itself was the last."""
        if self.ops[i].kind not in COLLECTIVE_KINDS:
            return None
        span = self.spans[i]
        ids = self._members.get((int(self._graph.group[span.op_id]), int(self._graph.position[span.op_id])), [])
        members = [self._by_key[key] for op_id in ids if (key := (span.step, op_id)) in self._by_key]
        last = max(members, key=lambda j: (self.spans[j].start, -j), default=i)
        return last if self.spans[last].start > span.start else None

    def parent(self, i: int) -> int | None:
        """Computation or gradient reduction that contains a collective; None for other operations."""
        op, span = self.ops[i], self.spans[i]
        if op.kind not in CHILD_KINDS or op.target is None:
            return None
        return self._parents.get((span.step, span.rank, op.target))

    def before_on_host(self, i: int) -> int | None:
        """Last span to end on the rank's host before span i began, None for the first."""
        return self._before(self._queue_ends.get((self.spans[i].rank, COMPUTE_QUEUE), []), i)

    def before_on_queue(self, i: int) -> int | None:
        """Last span to end on a transfer's own queue before it began."""
        return self._before(self._queue_ends[self.spans[i].rank, self.spans[i].queue], i)

    def transfer_before(self, i: int) -> int | None:
        """Last to end among the rank's transfers that were posted before span i and ended before it began."""
        return self._before(self._transfer_ends.get(self.spans[i].rank, []), i)

    def _before(self, ends: _Ends, i: int) -> int | None:
        span = self.spans[i]
        index = bisect_left(ends, (span.start, span.step, span.op_id, -1))
        while index and (ends[index - 1][1], ends[index - 1][2]) >= (span.step, span.op_id):
            index -= 1
        return ends[index - 1][3] if index else None

    @cached_property
    def _queue_ends(self) -> dict[tuple[int, str], _Ends]:
        ends = grouped(((s.rank, s.queue), (s.end, s.step, s.op_id, i)) for i, s in enumerate(self.spans))
        return {queue: sorted(of_queue) for queue, of_queue in ends.items()}

    @cached_property
    def _transfer_ends(self) -> dict[int, _Ends]:
        queues = ((rank, ends) for (rank, queue), ends in self._queue_ends.items() if queue != COMPUTE_QUEUE)
        by_rank = grouped((rank, end) for rank, ends in queues for end in ends)
        return {rank: sorted(ends) for rank, ends in by_rank.items()}

    @cached_property
    def _parents(self) -> dict[tuple[int, int, Op], int]:
        """(step, rank, operation) to spans, for operations that may have collectives inside."""
        kinds = COMPUTE_KINDS | UPDATE_KINDS
        return {(s.step, s.rank, self.ops[i]): i for i, s in enumerate(self.spans) if self.ops[i].kind in kinds}

    @cached_property
    def _members(self) -> dict[tuple[int, int], list[int]]:
        """(group, index among its collectives) to op ids."""
        group, position = self._graph.group, self._graph.position
        return grouped(((int(group[i]), int(position[i])), i) for i in (group != NONE).nonzero()[0].tolist())


# --- The bubbles of each rank, and the cause of each ---
# A rank is idle while it runs nothing on its compute queue. Before its first
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
    """A stretch of idle time of one rank, in ticks; ``peer`` is the rank that it waits for, if known."""

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
    """The part of this time in which span i waits, with its reason; None if all of it is work."""
    span, kind = relations.spans[i], relations.ops[i].kind
    if kind is OpKind.WAIT:
        target = relations.waits_for(i)
        return Idle(span.rank, start, end, Cause.MESSAGE, _peer(relations, target))
    if kind in COLLECTIVE_KINDS:
        last = relations.last_to_come(i)
        came = start if last is None else min(end, relations.spans[last].start)
        if last is not None and came > start:
            return Idle(span.rank, start, came, Cause.COLLECTIVE, relations.spans[last].rank)
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


# --- The critical path of a timeline: the chain of work and messages that its makespan consists of ---
# It is walked back from the last end. An operation follows the last one to end
# among its possible causes: the operation before it on its rank, the transfer
# before it on its queue, the part before it of its computation, the other end
# of a message, or the last member to come to a collective. The first collective
# inside a computation follows the computation's work. On simulated timelines the
# parts then abut exactly; on measured ones there are gaps from clocks and hosts.


@dataclass(frozen=True, slots=True)
class PathPart:
    """One part of the path: a span, by its index in the timeline, and its time on the path, in ticks.

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
    """(other end that span i waited for, span that had to end before both); None if there is none.

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
    spans, candidates = relations.spans, [relations.before_on_host(i), relations.part_before(i)]
    if spans[i].queue != COMPUTE_QUEUE:
        candidates.append(relations.before_on_queue(i))
    earlier = [j for j in candidates if j is not None]
    if all(spans[j].end < spans[i].start for j in earlier):  # the host may have been held by a transfer that it posted
        held = relations.transfer_before(i)
        earlier += [] if held is None else [held]
    return max(earlier, key=lambda j: spans[j].end, default=None)  # among equal ends the first, which is the host's
