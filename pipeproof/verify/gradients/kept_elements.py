"""Elements of gradients that ranks keep of sums, compared with those that their optimizers update.

An all-reduce leaves each rank all that is put in. A reduce-scatter leaves the
k-th of n members the k-th of n equal shares. An optimizer updates the range of
its STEP, the facts' elements, its shard of each weight under a plan with a
sharded optimizer, or else all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import AXES, KIND_CODE, OpKind
from pipeproof.stages.describe.index_map import NOWHERE, Difference, IndexMap, differences
from pipeproof.stages.describe.training_state import num_shards, shard_range
from pipeproof.verify.gradients.covered_ranges import REDUCING, CoveredRanges, Share
from pipeproof.verify.gradients.expected_gradients import Model
from pipeproof.verify.gradients.explain_sum import Cause, HeldGradient, Problem
from pipeproof.verify.gradients.parameter_view import MoveKind
from pipeproof.verify.subject import Subject

UNSUMMED, KEPT = "unsummed", "kept"
"""First keys of problems: elements that are updated and not kept of a sum, and the reverse."""

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of elements."""

_REDUCE, _SCATTER, _GATHER, _STEP = (
    KIND_CODE[kind] for kind in (OpKind.REDUCE_GRAD, OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER, OpKind.STEP)
)


def stated_updates(subject: Subject) -> Mapping[tuple[int, int], Ranges]:
    """By rank and stage the elements of the stage's flat buffer that the optimizer updates, where that is stated."""
    graph = subject.graph
    result: dict[tuple[int, int], list[tuple[int, int]]] = {}
    steps = np.flatnonzero(graph.kind == _STEP)
    for op in steps[graph.stop[steps] > graph.start[steps]].tolist():
        key = int(graph.rank[op]), int(graph.stage[op])
        result.setdefault(key, []).append((int(graph.start[op]), int(graph.stop[op])))
    for fact in subject.facts.updates:
        result.setdefault((fact.rank, fact.stage), []).extend(fact.ranges)
    return result


def compare(kept: Ranges, updated: Ranges) -> Difference | None:
    """The first range that only one side has; ``first`` is ``NOWHERE`` for one that is updated and not kept."""
    if sorted(kept) == sorted(updated):
        return None
    sides = [IndexMap.of((start, start, stop - start) for start, stop in ranges) for ranges in (kept, updated)]
    found = differences(*sides)
    return next((one for one in found if one.first == NOWHERE), found[0] if found else None)


def ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    """``0..8, 16..24``."""
    return ", ".join(f"{start}..{stop}" for start, stop in ranges) or "none"


@dataclass(frozen=True, eq=False)
class KeptElements:
    """Checks the elements of one subject's sums, sum by sum."""

    subject: Subject
    model: Model
    covered_ranges: CoveredRanges
    _right: set[tuple[object, ...]] = field(default_factory=set)

    def problems(self, p: int, held: HeldGradient, *, everyone: bool) -> Iterator[Problem]:
        """Elements of a parameter that are updated and not summed, or kept and not updated.

        With ``everyone`` each rank of ``held`` represents all members of its groups.
        """
        graph = self.model.graph
        for rank, view in held.views.items():
            sums = [int(view.ops[i][0]) for i in view.where(MoveKind.REDUCE)]
            scatters = [op for op in sums if graph.kind[op] == _SCATTER]
            for op in sums:
                if graph.kind[op] not in REDUCING or graph.target_kind[op] != _REDUCE:
                    continue
                shares = self.covered_ranges.shares(op, p)
                if not shares or (scatters and op not in scatters):
                    continue
                if op in scatters and self._numel(op) % self.covered_ranges.size(op):
                    yield self._uneven(p, rank, op)
                    continue
                for one, kept, updated in self._sides(p, rank, op, shares, everyone=everyone):
                    found = compare(kept, updated)
                    if found is not None:
                        yield self._problem(p, one, op, kept, updated, found)

    def _sides(
        self, p: int, rank: int, op: int, shares: Sequence[Share], *, everyone: bool
    ) -> Iterator[tuple[int, Ranges, Ranges]]:
        """(rank, what it keeps of a sum, what it updates) for a rank or all that it represents."""
        graph, grid = self.model.graph, self.model.grid
        numel = self.model.facts.parameters[p].numel
        if all(graph.kind[share.op] != _SCATTER for share in shares) or int(graph.parent[op]) in self._gathered:
            kept = [(share.start, share.stop) for share in shares]
            if numel is not None and kept != [(0, numel)]:
                yield rank, kept, [(0, numel)]
            return
        group = graph.groups[int(graph.group[op])] if graph.group[op] != NONE else None
        if group is None or rank not in group.ranks or any(share.at is None for share in shares):
            return
        axis = AXES[int(graph.axis[op])]
        is_folded = axis in grid.folded or group.copies > 1
        stated, stage = (rank, int(graph.stage[op])) in self._stated, int(graph.stage[op])
        places = range(group.size) if everyone or is_folded else (group.ranks.index(rank),)
        members = [rank if is_folded else group.ranks[place] for place in places]
        shards = [
            k if is_folded and axis == "dp" else grid.place(one, "dp") for k, one in zip(places, members, strict=True)
        ]
        calls = [(share.start, share.stop, share.at, self._numel(share.op)) for share in shares]
        key = numel, group.size, *places, *shards, *calls
        if not stated and key in self._right:
            return
        sides = []
        for place, one, shard in zip(places, members, shards, strict=True):
            updated = self._updated(p, one, stage, shard)
            if updated is None:
                return
            sides.append((one, [cut for share in shares for cut in self._cut(share, place, group.size)], updated))
        if not stated and all(compare(kept, updated) is None for _, kept, updated in sides):
            self._right.add(key)
        yield from sides

    def _numel(self, op: int) -> int:
        return int(self.model.graph.stop[op] - self.model.graph.start[op])

    def _cut(self, share: Share, place: int, size: int) -> Ranges:
        """The elements of a share that one member of its group keeps."""
        graph = self.model.graph
        if graph.kind[share.op] != _SCATTER:
            return [(share.start, share.stop)]
        each = self._numel(share.op) // size
        first = share.start - (share.at or 0)
        low, high = max(share.start, first + place * each), min(share.stop, first + (place + 1) * each)
        return [(low, high)] if low < high else []

    def _updated(self, p: int, rank: int, stage: int, shard: int) -> Ranges | None:
        """The elements of a parameter that a rank updates; None where nothing states them."""
        parameter = self.model.facts.parameters[p]
        stated = self._stated.get((rank, stage))
        if stated is not None and parameter.made_by == "backward":
            if parameter.numel is None:
                return stated
            first = self.model.flat_starts(stage).get(p)
            if first is None:
                return None
            inside = [(max(start - first, 0), min(stop - first, parameter.numel)) for start, stop in stated]
            return [(low, high) for low, high in inside if low < high]
        if self.subject.lowered is None or parameter.numel is None:
            return None
        shards = num_shards(self.subject.plan.spec)
        return [shard_range(parameter.numel, shards, shard)] if shards > 1 else None

    @cached_property
    def _stated(self) -> Mapping[tuple[int, int], Ranges]:
        return self.subject.once(stated_updates)

    @cached_property
    def _gathered(self) -> frozenset[int]:
        """The REDUCE_GRADs below which shares of sums are gathered again."""
        graph = self.model.graph
        below = np.flatnonzero(graph.target_kind == _REDUCE)
        return frozenset(graph.parent[below[graph.kind[below] == _GATHER]].tolist())

    def _uneven(self, p: int, rank: int, op: int) -> Problem:
        graph, size = self.model.graph, self.covered_ranges.size(op)
        fact = f"{graph.ops[op]} cuts {self._numel(op)} elements into {size} equal parts, and leaves out the rest"
        fix = f"pad the elements to a multiple of {size}"
        name = self.model.facts.parameters[p].name
        return Problem(Cause.ELEMENTS, (UNSUMMED, "rest"), rank, int(graph.stage[op]), fact, fix, name, (op,))

    def _problem(self, p: int, rank: int, op: int, kept: Ranges, updated: Ranges, found: Difference) -> Problem:
        graph, name = self.model.graph, self.model.facts.parameters[p].name
        own = [one for one in graph.members_of(op) if graph.rank[one] == rank] or [op]
        steps = np.flatnonzero((graph.kind == _STEP) & (graph.stage == graph.stage[op]) & (graph.rank == rank)).tolist()
        step = str(graph.ops[steps[0]]) if steps else "the optimizer"
        here = f"{found.local}..{found.local + found.length}"
        if found.first == NOWHERE:
            key = UNSUMMED
            fact = f"{step} updates elements {here} of `{name}` from a gradient that is not summed: "
            fact += f"{graph.ops[op]} leaves the rank the sum of {ranges_text(kept)}"
        else:
            key = KEPT
            fact = f"{graph.ops[op]} leaves the rank the sum of elements {here} of `{name}`, "
            fact += f"and {step} updates {ranges_text(updated)}"
        axis = AXES[int(graph.axis[op])]
        fix = f"sum, and keep, over {axis} the elements that the rank updates"
        ops = tuple(sorted({own[0], *steps[:1]}))
        return Problem(Cause.ELEMENTS, (key, axis), rank, int(graph.stage[op]), fact, fix, name, ops)
