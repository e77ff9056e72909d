"""PP615: an all-gather of updated elements takes each from the rank that updated it, and returns it to its place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import KIND_CODE, OpKind
from pipeproof.stages.describe.index_map import NOWHERE, Difference
from pipeproof.verify.gradients.kept_elements import Ranges, compare, ranges_text, stated_updates
from pipeproof.verify.subject import Rule, Subject

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


def _check(subject: Subject) -> Iterator[Finding]:
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


RULES = (Rule(OTHERS, _check),)
