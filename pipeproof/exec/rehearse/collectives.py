"""Collectives of a rehearsal: those of layers and of sums of gradients, with elements that say where they come from.

What a collective moves is flat, for that is how it goes over the wire. Sums
and maxima are of whole numbers, so small that any order of adding them is
exact. An exchange of tokens moves as many to each member as the plan's
estimate says: equally many, the first members one more where that does not
divide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from pipeproof.exec.framework import Arrays, Collectives
from pipeproof.exec.oplog import Traffic, collective_dtype
from pipeproof.exec.rehearse.arrivals import Piece, pieces_of
from pipeproof.exec.rehearse.faults import Checked, Fault
from pipeproof.exec.rehearse.identity import Bytes, Numbers, Source, addends, decoded, encoded
from pipeproof.exec.rehearse.transfers import difference
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.optable import NONE, OpGraph
from pipeproof.specs.plan import RunSpec

_COLLECTIVE = -1
"""In a key in place of a unit of work, which messages have there."""


@dataclass(frozen=True, slots=True)
class Issued:
    """What there is to log of one collective."""

    ranks: tuple[int, ...]
    numel: int
    dtype: str
    traffic: Traffic = ()


@dataclass(frozen=True, slots=True)
class _Call:
    """One collective on one rank: what each member puts in, and this rank's place among them."""

    op_id: int
    step: int
    collectives: Collectives
    sources: list[Source]
    place: int
    dtype: str

    @property
    def own(self) -> Source:
        """What this rank puts in."""
        return self.sources[self.place]


class RehearsedCollectives:
    """The collectives of one rank, by the index of their groups in the graph."""

    def __init__(
        self, graph: OpGraph, run: RunSpec, collectives: Mapping[int, Collectives], arrays: Arrays, checked: Checked
    ) -> None:
        self._graph, self._run, self._collectives = graph, run, collectives
        self._arrays, self._checked = arrays, checked
        self._members: dict[tuple[int, int], list[int]] = defaultdict(list)
        for op_id in np.flatnonzero(np.isin(graph.group, list(collectives))).tolist():
            self._members[int(graph.group[op_id]), int(graph.position[op_id])].append(op_id)
        self._act: dict[OpKind, Callable[[_Call, str], Traffic]] = {
            OpKind.ALL_GATHER: self._gather,
            OpKind.ALL_REDUCE: self._reduce,
            OpKind.REDUCE_SCATTER: self._reduce_scatter,
            OpKind.ALL_TO_ALL: self._exchange,
        }

    def issue(self, op_id: int, step: int) -> Issued:
        """Take part in a collective, and read what came of it."""
        graph = self._graph
        collectives = self._collectives[int(graph.group[op_id])]
        dtype = collective_dtype(graph, op_id, self._run.dtype, self._run.weight_dtype)
        sources = self._sources(op_id, step)
        place = collectives.ranks.index(int(graph.rank[op_id]))
        call = _Call(op_id, step, collectives, sources, place, dtype)
        traffic = self._act[graph.ops[op_id].kind](call, graph.row(op_id).reduction)
        self._checked.collectives += 1
        return Issued(collectives.ranks, call.own.numel, dtype, traffic)

    def _sources(self, op_id: int, step: int) -> list[Source]:
        """What each member puts in, in group order."""
        graph = self._graph
        group, position = int(graph.group[op_id]), int(graph.position[op_id])
        by_rank = {int(graph.rank[one]): one for one in self._members[group, position]}
        found = []
        for rank in graph.groups[group].ranks:
            one = by_rank[rank]
            text = f"{graph.ops[one]} of rank {rank}, step {step}"
            numel = int(graph.stop[one] - graph.start[one])
            found.append(Source((step, _COLLECTIVE, group, position, rank), rank, numel, text))
        return found

    def _gather(self, call: _Call, reduction: str) -> Traffic:
        content = self._moved(call, lambda tensor: call.collectives.all_gather(tensor, 0))
        self._require_pieces(call, content, [(source, 0, source.numel) for source in call.sources])
        return ()

    def _exchange(self, call: _Call, reduction: str) -> Traffic:
        shares = [_shares(source.numel, len(call.sources)) for source in call.sources]
        send = shares[call.place]
        receive = [share[call.place] for share in shares]
        content = self._moved(call, lambda tensor: call.collectives.exchange(tensor, send, receive))
        parts = [
            (source, sum(share[: call.place]), share[call.place])
            for source, share in zip(call.sources, shares, strict=True)
        ]
        self._require_pieces(call, content, parts)
        return tuple(zip(send, receive, strict=True))

    def _reduce(self, call: _Call, reduction: str) -> Traffic:
        parts = addends(call.sources, call.dtype)
        tensor = self._arrays.from_bytes(encoded(parts[call.place], call.dtype), [call.own.numel], call.dtype)
        content = self._arrays.to_bytes(call.collectives.reduce(tensor, reduction or "sum"))
        self._require_numbers(call, content, parts, reduction or "sum")
        return ()

    def _reduce_scatter(self, call: _Call, reduction: str) -> Traffic:
        parts = addends(call.sources, call.dtype)
        tensor = self._arrays.from_bytes(encoded(parts[call.place], call.dtype), [call.own.numel], call.dtype)
        content = self._arrays.to_bytes(call.collectives.reduce_scatter(tensor, 0))
        size = call.own.numel // len(parts)
        mine = slice(call.place * size, (call.place + 1) * size)
        self._require_numbers(call, content, [part[mine] for part in parts], "sum")
        return ()

    def _moved(self, call: _Call, act: Callable[[object], object]) -> Bytes:
        content = call.own.content(0, call.own.numel, call.dtype)
        return self._arrays.to_bytes(act(self._arrays.from_bytes(content, [call.own.numel], call.dtype)))

    def _require_pieces(self, call: _Call, content: Bytes, parts: Sequence[tuple[Source, int, int]]) -> None:
        """Each of ``parts`` is a source, where its part begins there, and how long that is."""
        wanted, at = [], 0
        for source, start, length in parts:
            if length:
                wanted.append(Piece(at, at + length, source, start))
            at += length
        self._checked.elements += at
        found = pieces_of(content, call.dtype, wanted, lambda: self._others(call))
        if fact := difference(wanted, found):
            self._blame(call, fact)

    def _require_numbers(self, call: _Call, content: Bytes, parts: list[Numbers], reduction: str) -> None:
        right = reduce(np.add if reduction == "sum" else np.maximum, parts)
        self._checked.elements += len(right)
        if np.array_equal(encoded(right, call.dtype), content):
            return
        wanted, found = right.astype(np.float64), decoded(content, call.dtype)
        ranks = list(call.collectives.ranks)
        if len(found) != len(wanted):
            self._blame(call, f"{len(found)} elements came of it, {len(wanted)} are right")
            return
        missing = [rank for rank, part in zip(ranks, parts, strict=True) if np.array_equal(wanted - part, found)]
        wrong = np.flatnonzero(wanted != found)
        first, stop = int(wrong[0]), int(wrong[-1]) + 1
        why = f"; that is without what rank {missing[0]} put in" if missing and reduction == "sum" else ""
        self._blame(
            call,
            f"elements {first}..{stop} are not the {reduction} over ranks {ranks}: element {first} is "
            f"{found[first]:g}, {wanted[first]:g} is right{why}",
        )

    def _others(self, call: _Call) -> list[Source]:
        """What the members put into this call, into those beside it, and into this one a step before."""
        graph, (step, unit, group, position, _) = self._graph, call.own.key
        found = list(call.sources)
        for there in (position - 1, position + 1):
            if members := self._members.get((group, there)):
                found += self._sources(members[0], step)
        if step > 0:
            key = step - 1, unit, group, position
            text = graph.ops[call.op_id]
            found += [
                replace(s, key=(*key, s.rank), text=f"{text} of rank {s.rank}, step {step - 1}") for s in call.sources
            ]
        return found

    def _blame(self, call: _Call, fact: str) -> None:
        graph = self._graph
        axis = graph.groups[int(graph.group[call.op_id])].axis
        where = f"{axis} ranks {', '.join(map(str, call.collectives.ranks))}"
        rank = int(graph.rank[call.op_id])
        self._checked.blame(Fault(rank, call.step, str(graph.ops[call.op_id]), call.op_id, where, fact))


def children_of(graph: OpGraph, rank: int) -> dict[int, list[int]]:
    """By operation of a rank, the collectives below it, in order."""
    found: dict[int, list[int]] = {}
    for op_id in graph.rank_ops(rank):
        if graph.parent[op_id] != NONE and graph.group[op_id] != NONE:
            found.setdefault(int(graph.parent[op_id]), []).append(op_id)
    return found


def _shares(numel: int, num_members: int) -> list[int]:
    return [numel // num_members + (place < numel % num_members) for place in range(num_members)]
