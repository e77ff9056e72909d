"""Two computations of a rank in each other's places, found by the transfers around them.

The transfers of a rank keep their places when two computations are exchanged.
So one of the two runs before its input is asked for, or after its output has
been sent, and each is where the other one's transfers are: it is the first
computation after the receive of the other's input, or the last one before the
send of the other's output. Exchanged back, both are in their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeproof.schedule.op_table import NONE, IntColumn
from pipeproof.schedule.ops import OpKind
from pipeproof.verify.fifo_matching import FaultsByChannel
from pipeproof.verify.subject import Subject

_F, _B, _I = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT
_TRANSFERS = {
    _F: (OpKind.RECV_FORWARD, OpKind.SEND_FORWARD),
    _B: (OpKind.RECV_BACKWARD, OpKind.SEND_BACKWARD),
    _I: (OpKind.RECV_BACKWARD, OpKind.SEND_BACKWARD),
}
"""By kind of a computation: the transfer that brings its input, and the one that takes its output."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two computations in each other's places, as op ids in program order, and the transfers that show it."""

    first: int
    second: int
    transfers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Places:
    """By row of a computation the transfers of its input and output on its rank, NONE without any."""

    rows: IntColumn
    receive: dict[int, int]
    send: dict[int, int]

    def fits(self, row: int, at: int) -> bool:
        """Return True if a computation at a place comes after its receive and before its send."""
        receive, send = self.receive[row], self.send[row]
        return (receive == NONE or receive < at) and (send == NONE or at < send)

    def has_transfers_of(self, at: int, row: int) -> bool:
        """Return True if no computation is between a place and the transfers that belong to a computation there."""
        return self._next_to(self.receive[row], 0) == at or self._next_to(self.send[row], -1) == at

    def candidates(self, row: int) -> list[int]:
        """The computations at the places to which the transfers of a computation belong."""
        found = (self._next_to(self.receive[row], 0), self._next_to(self.send[row], -1))
        return [other for other in found if other not in (NONE, row)]

    def _next_to(self, transfer: int, side: int) -> int:
        """The first computation behind a transfer (``side`` 0), or the last one before it (-1)."""
        place = int(np.searchsorted(self.rows, transfer)) + side
        return int(self.rows[place]) if transfer != NONE and 0 <= place < len(self.rows) else NONE


def exchanges(subject: Subject) -> list[Exchange]:
    """All exchanges, in program order; each computation is in one at most."""
    graph, faults = subject.graph, subject.once(FaultsByChannel)
    found: list[Exchange] = []
    done: set[int] = set()
    for places, row in _out_of_place(subject):
        for other in places.candidates(row):
            same_rank = graph.rank[row] == graph.rank[other]
            both = places.has_transfers_of(other, row) and places.has_transfers_of(row, other)
            if same_rank and both and places.fits(row, other) and places.fits(other, row) and not {row, other} & done:
                first, second = sorted((row, other))
                ends = [end for of in (first, second) for end in (places.receive[of], places.send[of]) if end != NONE]
                if any(end in faults[int(graph.channel[end])].block_of for end in ends):
                    continue  # the transfers are in each other's places, and the peer's are not: PP302 speaks
                shown = [end for end in ends if first < end < second]
                found.append(Exchange(first, second, tuple(sorted(shown))))
                done |= {row, other}
    return sorted(found, key=lambda exchange: exchange.first)


def _out_of_place(subject: Subject) -> Iterator[tuple[_Places, int]]:
    """Computations that run before their receive or after their send, in program order, with all places."""
    table = subject.computes
    firsts = {kind: table.first[kind] for kind in _TRANSFERS}
    by_transfer = {end: _first_transfer(subject, end) for transfers in _TRANSFERS.values() for end in transfers}
    ends = {kind: tuple(by_transfer[end] for end in transfers) for kind, transfers in _TRANSFERS.items()}
    wrong: list[int] = []
    for kind, rows in firsts.items():
        receive, send = ends[kind]
        there = rows != NONE
        early, late = there & (receive > rows), there & (send != NONE) & (send < rows)
        wrong += rows[early | late].tolist()
    if not wrong:
        return
    all_rows = np.sort(np.concatenate([rows[rows != NONE] for rows in firsts.values()]))
    by_end = [
        {
            int(row): int(end)
            for kind, rows in firsts.items()
            for row, end in zip(rows.tolist(), ends[kind][side].tolist(), strict=True)
            if row != NONE
        }
        for side in range(2)
    ]
    places = _Places(all_rows, *by_end)
    for row in sorted(wrong):
        yield places, row


def _first_transfer(subject: Subject, kind: OpKind) -> IntColumn:
    """By entry of the computations its first transfer of a kind, NONE without any."""
    graph, table = subject.graph, subject.computes
    rows = np.flatnonzero(graph.is_kind(frozenset({kind})))
    entry = table.find(graph.rank[rows], graph.stage[rows], graph.work_item[rows])
    rows, entry = rows[entry != NONE][::-1], entry[entry != NONE][::-1]
    first = np.full(len(table), NONE, dtype=np.int64)
    first[entry] = rows  # of several the last one written stays: the first row
    return first
