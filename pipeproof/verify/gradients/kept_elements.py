"""Elements that ranks keep of sums, elements that their optimizers update, and whole weights after the update.

An all-reduce leaves each rank all elements. A reduce-scatter leaves the k-th
of n members the k-th of n equal shares. An optimizer updates the range of its
STEP, the facts' elements, its shard of each weight under a plan with a sharded
optimizer, or else all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np

from pipeproof.diagnostics.finding import ExampleKind, Finding, RuleDoc
from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.derive import packed
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import AXES, COMPUTE_KINDS, KIND_CODE, OpKind
from pipeproof.stages.describe.index_map import NOWHERE, Difference, IndexMap, differences
from pipeproof.stages.describe.layer import Parameter
from pipeproof.stages.describe.stage_memory import num_shards, shard_numel, shard_range, shards_weights
from pipeproof.verify.gradients.covered_ranges import REDUCING, CoveredRange, CoveredRanges
from pipeproof.verify.gradients.expected_gradients import Model
from pipeproof.verify.gradients.explain_sum import Cause, HeldGradient, Problem
from pipeproof.verify.gradients.parameter_view import ChangeKind
from pipeproof.verify.subject import Rule, Subject, of_ranks, of_small_plan

UNSUMMED, KEPT = "unsummed", "kept"
"""First keys of problems: elements that are updated and not kept of a sum, and the reverse."""

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of elements."""

_REDUCE, _SCATTER, _GATHER, _STEP = (
    KIND_CODE[kind] for kind in (OpKind.REDUCE_GRAD, OpKind.REDUCE_SCATTER, OpKind.ALL_GATHER, OpKind.STEP)
)


def stated_updates(subject: Subject) -> Mapping[tuple[int, int], Ranges]:
    """By rank and stage the elements of the stage's flat buffer that the optimizer updates, if stated."""
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
    """The first range that only one side has; ``first`` is ``NOWHERE`` for an updated range that is not kept."""
    if sorted(kept) == sorted(updated):
        return None
    sides = [IndexMap.of((start, start, stop - start) for start, stop in ranges) for ranges in (kept, updated)]
    mismatches = differences(*sides)
    return next((one for one in mismatches if one.first == NOWHERE), mismatches[0] if mismatches else None)


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
            sums = [int(view.ops[i][0]) for i in view.where(ChangeKind.REDUCE)]
            scatters = [op for op in sums if graph.kind[op] == _SCATTER]
            for op in sums:
                if graph.kind[op] not in REDUCING or graph.target_kind[op] != _REDUCE:
                    continue
                ranges = self.covered_ranges.ranges(op, p)
                if not ranges or (scatters and op not in scatters):
                    continue
                if op in scatters and self._numel(op) % self.covered_ranges.size(op):
                    yield self._uneven(p, rank, op)
                    continue
                for one, kept, updated in self._sides(p, rank, op, ranges, everyone=everyone):
                    difference = compare(kept, updated)
                    if difference is not None:
                        yield self._problem(p, one, op, kept, updated, difference)

    def _sides(
        self, p: int, rank: int, op: int, ranges: Sequence[CoveredRange], *, everyone: bool
    ) -> Iterator[tuple[int, Ranges, Ranges]]:
        """(rank, elements kept of a sum, elements updated) for a rank or all that it represents."""
        graph, grid = self.model.graph, self.model.grid
        numel = self.model.facts.parameters[p].numel
        if all(graph.kind[covered.op] != _SCATTER for covered in ranges) or int(graph.parent[op]) in self._gathered:
            kept = [(covered.start, covered.stop) for covered in ranges]
            if numel is not None and kept != [(0, numel)]:
                yield rank, kept, [(0, numel)]
            return
        group = graph.groups[int(graph.group[op])] if graph.group[op] != NONE else None
        if group is None or rank not in group.ranks or any(covered.at is None for covered in ranges):
            return
        axis = AXES[int(graph.axis[op])]
        is_folded = axis in grid.folded or group.copies > 1
        stated, stage = (rank, int(graph.stage[op])) in self._stated, int(graph.stage[op])
        places = range(group.size) if everyone or is_folded else (group.ranks.index(rank),)
        members = [rank if is_folded else group.ranks[position] for position in places]
        shards = [
            k if is_folded and axis == "dp" else grid.place(one, "dp") for k, one in zip(places, members, strict=True)
        ]
        calls = [(covered.start, covered.stop, covered.at, self._numel(covered.op)) for covered in ranges]
        key = numel, group.size, *places, *shards, *calls
        if not stated and key in self._right:
            return
        sides = []
        for position, one, shard in zip(places, members, shards, strict=True):
            updated = self._updated(p, one, stage, shard)
            if updated is None:
                return
            sides.append(
                (one, [cut for covered in ranges for cut in self._cut(covered, position, group.size)], updated)
            )
        if not stated and all(compare(kept, updated) is None for _, kept, updated in sides):
            self._right.add(key)
        yield from sides

    def _numel(self, op: int) -> int:
        return int(self.model.graph.stop[op] - self.model.graph.start[op])

    def _cut(self, covered: CoveredRange, position: int, size: int) -> Ranges:
        """The elements of a range that one member of its group keeps."""
        graph = self.model.graph
        if graph.kind[covered.op] != _SCATTER:
            return [(covered.start, covered.stop)]
        each = self._numel(covered.op) // size
        first = covered.start - (covered.at or 0)
        low, high = max(covered.start, first + position * each), min(covered.stop, first + (position + 1) * each)
        return [(low, high)] if low < high else []

    def _updated(self, p: int, rank: int, stage: int, shard: int) -> Ranges | None:
        """The elements of a parameter that a rank updates; None if nothing states them."""
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
        """The REDUCE_GRADs with gathers of the summed shares below them."""
        graph = self.model.graph
        below = np.flatnonzero(graph.target_kind == _REDUCE)
        return frozenset(graph.parent[below[graph.kind[below] == _GATHER]].tolist())

    def _uneven(self, p: int, rank: int, op: int) -> Problem:
        graph, size = self.model.graph, self.covered_ranges.size(op)
        fact = f"{graph.ops[op]} cuts {self._numel(op)} elements into {size} equal parts, and leaves out the rest"
        fix = f"pad the elements to a multiple of {size}"
        name = self.model.facts.parameters[p].name
        return Problem(Cause.ELEMENTS, (UNSUMMED, "rest"), rank, int(graph.stage[op]), fact, fix, name, (op,))

    def _problem(self, p: int, rank: int, op: int, kept: Ranges, updated: Ranges, difference: Difference) -> Problem:
        graph, name = self.model.graph, self.model.facts.parameters[p].name
        own = [one for one in graph.members_of(op) if graph.rank[one] == rank] or [op]
        steps = np.flatnonzero((graph.kind == _STEP) & (graph.stage == graph.stage[op]) & (graph.rank == rank)).tolist()
        step = str(graph.ops[steps[0]]) if steps else "the optimizer"
        interval = f"{difference.local}..{difference.local + difference.length}"
        if difference.first == NOWHERE:
            key = UNSUMMED
            fact = f"{step} updates elements {interval} of `{name}` from a gradient that is not summed: "
            fact += f"{graph.ops[op]} leaves the rank the sum of {ranges_text(kept)}"
        else:
            key = KEPT
            fact = f"{graph.ops[op]} leaves the rank the sum of elements {interval} of `{name}`, "
            fact += f"and {step} updates {ranges_text(updated)}"
        axis = AXES[int(graph.axis[op])]
        fix = f"sum, and keep, over {axis} the elements that the rank updates"
        ops = tuple(sorted({own[0], *steps[:1]}))
        return Problem(Cause.ELEMENTS, (key, axis), rank, int(graph.stage[op]), fact, fix, name, ops)


MOST_NAMED = 3
"""Parameters, ranks and pairs of rows that a finding names; the rest are counted."""

_TOPOLOGY = "{'pp': 2, 'dp': 2}, 'memory': {'shard_optimizer': 'dp'}"

APART = RuleDoc(
    code="PP612",
    title="an update is sharded over ranks, and the weights are not gathered",
    explanation=(
        "With `memory.shard_optimizer: dp` each dp rank gets its share of a gradient's sum and updates its share of "
        "the weight. After the STEP the shares must be gathered over all of dp, weight by weight. A weight that is "
        "left out, gathered before the step, or gathered over some of the ranks is new in one share (a different one "
        "on each rank) and old in the others: nothing fails, and the replicas drift apart. Without a sharded optimizer "
        "each rank updates whole weights and needs whole sums: a reduce-scatter leaves only one share of them. With "
        "`memory.shard_weights: dp` the shares are gathered before each computation of the stage instead, after the "
        "RESHARD that has released them: a computation without a whole gather reads released memory."
    ),
    wrong=of_small_plan(_TOPOLOGY, "rows = [[r for r in own if 'GATHER_WEIGHT' not in str(r.op)] for own in rows]"),
    right=of_small_plan(_TOPOLOGY),
    kind=ExampleKind.PYTHON,
)


def _check(subject: Subject) -> Iterator[Finding]:
    if num_shards(subject.plan.spec) > 1:
        gathers = _Gathers(subject)
        is_released = shards_weights(subject.plan.spec)
        yield from gathers.of_computations() if is_released else gathers.of_updates()
    else:
        yield from _scattered(subject)


def _scattered(subject: Subject) -> Iterator[Finding]:
    """Sums that leave a rank one share although it updates whole weights."""
    graph = subject.graph
    scatters = (graph.kind == KIND_CODE[OpKind.REDUCE_SCATTER]) & (graph.target_kind == KIND_CODE[OpKind.REDUCE_GRAD])
    calls = np.flatnonzero(scatters).tolist()
    if calls:
        more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        yield APART.finding(
            f"{subject.coords_text(int(graph.rank[calls[0]]))}: {graph.ops[calls[0]]}{more} leaves a share of a sum, "
            "and the plan's optimizer updates whole weights",
            location=subject.locate("schedule"),
            help="issue ALL_REDUCE, or set `memory.shard_optimizer: dp`",
            witness=subject.witness(calls[0]),
        )


class _Gathers:
    """The gathers of one subject whose plan shares out updates over dp."""

    def __init__(self, subject: Subject) -> None:
        graph = subject.graph
        self._subject, self._graph, self._plan = subject, graph, subject.plan
        self._steps = np.flatnonzero(graph.kind == KIND_CODE[OpKind.STEP])
        of_weights = graph.kind == KIND_CODE[OpKind.GATHER_WEIGHT]
        self._wholes = np.flatnonzero(of_weights)
        below = (graph.kind == KIND_CODE[OpKind.ALL_GATHER]) & (graph.target_kind == KIND_CODE[OpKind.GATHER_WEIGHT])
        self._calls = np.flatnonzero(below)
        self._shares = num_shards(self._plan.spec)

    def of_updates(self) -> Iterator[Finding]:
        """Findings on the gathers behind each STEP."""
        found = ((step, *one) for step in self._steps.tolist() for one in self._of_step(step))
        yield from self._findings(found, "shard_optimizer", "after its STEP")

    def of_computations(self) -> Iterator[Finding]:
        """Findings on the gathers before each computation, where weights are released after it."""
        graph = self._graph
        computes = np.flatnonzero(graph.is_kind(COMPUTE_KINDS))
        ends = np.flatnonzero(graph.is_kind(frozenset({OpKind.RESHARD, OpKind.STEP})))
        pairs = np.unique(np.stack([graph.rank[computes], graph.stage[computes]]), axis=1).T.tolist()
        found = (one for pair in pairs for one in self._of_released(computes, ends, *pair))
        yield from self._findings(found, "shard_weights", "before each of its computations, after the last RESHARD")

    def _findings(self, found: Iterable[tuple[int, str, list[int]]], key: str, when: str) -> Iterator[Finding]:
        """One for each fact of (operation, fact, other operations), with the first of the places where it is."""
        wrong = grouped((fact, (op, ops)) for op, fact, ops in found)
        for fact, places in wrong.items():
            op, ops = places[0]
            rank = int(self._graph.rank[op])
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            yield APART.finding(
                f"{self._subject.coords_text(rank)}{more}: {fact}",
                location=self._subject.locate("memory", key),
                help=f"gather each weight of the stage once over all of dp, {when}",
                witness=self._subject.witness(op, *ops),
            )

    def _of_released(
        self, computes: IntColumn, ends: IntColumn, rank: int, stage: int
    ) -> Iterator[tuple[int, str, list[int]]]:
        """(computation, fact, operations) for what is wrong before the computations of one stage.

        ``ends`` are the operations behind which weights must be gathered again.
        """
        graph, plan = self._graph, self._plan
        own, calls = self._of_stage(computes, rank, stage), self._of_stage(self._calls, rank, stage)
        released = _last_before(own, self._of_stage(ends, rank, stage))
        pp = plan.mesh.coords(graph.global_rank[rank])["pp"]
        lacking: dict[int, list[str]] = {}
        for index, weight in enumerate(plan.weights_of(stage, pp) if pp in plan.holders[stage] else ()):
            of_weight = calls[graph.index[calls] == index]
            sizes = packed(*(column[of_weight] for column in (graph.axis, graph.group, graph.start, graph.stop)))
            for call in of_weight[np.unique(sizes, return_index=True)[1]].tolist():  # equal ones are checked once
                wrong = self._fact(weight, call)
                if wrong is not None:
                    yield call, wrong, []
            last = _last_before(own, of_weight)
            for op in own[(last == NONE) | (last < released)].tolist():
                lacking.setdefault(op, []).append(weight.name)
        for op, names in lacking.items():
            yield op, f"{graph.ops[op]} computes with {names_text(names)}, which nothing has gathered for it", []

    def _of_step(self, step: int) -> Iterator[tuple[str, list[int]]]:
        """(fact, operations) for each fault after one STEP."""
        graph, plan = self._graph, self._plan
        rank, stage = int(graph.rank[step]), int(graph.stage[step])
        coords = plan.mesh.coords(graph.global_rank[rank])
        if coords["pp"] not in plan.holders[stage]:
            return  # a step of a stage that is elsewhere: PP128
        weights = plan.weights_of(stage, coords["pp"])
        calls = self._of_stage(self._calls, rank, stage)
        if not len(self._calls):  # a program without collectives gathers everything with one row
            wholes = self._of_stage(self._wholes, rank, stage)
            late = wholes[wholes > step]
            if weights and len(wholes) and not len(late):
                fact = f"{graph.ops[wholes[0]]} comes before {graph.ops[step]}, which updates its elements"
                yield fact, wholes[:1].tolist()
            if len(wholes):
                return
        missing = []
        for index, weight in enumerate(weights):
            selected = calls[graph.index[calls] == index].tolist()
            if not selected:
                missing.append(weight.name)
                continue
            wrong = self._early(weight, selected[-1], step) or self._fact(weight, selected[-1])
            if wrong is not None:
                yield wrong, selected[-1:]
        if missing:
            yield f"{graph.ops[step]} updates a share of {names_text(missing)}, and nothing gathers the others", []

    def _of_stage(self, rows: IntColumn, rank: int, stage: int) -> IntColumn:
        selected: IntColumn = rows[(self._graph.rank[rows] == rank) & (self._graph.stage[rows] == stage)]
        return selected

    def _early(self, weight: Parameter, call: int, step: int) -> str | None:
        """Fact about a gather that comes before the STEP of its weight."""
        ops = self._graph.ops
        text = f"{ops[call]}, of `{weight.name}`, comes before {ops[step]}, which updates its elements"
        return text if call < step else None

    def _fact(self, weight: Parameter, call: int) -> str | None:
        """Fact about a gather of one weight over wrong ranks or of a wrong size; None if it is correct."""
        graph, mesh = self._graph, self._plan.mesh
        text = f"{graph.ops[call]}, of `{weight.name}`,"
        size = graph.groups[int(graph.group[call])].size if graph.group[call] != NONE else 0
        if graph.axis[call] != AXES.index("dp") or size != self._shares:
            return f"{text} is over {size} ranks, and {self._shares} dp ranks have a share each"
        numel = prod(weight.local_shape({axis: mesh.size(axis) for axis in ("tp", "ep")}))
        share, own_numel = shard_numel(numel, self._shares), int(graph.stop[call] - graph.start[call])
        return None if own_numel == share else f"{text} puts in {own_numel} elements of a share of {share}"


def _last_before(rows: IntColumn, others: IntColumn) -> IntColumn:
    """For each of ``rows`` the last of ``others`` before it, ``NONE`` without any."""
    padded = np.concatenate([[NONE], others])
    result: IntColumn = padded[np.searchsorted(others, rows)]
    return result


def names_text(names: Sequence[str]) -> str:
    """The first few names of parameters; the rest are counted."""
    shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMED])
    return shown if len(names) <= MOST_NAMED else f"{shown} and {len(names) - MOST_NAMED} more"


_SUM = "0F0 0B0 0REDUCE_GRAD:dp 0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{group=0 range=0..16}"


def _example(*ranks: tuple[str, str]) -> str:
    gather = "0GATHER_WEIGHT:dp 0GATHER_WEIGHT:dp/0.ALL_GATHER:dp"
    programs = (f"{_SUM} 0STEP{{range={updated}}} {gather}{{group=0 range={put_in}}}" for updated, put_in in ranks)
    return of_ranks("dp: 0 1", *programs)


OTHERS = RuleDoc(
    code="PP615",
    title="a gather of updated weights moves other elements than were updated",
    explanation=(
        "An all-gather writes the elements of the k-th member of its group to the k-th position. A rank that puts in "
        "elements that it has not updated returns old values to all; a rank that puts in another position's elements "
        "exchanges parts of weights. Sizes are right, and all ranks get the same wrong weights. Ranges on the rows "
        "are elements of the flat buffer of the stage; if every member's range begins at 0, they are sizes."
    ),
    wrong=_example(("0..8", "8..16"), ("8..16", "0..8")),
    right=_example(("0..8", "0..8"), ("8..16", "8..16")),
)


def _check_elements(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    rows = np.flatnonzero(graph.target_kind == KIND_CODE[OpKind.GATHER_WEIGHT])
    is_gather = (graph.kind[rows] == KIND_CODE[OpKind.ALL_GATHER]) & (graph.group[rows] != NONE)
    rows = rows[is_gather & (graph.stop[rows] > graph.start[rows])]
    if not graph.start[rows].any():
        return
    calls_of_position: dict[tuple[int, int], dict[int, int]] = {}
    for op in rows.tolist():
        calls_of_position.setdefault((int(graph.group[op]), int(graph.position[op])), {})[int(graph.rank[op])] = op
    gathered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    last: dict[tuple[int, int], int] = {}
    exchanged: list[tuple[int, int, int]] = []
    for (group, _), calls in calls_of_position.items():
        members = [calls[rank] for rank in graph.groups[group].ranks if rank in calls]
        if len(members) == len(calls) == graph.groups[group].size and graph.start[members].any():
            exchanged += _exchanged(graph, members)
            for op in members:
                key = int(graph.rank[op]), int(graph.stage[op])
                gathered.setdefault(key, []).append((int(graph.start[op]), int(graph.stop[op])))
                last[key] = op
    others = []
    for key, updated in subject.once(stated_updates).items():
        difference = compare(gathered[key], updated) if key in gathered else None
        if difference is not None:
            others.append((last[key], _fact(gathered[key], updated, difference)))
    if others:
        op, fact = others[0]
        yield _finding(subject, [op], len(others), fact, "put in the elements that the rank updates")
    elif exchanged:
        first, op, low = exchanged[0]
        size = int(graph.stop[op] - graph.start[op])
        fact = f"puts in elements {graph.start[op]}..{graph.stop[op]}, which all members take for {low}..{low + size}"
        fix = "order the group's ranks by the elements that they update"
        yield _finding(subject, [first, op], len(exchanged), fact, fix)


def _exchanged(graph: OpGraph, members: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first member's call, a member's, the position of its elements), for elements that do not return to it."""
    starts, size = graph.start[members], int(graph.stop[members[0]] - graph.start[members[0]])
    expected = starts[0] + size * np.arange(len(members))
    for index in np.flatnonzero(starts != expected).tolist():
        yield members[0], members[index], int(expected[index])


def _fact(gathered: Ranges, updated: Ranges, difference: Difference) -> str:
    """Fact about a rank that puts in other elements than it has updated."""
    interval = f"{difference.local}..{difference.local + difference.length}"
    if difference.first == NOWHERE:
        return f"puts in elements {ranges_text(gathered)}, and the rank has also updated {interval}"
    return f"puts in elements {interval}, and the rank has updated {ranges_text(updated)}"


def _finding(subject: Subject, ops: Sequence[int], times: int, fact: str, fix: str) -> Finding:
    graph, op = subject.graph, ops[-1]
    more = f" and {times - 1} more" if times > 1 else ""
    where = subject.coords_text(int(graph.rank[op]))
    witness = subject.witness(*dict.fromkeys(ops))
    return OTHERS.finding(f"{where}{more}: {graph.ops[op]} {fact}", help=fix, witness=witness)


RULES: tuple[Rule, ...] = (
    Rule(OTHERS, _check_elements),
    Rule(APART, _check, needs_plan=True),
)
