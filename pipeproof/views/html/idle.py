"""The bubbles of each rank, and what each of them is due to.

A rank is idle where it runs nothing on its compute queue. Before its first
computation of a step that is warm-up, after its last one cool-down; between
them it waits for a message, in a collective for its last member, or is held
up by something that the timeline does not show. A reduction of gradients is
nothing but the collectives inside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

from pipeproof.schedule.ops import COLLECTIVE_KINDS, COMPUTE_KINDS, UPDATE_KINDS, OpKind
from pipeproof.sim.timeline import COMPUTE_QUEUE, Time
from pipeproof.views.html.relations import Relations


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
