"""Collectives of a rehearsal, of layers and of sums of gradients, with elements that identify their origin.

Tensors are flat, as on the wire. Sums and maxima are of integers so small that any order of addition is exact. An
exchange of tokens moves as many rows to each member as the plan estimates: equal numbers, and one more to the first
members if the division has a remainder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from pipeproof.exec.rank.framework_protocol import Arrays, Collectives
from pipeproof.exec.rank.op_log import Traffic, collective_dtype
from pipeproof.exec.rehearse.element_identity import (
    Bytes,
    FoundRange,
    Numbers,
    Source,
    addends,
    decoded,
    encoded,
    found_ranges,
)
from pipeproof.exec.rehearse.rehearsal_faults import ArrivalChecks, ArrivalFault
from pipeproof.exec.rehearse.rehearsal_transfers import difference
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import OpKind
from pipeproof.specs.plan_sections import RunSpec

_COLLECTIVE = -1
"""Marker in a key instead of a message's work item."""


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """Facts of one collective for the log."""

    ranks: tuple[int, ...]
    numel: int
    dtype: str
    traffic: Traffic = ()


@dataclass(frozen=True, slots=True)
class _Call:
    """One collective on one rank: the input of each member, and this rank's index among them."""

    op_id: int
    step: int
    collectives: Collectives
    sources: list[Source]
    index: int
    dtype: str

    @property
    def own(self) -> Source:
        """Input of this rank."""
        return self.sources[self.index]


class RehearsalCollectives:
    """Collectives of one rank, by the index of their groups in the graph."""

    def __init__(
        self,
        graph: OpGraph,
        run: RunSpec,
        collectives: Mapping[int, Collectives],
        arrays: Arrays,
        checked: ArrivalChecks,
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

    def issue(self, op_id: int, step: int) -> IssuedCollective:
        """Take part in a collective and check its result."""
        graph = self._graph
        collectives = self._collectives[int(graph.group[op_id])]
        dtype = collective_dtype(graph, op_id, self._run.dtype, self._run.weight_dtype)
        sources = self._sources(op_id, step)
        index = collectives.ranks.index(int(graph.rank[op_id]))
        call = _Call(op_id, step, collectives, sources, index, dtype)
        traffic = self._act[graph.ops[op_id].kind](call, graph.row(op_id).reduction)
        self._checked.collectives += 1
        return IssuedCollective(collectives.ranks, call.own.numel, dtype, traffic)

    def _sources(self, op_id: int, step: int) -> list[Source]:
        """Inputs of all members, in group order."""
        graph = self._graph
        group, position = int(graph.group[op_id]), int(graph.position[op_id])
        by_rank = {int(graph.rank[member]): member for member in self._members[group, position]}
        sources = []
        for rank in graph.groups[group].ranks:
            member = by_rank[rank]
            text = f"{graph.ops[member]} of rank {rank}, step {step}"
            numel = int(graph.stop[member] - graph.start[member])
            sources.append(Source((step, _COLLECTIVE, group, position, rank), rank, numel, text))
        return sources

    def _gather(self, call: _Call, reduction: str) -> Traffic:
        content = self._moved(call, lambda tensor: call.collectives.all_gather(tensor, 0))
        self._require_elements(call, content, [(source, 0, source.numel) for source in call.sources])
        return ()

    def _exchange(self, call: _Call, reduction: str) -> Traffic:
        shares = [_shares(source.numel, len(call.sources)) for source in call.sources]
        send = shares[call.index]
        receive = [share[call.index] for share in shares]
        content = self._moved(call, lambda tensor: call.collectives.exchange(tensor, send, receive))
        parts = [
            (source, sum(share[: call.index]), share[call.index])
            for source, share in zip(call.sources, shares, strict=True)
        ]
        self._require_elements(call, content, parts)
        return tuple(zip(send, receive, strict=True))

    def _reduce(self, call: _Call, reduction: str) -> Traffic:
        parts = addends(call.sources, call.dtype)
        tensor = self._arrays.from_bytes(encoded(parts[call.index], call.dtype), [call.own.numel], call.dtype)
        content = self._arrays.to_bytes(call.collectives.reduce(tensor, reduction or "sum"))
        self._require_numbers(call, content, parts, reduction or "sum")
        return ()

    def _reduce_scatter(self, call: _Call, reduction: str) -> Traffic:
        parts = addends(call.sources, call.dtype)
        tensor = self._arrays.from_bytes(encoded(parts[call.index], call.dtype), [call.own.numel], call.dtype)
        content = self._arrays.to_bytes(call.collectives.reduce_scatter(tensor, 0))
        size = call.own.numel // len(parts)
        shard = slice(call.index * size, (call.index + 1) * size)
        self._require_numbers(call, content, [part[shard] for part in parts], "sum")
        return ()

    def _moved(self, call: _Call, act: Callable[[object], object]) -> Bytes:
        content = call.own.content(0, call.own.numel, call.dtype)
        return self._arrays.to_bytes(act(self._arrays.from_bytes(content, [call.own.numel], call.dtype)))

    def _require_elements(self, call: _Call, content: Bytes, parts: Sequence[tuple[Source, int, int]]) -> None:
        """Check the result of a call; ``parts`` are (source, start in the source, length) in the result's order."""
        expected, position = [], 0
        for source, start, length in parts:
            if length:
                expected.append(FoundRange(position, position + length, source, start))
            position += length
        self._checked.elements += position
        found = found_ranges(content, call.dtype, expected, lambda: self._others(call))
        if fact := difference(expected, found):
            self._add_fault(call, fact)

    def _require_numbers(self, call: _Call, content: Bytes, parts: list[Numbers], reduction: str) -> None:
        total = reduce(np.add if reduction == "sum" else np.maximum, parts)
        self._checked.elements += len(total)
        if np.array_equal(encoded(total, call.dtype), content):
            return
        expected, found = total.astype(np.float64), decoded(content, call.dtype)
        ranks = list(call.collectives.ranks)
        if len(found) != len(expected):
            self._add_fault(call, f"the result has {len(found)} elements instead of {len(expected)}")
            return
        missing = [rank for rank, part in zip(ranks, parts, strict=True) if np.array_equal(expected - part, found)]
        wrong = np.flatnonzero(expected != found)
        first, stop = int(wrong[0]), int(wrong[-1]) + 1
        why = f"; the input of rank {missing[0]} is missing" if missing and reduction == "sum" else ""
        self._add_fault(
            call,
            f"elements {first}..{stop} are not the {reduction} over ranks {ranks}: element {first} is "
            f"{found[first]:g} instead of {expected[first]:g}{why}",
        )

    def _others(self, call: _Call) -> list[Source]:
        """Inputs of the members to this call, to the calls before and after it, and to this call one step before."""
        graph, (step, work_item, group, position, _) = self._graph, call.own.key
        sources = list(call.sources)
        for neighbour in (position - 1, position + 1):
            if members := self._members.get((group, neighbour)):
                sources += self._sources(members[0], step)
        if step > 0:
            key = step - 1, work_item, group, position
            text = graph.ops[call.op_id]
            sources += [
                replace(s, key=(*key, s.rank), text=f"{text} of rank {s.rank}, step {step - 1}") for s in call.sources
            ]
        return sources

    def _add_fault(self, call: _Call, fact: str) -> None:
        graph = self._graph
        axis = graph.groups[int(graph.group[call.op_id])].axis
        where = f"{axis} ranks {', '.join(map(str, call.collectives.ranks))}"
        rank = int(graph.rank[call.op_id])
        self._checked.add_fault(ArrivalFault(rank, call.step, str(graph.ops[call.op_id]), call.op_id, where, fact))


def children_of(graph: OpGraph, rank: int) -> dict[int, list[int]]:
    """Collectives below each operation of a rank, in order."""
    children: dict[int, list[int]] = {}
    for op_id in graph.rank_ops(rank):
        if graph.parent[op_id] != NONE and graph.group[op_id] != NONE:
            children.setdefault(int(graph.parent[op_id]), []).append(op_id)
    return children


def _shares(numel: int, num_members: int) -> list[int]:
    return [numel // num_members + (index < numel % num_members) for index in range(num_members)]
