"""Relations between the spans of a timeline: messages, waits, collectives, and the order on a rank."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from functools import cached_property

from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import CHILD_KINDS, COLLECTIVE_KINDS, COMPUTE_KINDS, UPDATE_KINDS, Op, parse_op
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Time, Timeline

_Ends = list[tuple[Time, int, int, int]]
"""(end, step, op id, place of the span), sorted."""


class Relations:
    """Spans by their place in ``timeline.spans``, and how they hang together.

    ``ops[i]`` is the operation of span i. ``graph`` may be None for a timeline
    whose graph is not at hand: waits are then recognised by their text, and nothing
    is known of the members of a collective.
    """

    def __init__(self, timeline: Timeline, graph: OpGraph | None = None) -> None:
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
        if self._graph is not None:
            target = int(self._graph.waits_for[span.op_id])
            found = None if target == NONE else self._by_key.get((span.step, target))
        else:
            posted = self._transfers_by_text.get((span.step, span.rank, str(self.ops[i].target)), [])
            place = bisect_left(posted, (span.op_id, 0)) - 1
            found = posted[place][1] if place >= 0 else None
        return found if found is not None and self.spans[found].queue != COMPUTE_QUEUE else None

    def part_before(self, i: int) -> int | None:
        """The part, or the exchange between parts, that span i follows in its computation."""
        if self._graph is None:
            return None
        before = int(self._graph.part_before[self.spans[i].op_id])
        return None if before == NONE else self._by_key.get((self.spans[i].step, before))

    @property
    def knows_members(self) -> bool:
        """True if it is known which spans belong to one collective."""
        return self._graph is not None

    def last_to_come(self, i: int) -> int | None:
        """The member of a collective that came to it last; None if that is not known, or i itself was the last."""
        if self._graph is None or self.ops[i].kind not in COLLECTIVE_KINDS:
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
        return self._before(self._queue_ends[self.spans[i].rank, COMPUTE_QUEUE], i)

    def before_on_queue(self, i: int) -> int | None:
        """Last span to end on a transfer's own queue before it began."""
        return self._before(self._queue_ends[self.spans[i].rank, self.spans[i].queue], i)

    def transfer_before(self, i: int) -> int | None:
        """Last to end among the rank's transfers that were posted before span i and ended before it began."""
        return self._before(self._transfer_ends[self.spans[i].rank], i)

    def _before(self, ends: _Ends, i: int) -> int | None:
        span = self.spans[i]
        place = bisect_left(ends, (span.start, span.step, span.op_id, -1))
        while place and (ends[place - 1][1], ends[place - 1][2]) >= (span.step, span.op_id):
            place -= 1
        return ends[place - 1][3] if place else None

    @cached_property
    def _queue_ends(self) -> dict[tuple[int, str], _Ends]:
        result: dict[tuple[int, str], _Ends] = defaultdict(list)
        for i, span in enumerate(self.spans):
            result[span.rank, span.queue].append((span.end, span.step, span.op_id, i))
        for ends in result.values():
            ends.sort()
        return result

    @cached_property
    def _transfer_ends(self) -> dict[int, _Ends]:
        result: dict[int, _Ends] = defaultdict(list)
        for (rank, queue), ends in self._queue_ends.items():
            if queue != COMPUTE_QUEUE:
                result[rank] += ends
        for ends in result.values():
            ends.sort()
        return result

    @cached_property
    def _transfers_by_text(self) -> dict[tuple[int, int, str], list[tuple[int, int]]]:
        """(step, rank, text) to (op id, span), in order of op ids."""
        result: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
        for i, span in enumerate(self.spans):
            if span.queue != COMPUTE_QUEUE:
                result[span.step, span.rank, span.op].append((span.op_id, i))
        for posted in result.values():
            posted.sort()
        return result

    @cached_property
    def _parents(self) -> dict[tuple[int, int, Op], int]:
        """(step, rank, operation) to spans, of what may have collectives inside it."""
        kinds = COMPUTE_KINDS | UPDATE_KINDS
        return {(s.step, s.rank, self.ops[i]): i for i, s in enumerate(self.spans) if self.ops[i].kind in kinds}

    @cached_property
    def _members(self) -> dict[tuple[int, int], list[int]]:
        """(group, place among its collectives) to op ids."""
        assert self._graph is not None
        result: dict[tuple[int, int], list[int]] = defaultdict(list)
        for op_id in (self._graph.group != NONE).nonzero()[0].tolist():
            result[int(self._graph.group[op_id]), int(self._graph.position[op_id])].append(op_id)
        return result
