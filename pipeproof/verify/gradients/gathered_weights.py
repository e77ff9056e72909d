"""PP612, PP615: every rank has whole weights again, in their order, after an update that is sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from pipeproof.diagnostics.finding import ExampleKind, Finding, RuleDoc
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import AXES, KIND_CODE, OpKind
from pipeproof.stages.describe.index_map import NOWHERE, Difference
from pipeproof.stages.describe.layer import Parameter
from pipeproof.stages.describe.training_state import num_shards, shard_numel
from pipeproof.verify.gradients.kept_elements import Ranges, compare, ranges_text, stated_updates
from pipeproof.verify.subject import Rule, Subject, of_small_plan

_MOST_NAMED = 3
_TOPOLOGY = "{'pp': 2, 'dp': 2}, 'memory': {'shard_optimizer': 'dp'}"

APART = RuleDoc(
    code="PP612",
    title="an update is sharded over ranks, and the weights are not gathered",
    explanation=(
        "With `memory.shard_optimizer: dp` each dp rank gets its share of a gradient's sum and updates its share of "
        "the weight. After the STEP the shares must be gathered over all of dp, weight by weight. A weight that is "
        "left out, gathered before the step, or gathered over a part of the ranks is new in one share (on each rank "
        "another one) and old in the others: nothing fails, and the replicas drift apart. Without a sharded optimizer "
        "each rank updates whole weights and needs whole sums: a reduce-scatter leaves only one share of them."
    ),
    wrong=of_small_plan(_TOPOLOGY, "rows = [[r for r in own if 'GATHER_WEIGHT' not in str(r.op)] for own in rows]"),
    right=of_small_plan(_TOPOLOGY),
    kind=ExampleKind.PYTHON,
)


def _check(subject: Subject) -> Iterator[Finding]:
    if num_shards(subject.plan.spec) > 1:
        yield from _Gathers(subject).findings()
    else:
        yield from _scattered(subject)


def _scattered(subject: Subject) -> Iterator[Finding]:
    """Sums of which a rank has one share, where it updates whole weights."""
    graph = subject.graph
    scatters = (graph.kind == KIND_CODE[OpKind.REDUCE_SCATTER]) & (graph.target_kind == KIND_CODE[OpKind.REDUCE_GRAD])
    found = np.flatnonzero(scatters).tolist()
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield APART.finding(
            f"{subject.coords_text(int(graph.rank[found[0]]))}: {graph.ops[found[0]]}{more} leaves a share of a sum, "
            "and the plan's optimizer updates whole weights",
            location=subject.locate("schedule"),
            help="issue ALL_REDUCE, or set `memory.shard_optimizer: dp`",
            witness=subject.witness(found[0]),
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

    def findings(self) -> Iterator[Finding]:
        """One for each thing that is wrong, with the first of the places where it is."""
        wrong: dict[str, list[tuple[int, list[int]]]] = {}
        for step in self._steps.tolist():
            for fact, ops in self._of_step(step):
                wrong.setdefault(fact, []).append((step, ops))
        for fact, places in wrong.items():
            step, ops = places[0]
            rank = int(self._graph.rank[step])
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            yield APART.finding(
                f"{self._subject.coords_text(rank)}{more}: {fact}",
                location=self._subject.locate("memory", "shard_optimizer"),
                help="gather each weight of the stage once over all of dp, after its STEP",
                witness=self._subject.witness(step, *ops),
            )

    def _of_step(self, step: int) -> Iterator[tuple[str, list[int]]]:
        """(fact, operations) for what is wrong behind one STEP."""
        graph, plan = self._graph, self._plan
        rank, stage = int(graph.rank[step]), int(graph.stage[step])
        coords = plan.mesh.coords(graph.global_rank[rank])
        if coords["pp"] not in plan.holders[stage]:
            return  # a step of a stage that is elsewhere: PP128
        weights = plan.weights_of(stage, coords["pp"])
        calls = self._of_stage(self._calls, rank, stage)
        if not len(self._calls):  # a program that lists no collectives gathers with one row what there is
            wholes = self._of_stage(self._wholes, rank, stage)
            late = wholes[wholes > step]
            if weights and not len(late):
                yield self._nothing(weights, wholes.tolist(), step)
            return
        if weights and not len(calls):
            yield self._nothing(weights, [], step)
            return
        missing = []
        for index, weight in enumerate(weights):
            selected = calls[graph.index[calls] == index].tolist()
            if not selected:
                missing.append(weight.name)
                continue
            fact = self._fact(weight, selected[-1], step)
            if fact is not None:
                yield fact, selected[-1:]
        if missing:
            yield f"{graph.ops[step]} updates a share of {_names(missing)}, and nothing gathers the others", []

    def _of_stage(self, rows: IntColumn, rank: int, stage: int) -> IntColumn:
        selected: IntColumn = rows[(self._graph.rank[rows] == rank) & (self._graph.stage[rows] == stage)]
        return selected

    def _nothing(self, weights: Sequence[Parameter], early: list[int], step: int) -> tuple[str, list[int]]:
        op = self._graph.ops[step]
        if early:
            return f"{self._graph.ops[early[0]]} comes before {op}, which updates what it gathers", early[:1]
        return f"{op} updates a share of {_names([w.name for w in weights])}, and nothing gathers the others", []

    def _fact(self, weight: Parameter, call: int, step: int) -> str | None:
        """Fact about a wrong gather of one weight; None if it is correct."""
        graph, mesh = self._graph, self._plan.mesh
        text = f"{graph.ops[call]}, of `{weight.name}`,"
        if call < step:
            return f"{text} comes before {graph.ops[step]}, which updates what it gathers"
        size = graph.groups[int(graph.group[call])].size if graph.group[call] != NONE else 0
        if graph.axis[call] != AXES.index("dp") or size != self._shares:
            return f"{text} is over {size} ranks, and {self._shares} dp ranks have a share each"
        numel = prod(weight.local_shape({axis: mesh.size(axis) for axis in ("tp", "ep")}))
        share, found = shard_numel(numel, self._shares), int(graph.stop[call] - graph.start[call])
        return None if found == share else f"{text} puts in {found} elements of a share of {share}"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"


_SUM = "0F0 0B0 0REDUCE_GRAD:dp 0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{group=0 range=0..16}"


def _example(*ranks: tuple[str, str]) -> str:
    rows = [
        f"rank {rank}: {_SUM} 0STEP{{range={updated}}} 0GATHER_WEIGHT:dp "
        f"0GATHER_WEIGHT:dp/0.ALL_GATHER:dp{{group=0 range={given}}}"
        for rank, (updated, given) in enumerate(ranks)
    ]
    return "\n".join(["group dp: 0 1", *rows])


OTHERS = RuleDoc(
    code="PP615",
    title="a gather of updated weights moves other elements than were updated",
    explanation=(
        "An all-gather writes the elements of the k-th member of its group to the k-th place. A rank that puts in "
        "elements that it has not updated returns old values to all; one that puts in those of another place "
        "exchanges parts of weights. Sizes are right, and all ranks get the same wrong weights. Ranges on the rows "
        "are elements of the flat buffer of the stage; where no member's range begins behind 0, they are sizes."
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
    given: dict[tuple[int, int], list[tuple[int, int]]] = {}
    last: dict[tuple[int, int], int] = {}
    exchanged: list[tuple[int, int, int]] = []
    for (group, _), calls in calls_of_position.items():
        members = [calls[rank] for rank in graph.groups[group].ranks if rank in calls]
        if len(members) == len(calls) == graph.groups[group].size and graph.start[members].any():
            exchanged += _exchanged(graph, members)
            for op in members:
                key = int(graph.rank[op]), int(graph.stage[op])
                given.setdefault(key, []).append((int(graph.start[op]), int(graph.stop[op])))
                last[key] = op
    others = []
    for key, updated in subject.once(stated_updates).items():
        found = compare(given[key], updated) if key in given else None
        if found is not None:
            others.append((last[key], _fact(given[key], updated, found)))
    if others:
        op, fact = others[0]
        yield _finding(subject, [op], len(others), fact, "put in the elements that the rank updates")
    elif exchanged:
        first, op, place = exchanged[0]
        size = int(graph.stop[op] - graph.start[op])
        fact = (
            f"puts in elements {graph.start[op]}..{graph.stop[op]}, which all members take for {place}..{place + size}"
        )
        fix = "order the group's ranks by the elements that they update"
        yield _finding(subject, [first, op], len(exchanged), fact, fix)


def _exchanged(graph: OpGraph, members: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first member's call, a member's, the place of its elements), for those that do not return to their place."""
    starts, size = graph.start[members], int(graph.stop[members[0]] - graph.start[members[0]])
    expected = starts[0] + size * np.arange(len(members))
    for place in np.flatnonzero(starts != expected).tolist():
        yield members[0], members[place], int(expected[place])


def _fact(given: Ranges, updated: Ranges, found: Difference) -> str:
    """Fact about a rank that puts in other elements than it has updated."""
    here = f"{found.local}..{found.local + found.length}"
    if found.first == NOWHERE:
        return f"puts in elements {ranges_text(given)}, and the rank has also updated {here}"
    return f"puts in elements {here}, and the rank has updated {ranges_text(updated)}"


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
