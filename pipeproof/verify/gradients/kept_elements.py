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
from pipeproof.verify.gradients.covers import REDUCING, Covers, Share
from pipeproof.verify.gradients.expected_gradients import Model
from pipeproof.verify.gradients.explain_sum import Cause, HeldGradient, Problem
from pipeproof.verify.gradients.parameter_view import MoveKind, View
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
    covers: Covers
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
                shares = self.covers.shares(op, p)
                if not shares or (scatters and op not in scatters):
                    continue
                for one, kept, updated in self._sides(p, rank, op, shares, everyone=everyone):
                    found = compare(kept, updated)
                    if found is not None:
                        yield self._problem(p, one, view, op, kept, updated, found)

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
        alone = rank, int(graph.stage[op])
        key = p, group.size, *((share.start, share.stop, share.at) for share in shares)
        if (everyone or is_folded) and alone not in self._stated and key in self._right:
            return
        right = True
        for place in range(group.size) if everyone or is_folded else (group.ranks.index(rank),):
            one = rank if is_folded else group.ranks[place]
            updated = self._updated(p, one, alone, place if is_folded and axis == "dp" else grid.place(one, "dp"))
            if updated is None:
                return
            kept = [cut for share in shares for cut in self._cut(share, place, group.size)]
            right &= compare(kept, updated) is None
            yield one, kept, updated
        if right:
            self._right.add(key)

    def _cut(self, share: Share, place: int, size: int) -> Ranges:
        """The elements of a share that one member of its group keeps."""
        graph = self.model.graph
        if graph.kind[share.op] != _SCATTER:
            return [(share.start, share.stop)]
        each = int(graph.stop[share.op] - graph.start[share.op]) // size
        first = share.start - (share.at or 0)
        low, high = max(share.start, first + place * each), min(share.stop, first + (place + 1) * each)
        return [(low, high)] if low < high else []

    def _updated(self, p: int, rank: int, alone: tuple[int, int], shard: int) -> Ranges | None:
        """The elements of a parameter that a rank updates; None where nothing states them."""
        parameter = self.model.facts.parameters[p]
        stated = self._stated.get((rank, alone[1]))
        if stated is not None and parameter.made_by == "backward":
            if parameter.numel is None:
                return stated
            first = self.model.flat_starts(alone[1])[p]
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

    def _problem(
        self, p: int, rank: int, view: View, op: int, kept: Ranges, updated: Ranges, found: Difference
    ) -> Problem:
        graph, name = self.model.graph, self.model.facts.parameters[p].name
        steps = [int(view.ops[i][0]) for i in view.where(MoveKind.STEP)]
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
        # Of a member that another represents the rows are not known.
        ops = tuple(sorted({op, *steps[:1]})) if graph.rank[op] == rank else ()
        return Problem(Cause.ELEMENTS, (key, axis), rank, int(graph.stage[op]), fact, fix, name, ops)
