"""144: every attribute of a row has a meaning there; the meanings are ``schedule/attribute_table.py``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.problems import listed
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.attribute_table import ATTRIBUTES, TABLE, Legal
from pipeproof.schedule.columns import FREE, NONE, READ, WRITE, IntColumn
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.formats.text_tokens import attribute_text
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import CHILD_KINDS, KIND_CODE, KINDS, OpKind
from pipeproof.verify.subject import Rule, Subject

MEANINGLESS = RuleDoc(
    code="PP144",
    title="an attribute has no meaning on its row",
    explanation=(
        "Each kind of operation has its own attributes; another one would be ignored, and what the program means by "
        "it would not be checked. A reduction is an operator of sums; on B and W it can be `overwrite`. A scale is "
        "that of a loss (F), of what a backward adds (B, W), of the gradient that goes to the stage before "
        "(I, SEND_B, RECV_B), or of a sum of gradients. `pipeproof/schedule/attribute_table.py` lists all meanings."
    ),
    wrong="rank 0: 0F0{reduction=overwrite} 0B0 0STEP{scale=1/2}",
    right="rank 0: 0F0 0B0{reduction=overwrite} 0SCALE_GRAD{scale=1/2} 0STEP",
)

_BUFFERS = {"reads": READ, "writes": WRITE, "frees": FREE}
_NAMED = ("reduction", "scale")
"""Attributes whose values have findings of their own."""


def _check(subject: Subject) -> Iterator[Finding]:
    """One finding for each attribute and kind of row, at the first of its rows."""
    graph = subject.graph
    entry = _entries(graph)
    for attribute in ATTRIBUTES:
        rows = np.flatnonzero(_present(graph, attribute))
        rows = rows[~_is_legal(graph, rows, entry[rows], attribute)]
        value = graph.columns.values[attribute][rows] if attribute in _NAMED else np.zeros_like(rows)
        _, first, count = np.unique(packed(graph.kind[rows], entry[rows], value), return_index=True, return_counts=True)
        for row, times in sorted(zip(rows[first].tolist(), count.tolist(), strict=True)):
            yield _finding(subject, TABLE[entry[row]], attribute, row, times)


def _entries(graph: OpGraph) -> IntColumn:
    """The entry of ``TABLE`` that each row is under."""
    values = graph.columns.values
    table = np.full((len(KINDS), len(KINDS) + 1), NONE, dtype=np.int64)  # the last column: not below an operation
    parents = np.zeros(len(values["kind"]), dtype=bool)
    parents[graph.parent[graph.parent != NONE]] = True
    of_parents = []
    for number, legal in enumerate(TABLE):
        kinds = [KIND_CODE[OpKind(kind)] for kind in legal.kinds.split()]
        below = [KIND_CODE[OpKind(kind)] for kind in legal.below.split()]
        if legal.has_children:
            of_parents.append((number, parents & np.isin(values["kind"], kinds)))
        else:
            table[np.ix_(kinds, below) if below else kinds] = number
    is_child = graph.is_kind(CHILD_KINDS)
    entry = table[values["kind"], np.where(is_child, values["target_kind"], NONE)]
    for number, rows in of_parents:
        entry[rows] = number
    return entry


def _present(graph: OpGraph, attribute: str) -> BoolColumn:
    """Mask of the rows that have an attribute."""
    values = graph.columns.values
    if attribute in _BUFFERS:
        mask = np.zeros(graph.num_ops, dtype=bool)
        mask[graph.accesses.op[graph.accesses.mode == _BUFFERS[attribute]]] = True
        return mask
    if attribute == "range":
        return np.asarray((values["start"] != 0) | (values["stop"] != 0))
    return np.asarray(values[attribute] != (0 if attribute in ("shift", *_NAMED) else NONE))


def _is_legal(graph: OpGraph, rows: IntColumn, entry: IntColumn, attribute: str) -> BoolColumn:
    """Mask of ``rows`` that may have an attribute with the value that they have."""
    if attribute != "reduction":
        return np.array([attribute in legal.attributes.split() for legal in TABLE])[entry]
    allowed = [[name in legal.reductions.split() for name in graph.reduction_names] for legal in TABLE]
    return np.array(allowed)[entry, graph.reduction[rows]]


def _finding(subject: Subject, legal: Legal, attribute: str, row: int, times: int) -> Finding:
    op = subject.graph.ops[row]
    value = attribute_text(subject.graph.row(row), attribute)
    names = listed([f"`{name}`" for name in ATTRIBUTES if name in legal.attributes.split()], "and")
    operators = f" (`reduction`: {listed(legal.reductions.split())})" if legal.reductions else ""
    more = f", and {times - 1} more of its kind" if times > 1 else ""
    return MEANINGLESS.finding(
        f"{subject.coords_text(int(subject.graph.rank[row]))}: `{attribute}={value}` has no meaning on {op}{more}; "
        f"it can have {names}{operators}",
        help=f"remove `{attribute}`, or put it on the row that it is about",
        witness=subject.witness(row),
    )


RULES = (Rule(MEANINGLESS, _check),)
