"""The critical path of a timeline: the chain of work and messages that its makespan consists of.

It is walked back from the last end. What an operation follows is what ended
last of all that it had to wait for: the operation before it on its rank, the
transfer before it on its queue, the part before it of its computation, the
other end of a message, or the last member to come to a collective. The first collective inside a computation
follows the work of that. On simulated timelines the parts then abut
exactly; on measured ones there are gaps where clocks and hosts have theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeproof.schedule.ops import RECV_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.sim.timeline import COMPUTE_QUEUE, Time
from pipeproof.views.html.relations import Relations


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
