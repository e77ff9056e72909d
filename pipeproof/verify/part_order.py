"""145: the parts of a computation are whole and in order, and nothing else is between them.

Other rules see a computation that takes turns as one operation at its own row. That is true because of this rule:
between that row and its last part is only what belongs to computations that take turns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.derive import BoolColumn, packed, place_in_group
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import AXES, KIND_CODE, PART_KINDS, OpKind
from pipeproof.verify.subject import Rule, Subject


def _example(rank: str) -> str:
    return f"group ep: 0 1\nrank 0: {rank}\nrank 1: {rank}"


PARTS = RuleDoc(
    code="PP145",
    title="the parts of a computation are out of order",
    explanation=(
        "A computation that takes turns with another one is a row of its own, followed by its parts: a PART at its "
        "begin and behind each exchange, so that a PART is before and behind every collective. Collectives are issued "
        "together only where the all-gather dispatcher does so. A whole backward also has WEIGHTS, each behind the "
        "PARTs that deferred its weight gradients, and the last one at its end. Nothing else is between the row and "
        "the last part: a send there would carry a tensor that is not complete."
    ),
    wrong=_example("0F0 0F0/0.PART 0F0/1.PART 0F0/0.ALL_TO_ALL:ep{group=0 range=0..8 queue=ep}"),
    right=_example("0F0 0F0/0.PART 0F0/0.ALL_TO_ALL:ep{group=0 range=0..8 queue=ep} 0F0/1.PART"),
)
_PART, _WEIGHTS, _WHOLE = (KIND_CODE[kind] for kind in (OpKind.PART, OpKind.WEIGHTS, OpKind.BACKWARD))
_TOGETHER = [KIND_CODE[OpKind.ALL_GATHER], KIND_CODE[OpKind.REDUCE_SCATTER]]
_EP = AXES.index("ep")


_MISNUMBERED = "is not the next of its computation", "number parts in their order, from 0"
_MISPLACED = (
    "is not where a PART and an exchange alternate",
    "begin and end with a PART, and put one between each two exchanges",
)
_WRONG_WEIGHTS = (
    "is not followed, or preceded, by the weight gradients that it defers",
    "put WEIGHTS behind the PARTs of a whole backward that defer them, the last one at its end",
)
_BETWEEN = "is between a computation and its last part", "put it before or behind them"


def _check(subject: Subject) -> Iterator[Finding]:
    """One finding for each rank and reason, at the first of its rows."""
    graph = subject.graph
    parts = np.flatnonzero(graph.is_kind(PART_KINDS))
    if not len(parts):
        return
    has_parts = np.zeros(graph.num_ops, dtype=bool)
    has_parts[graph.parent[parts[graph.parent[parts] != NONE]]] = True
    for rows, (what, fix) in (
        (parts[graph.parent[parts] == NONE], ("has no computation before it", "put its computation before it")),
        (_misnumbered(graph, has_parts), _MISNUMBERED),
        (_misplaced(graph, has_parts), _MISPLACED),
        (_wrong_weights(graph, has_parts), _WRONG_WEIGHTS),
        (_between(graph, has_parts), _BETWEEN),
    ):
        _, first, count = np.unique(graph.rank[rows], return_index=True, return_counts=True)
        for row, times in zip(rows[first].tolist(), count.tolist(), strict=True):
            more = f", as {times - 1} more there" if times > 1 else ""
            yield PARTS.finding(
                f"{subject.coords_text(int(graph.rank[row]))}: {graph.ops[row]} {what}{more}",
                help=fix,
                witness=subject.witness(row),
            )


def _of_computations(graph: OpGraph, has_parts: BoolColumn) -> IntColumn:
    """The parts and collectives of computations that have parts, one computation's after another's."""
    rows = np.flatnonzero(graph.parent != NONE)
    rows = rows[has_parts[graph.parent[rows]]]
    return rows[np.argsort(graph.parent[rows], kind="stable")]


def _misnumbered(graph: OpGraph, has_parts: BoolColumn) -> IntColumn:
    """Rows whose index is not their place among the PARTs, the WEIGHTS or the collectives of their computation."""
    rows = _of_computations(graph, has_parts)
    family = np.where(graph.is_kind(PART_KINDS)[rows], graph.kind[rows], NONE)
    return np.sort(rows[graph.index[rows] != place_in_group(packed(graph.parent[rows], family))])


def _misplaced(graph: OpGraph, has_parts: BoolColumn) -> IntColumn:
    """Rows at which PARTs and exchanges do not alternate, or with which a computation wrongly begins or ends."""
    rows = _of_computations(graph, has_parts)
    rows = rows[graph.kind[rows] != _WEIGHTS]
    parent, is_part = graph.parent[rows], graph.kind[rows] == _PART
    begins = np.diff(parent, prepend=NONE) != 0
    ends = np.append(begins[1:], True)
    wrong = (begins | ends) & ~is_part
    before, here = rows[:-1], rows[1:]
    together = (graph.kind[before] == graph.kind[here]) & np.isin(graph.kind[here], _TOGETHER)
    together &= (graph.axis[before] == _EP) & (graph.axis[here] == _EP)
    follows = ~begins[1:]
    wrong[1:] |= follows & (is_part[1:] == is_part[:-1]) & ~together
    apart = np.zeros(len(rows), dtype=bool)  # a PART between two that are issued together
    first, last = rows[:-2], rows[2:]
    same = (graph.kind[first] == graph.kind[last]) & np.isin(graph.kind[last], _TOGETHER)
    same &= (graph.axis[first] == _EP) & (graph.axis[last] == _EP) & (parent[:-2] == parent[2:])
    apart[1:-1] = same & is_part[1:-1]
    return np.sort(rows[wrong | apart])


def _wrong_weights(graph: OpGraph, has_parts: BoolColumn) -> IntColumn:
    """WEIGHTS without a PART whose weight gradients they have, and last PARTs without WEIGHTS behind them."""
    rows = _of_computations(graph, has_parts)
    rows = rows[graph.is_kind(PART_KINDS)[rows]]
    parent, is_weights = graph.parent[rows], graph.kind[rows] == _WEIGHTS
    begins = np.diff(parent, prepend=NONE) != 0
    ends = np.append(begins[1:], True)
    defers = graph.kind[parent] == _WHOLE
    follows_weights = np.append(False, is_weights[:-1])
    wrong = is_weights & (~defers | begins | follows_weights)
    return np.sort(rows[wrong | (ends & defers & ~is_weights)])


def _between(graph: OpGraph, has_parts: BoolColumn) -> IntColumn:
    """Rows between a computation and its last part that are of no computation with parts."""
    rows = _of_computations(graph, has_parts)
    owners = graph.parent[rows]
    belongs = has_parts.copy()
    belongs[rows] = True
    last = np.full(graph.num_ops, NONE, dtype=np.int64)
    np.maximum.at(last, owners, rows)
    inside = np.zeros(graph.num_ops + 1, dtype=np.int64)
    computations = np.flatnonzero(has_parts)
    np.add.at(inside, computations, 1)
    np.add.at(inside, last[computations], -1)
    return np.flatnonzero((np.cumsum(inside[:-1]) > 0) & ~belongs)


RULES = (Rule(PARTS, _check),)
"""The rule on parts."""
