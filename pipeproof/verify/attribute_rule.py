"""144: every attribute of a row has a meaning there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeproof.diagnostics.finding import Finding, RuleDoc
from pipeproof.diagnostics.problems import listed
from pipeproof.schedule.columns import FREE, NONE, READ, WRITE, IntColumn
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import CHILD_KINDS, KIND_CODE, KINDS, TRANSFER_KINDS, OpKind
from pipeproof.verify.subject import Rule, Subject

# The attributes that each kind of row may have; any other attribute would be ignored, and is an error (PP144).
#
# A row is an operation with attributes (``columns.Row``). An attribute has a
# meaning on a row only if something reads it there: the order of operations,
# the matching of messages, the lifetimes of buffers, or the sums of gradients.
# ``TABLE`` is the one list of these meanings:
#
# - ``queue`` is on every row: each row is an entry of some queue.
# - ``batch`` joins operations into one call. A WAIT or a FREE is not part of a
#   call: it names an operation.
# - ``reads``, ``writes`` and ``frees`` name memory that an operation uses while
#   it runs. A WAIT uses none, a FREE only frees, and an exchange of shapes and
#   a barrier carry no elements.
# - A PART or WEIGHTS is not part of a call: parts have an order. Its computation has the sums and scales.
# - ``peer`` and ``communicator`` select the channel of a transfer. A broadcast
#   has a peer too: its root.
# - ``tensor`` and ``range`` are the elements that a transfer carries, a SLICE
#   or a GATHER moves, a collective puts in, or a STEP updates. An exchange of
#   shapes names the tensor whose shape it is, and no elements. ``shift`` moves
#   such a range from one TP rank to the next; a collective has the same range
#   on all of them.
# - ``group`` is the set of ranks that issue a collective together.
# - ``reduction`` is the operator of a reduction. On B and W it can only be
#   ``overwrite``: the gradient is written, not added. A forward and an
#   input-gradient operation add to no weight gradient. A REDUCE_GRAD with
#   collectives below it computes nothing by itself, so they have the reduction.
#   Below another operation every collective has one, because the description of
#   a layer gives each the default ``sum``; on those that only move data it
#   states nothing else.
# - ``scale`` multiplies: on F the losses of its stage; on B and W the
#   contribution to the weight gradients; on I, SEND_B and RECV_B the gradient
#   that goes to the previous stage, and so all contributions of earlier stages;
#   on SCALE_GRAD and on the sums of gradients the accumulated gradient. Forward
#   transfers have none: a scaled activation would make another model, whose
#   gradients are not a multiple of the declared ones.


ATTRIBUTES = (
    "peer", "tensor", "range", "shift", "group", "batch", "queue", "communicator", "reduction", "scale",
    "reads", "writes", "frees",
)  # fmt: skip
"""The attributes of a row, by their keys in the text form."""


@dataclass(frozen=True, slots=True)
class Legal:
    """The attributes that rows of some ``kinds`` may have, and the values that ``reduction`` may have.

    ``below`` restricts this to collectives below an operation of these kinds,
    ``has_children`` to operations with collectives below them, ``with_direct``
    to programs with direct edges: a scale on one way of a gradient is not
    followed where there are several.
    """

    kinds: str
    attributes: str
    reductions: str = ""
    below: str = ""
    has_children: bool = False
    with_direct: bool = False


_RUNS = "queue batch reads writes frees"
_MESSAGE = "peer communicator tensor range shift"
_PARENTS = "F B I W REDUCE_GRAD GATHER_WEIGHT"

TABLE = (
    Legal("F I SCALE_GRAD", f"{_RUNS} scale"),
    Legal("B W", f"{_RUNS} scale reduction", "overwrite"),
    Legal("SEND_F RECV_F", f"{_RUNS} {_MESSAGE}"),
    Legal("SEND_B RECV_B", f"{_RUNS} {_MESSAGE} scale"),
    Legal("I", _RUNS, with_direct=True),
    Legal("SEND_B RECV_B", f"{_RUNS} {_MESSAGE}", with_direct=True),
    Legal("SEND_META_F RECV_META_F SEND_META_B RECV_META_B", "queue batch peer communicator tensor"),
    Legal("SLICE_F SLICE_B", f"{_RUNS} tensor range shift"),
    Legal("GATHER_F GATHER_B", f"{_RUNS} tensor range shift group"),
    Legal("WAIT", "queue"),
    Legal("FREE", "queue frees"),
    Legal("UNSHARD RESHARD GATHER_WEIGHT OFFLOAD RELOAD", _RUNS),
    Legal("STEP", f"{_RUNS} range"),
    Legal("REDUCE_GRAD", f"{_RUNS} group scale reduction", "sum avg max"),
    Legal("REDUCE_GRAD", f"{_RUNS} group scale", has_children=True),
    Legal("ALL_REDUCE REDUCE_SCATTER", f"{_RUNS} group tensor range reduction", "sum avg max"),
    Legal("ALL_REDUCE REDUCE_SCATTER", f"{_RUNS} group tensor range reduction scale", "sum avg max", "REDUCE_GRAD"),
    Legal("ALL_GATHER ALL_TO_ALL", f"{_RUNS} group tensor range"),
    Legal("ALL_GATHER ALL_TO_ALL", f"{_RUNS} group tensor range reduction", "sum", _PARENTS),
    Legal("PART WEIGHTS", "queue reads writes frees"),
    Legal("BROADCAST", f"{_RUNS} group tensor range peer"),
    Legal("BARRIER", "queue batch group"),
)
"""By kind; a later entry for a part of a kind's rows replaces an earlier one."""


MEANINGLESS = RuleDoc(
    code="PP144",
    title="an attribute has no meaning on its row",
    explanation=(
        "Each kind of operation has its own attributes; another one would be ignored, and its intended meaning would "
        "not be checked. A reduction is an operator of sums; on B and W it can be `overwrite`. A scale multiplies a "
        "loss (F), a contribution to weight gradients (B, W), the gradient that goes to the previous stage "
        "(I, SEND_B, RECV_B), or a sum of gradients. `pipeproof/verify/attribute_rule.py` lists all meanings."
    ),
    wrong="rank 0: 0F0{reduction=overwrite} 0B0 0STEP{scale=1/2}",
    right="rank 0: 0F0 0B0{reduction=overwrite} 0SCALE_GRAD{scale=1/2} 0STEP",
)

_BUFFERS = {"reads": READ, "writes": WRITE, "frees": FREE}
_NAMED = ("reduction", "scale")
"""Attributes whose values have findings of their own."""


def _check(subject: Subject) -> Iterator[Finding]:
    """One finding for each attribute and kind of row, at its first row."""
    graph = subject.graph
    has_direct = bool(subject.lowered is not None and subject.lowered.direct)
    entry = _entries(graph, has_direct=has_direct or bool((graph.index[graph.is_kind(TRANSFER_KINDS)] != NONE).any()))
    for attribute in ATTRIBUTES:
        rows = np.flatnonzero(_present(graph, attribute))
        rows = rows[~_is_legal(graph, rows, entry[rows], attribute)]
        value = graph.columns.values[attribute][rows] if attribute in _NAMED else np.zeros_like(rows)
        _, first, count = np.unique(packed(graph.kind[rows], entry[rows], value), return_index=True, return_counts=True)
        for row, times in sorted(zip(rows[first].tolist(), count.tolist(), strict=True)):
            yield _finding(subject, TABLE[entry[row]], attribute, row, times)


def _entries(graph: OpGraph, *, has_direct: bool) -> IntColumn:
    """The entry of ``TABLE`` that each row is under."""
    values = graph.columns.values
    table = np.full((len(KINDS), len(KINDS) + 1), NONE, dtype=np.int64)  # the last column: not below an operation
    parents = np.zeros(len(values["kind"]), dtype=bool)
    parents[graph.parent[graph.parent != NONE]] = True
    of_parents = []
    for number, legal in enumerate(TABLE):
        kinds = [KIND_CODE[OpKind(kind)] for kind in legal.kinds.split()]
        below = [KIND_CODE[OpKind(kind)] for kind in legal.below.split()]
        if legal.with_direct and not has_direct:
            continue
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
    """Mask of ``rows`` whose value of an attribute is allowed."""
    if attribute != "reduction":
        return np.array([attribute in legal.attributes.split() for legal in TABLE])[entry]
    allowed = [[name in legal.reductions.split() for name in graph.reduction_names] for legal in TABLE]
    return np.array(allowed)[entry, graph.reduction[rows]]


def _finding(subject: Subject, legal: Legal, attribute: str, row: int, times: int) -> Finding:
    from pipeproof.schedule.formats.text_tokens import attribute_text  # as a program text writes it

    op = subject.graph.ops[row]
    value = attribute_text(subject.graph.row(row), attribute)
    names = listed([f"`{name}`" for name in ATTRIBUTES if name in legal.attributes.split()], "and")
    operators = f" (`reduction`: {listed(legal.reductions.split())})" if legal.reductions else ""
    more = f", and {times - 1} more of its kind" if times > 1 else ""
    return MEANINGLESS.finding(
        f"{subject.coords_text(int(subject.graph.rank[row]))}: `{attribute}={value}` has no meaning on {op}{more}; "
        f"it can have {names}{operators}",
        help=f"remove `{attribute}`, or put it on the row that it describes",
        witness=subject.witness(row),
    )


RULES = (Rule(MEANINGLESS, _check),)
