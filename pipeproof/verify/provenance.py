"""Where every element that a receiver holds came from, as ranges.

Every element of a sent tensor has an identity (source rank, index in that
rank's flattened local tensor). The identities are pushed through the lowered
operations: a send carries a range, a receive places it, a gather joins what
the members of its group received. The work grows with the number of ranges,
never with the number of elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeproof.schedule.ops import GATHER_KINDS, RECV_KINDS
from pipeproof.schedule.optable import NONE, EdgeKind, OpGraph


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``start .. stop`` of a receiver's flattened tensor, filled from ``source_start`` of ``source_rank``."""

    start: int
    stop: int
    source_rank: int
    source_start: int

    def within(self, start: int, stop: int) -> Segment | None:
        """The part of this segment that lies in ``start .. stop``; None if none does."""
        low, high = max(self.start, start), min(self.stop, stop)
        if low >= high:
            return None
        return Segment(low, high, self.source_rank, self.source_start + low - self.start)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One boundary tensor as it stands in the receiver's memory when its consumer starts.

    ``receive`` is the op id of the RECV, ``sender`` the rank that its message
    came from, ``segments`` are sorted by position and do not overlap;
    positions in no segment were never written.
    """

    receive: int
    sender: int
    segments: tuple[Segment, ...]


def deliveries(graph: OpGraph) -> Iterator[Delivery]:
    """What every matched receive of the graph ends up with, gathers included."""
    tables = _Tables(graph)
    for receive in np.flatnonzero(graph.channel != NONE).tolist():
        if graph.ops[receive].kind in RECV_KINDS and receive in graph.match_of:
            sender = int(graph.rank[graph.match_of[receive]])
            yield Delivery(receive, sender, tuple(tables.segments(receive)))


class _Tables:
    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._gather_of: dict[int, int] = {}
        self._receive_of: dict[int, int] = {}
        for source, target in graph.edges[EdgeKind.DATA].tolist():
            if graph.ops[target].kind in GATHER_KINDS and graph.ops[source].kind in RECV_KINDS:
                self._gather_of[source] = target
                self._receive_of[target] = source
        self._gathers_at: dict[tuple[int, int], list[int]] = {}
        for gather in self._receive_of:
            key = (int(graph.group[gather]), int(graph.position[gather]))
            self._gathers_at.setdefault(key, []).append(gather)

    def segments(self, receive: int) -> Iterator[Segment]:
        gather = self._gather_of.get(receive)
        if gather is None:
            yield from self._received(receive)
            return
        graph = self._graph
        group = graph.groups[int(graph.group[gather])]
        members = self._gathers_at[int(graph.group[gather]), int(graph.position[gather])]
        by_rank = {int(graph.rank[m]): m for m in members}
        written = 0  # a gather concatenates: member after member, in group order
        for rank in group.ranks:
            if rank not in by_rank:
                continue
            member = by_rank[rank]
            start, stop = int(graph.start[member]), int(graph.stop[member])
            for segment in self._received(self._receive_of[member]):
                part = segment.within(start, stop)
                if part is not None:
                    shift = written - start
                    yield Segment(part.start + shift, part.stop + shift, part.source_rank, part.source_start)
            written += stop - start

    def _received(self, receive: int) -> Iterator[Segment]:
        graph = self._graph
        send = graph.match_of.get(receive)
        if send is None:
            return
        start, source_start = int(graph.start[receive]), int(graph.start[send])
        length = min(int(graph.stop[receive]) - start, int(graph.stop[send]) - source_start)
        if length > 0:
            yield Segment(start, start + length, int(graph.rank[send]), source_start)
