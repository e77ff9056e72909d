"""PP123 to PP127, PP145: each p2p tensor arrives once, from the rank that made it, and in time; parts are in order.

A tensor flows from the stage that makes it to the rank that computes with it:
an activation to the next stage, a gradient to the one before; on a direct edge
to another later stage, and back. Between two stages of one rank it stays in
memory, in program order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeproof.diagnostics.finding import Finding, OpsWitness, RuleDoc
from pipeproof.schedule.derive import BoolColumn, packed, place_in_group
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import AXES, KIND_CODE, PART_KINDS, SEND_KINDS, OpKind
from pipeproof.verify.completeness import is_expected
from pipeproof.verify.fifo_matching import partner_of
from pipeproof.verify.provenance import DATA_RECEIVES, DATA_SENDS
from pipeproof.verify.subject import Rule, Subject, missing_op, of_ranks


@dataclass(frozen=True)
class _Direction:
    """One direction: its receive, and the offset of the maker's stage from the user's."""

    receive: OpKind
    source: int


_DIRECTIONS = (_Direction(OpKind.RECV_FORWARD, -1), _Direction(OpKind.RECV_BACKWARD, +1))


@dataclass(frozen=True, eq=False)
class _Messages:
    """Transfers of tensors, as seen from the rank that computes with them.

    ``row`` is the transfer, ``is_send`` its end; ``rank``, ``stage`` and
    ``work_item`` are the computation that needs the tensor,
    ``backward`` whether it is a gradient, ``member`` the member of its boundary,
    and ``maker`` the stage that sends it on a direct edge, else NONE.
    """

    row: IntColumn
    is_send: BoolColumn
    rank: IntColumn
    stage: IntColumn
    work_item: IntColumn
    backward: IntColumn
    member: IntColumn
    maker: IntColumn


def _member_names(subject: Subject) -> list[str]:
    """The members of the graph's tensors, and of the plan's edges, which no message of a wrong program may carry."""
    edges = {edge.name for edge in subject.plan.spec.edges} if subject.lowered is not None else set()
    return sorted({tensor.member for tensor in subject.graph.tensors} | edges | {""})


def _messages(subject: Subject) -> _Messages:
    graph = subject.graph
    row = np.flatnonzero(graph.is_kind(DATA_SENDS | DATA_RECEIVES))
    is_send = graph.is_kind(SEND_KINDS)[row]
    backward = graph.is_kind(frozenset({OpKind.SEND_BACKWARD, OpKind.RECV_BACKWARD}))[row].astype(np.int64)
    names = _member_names(subject)
    member_of = np.array([*(names.index(tensor.member) for tensor in graph.tensors), names.index("")], dtype=np.int64)
    return _Messages(
        row,
        is_send,
        np.where(is_send, graph.peer[row], graph.rank[row]),
        np.where(is_send, graph.partner_stage(row), graph.stage[row]),
        graph.work_item[row],
        backward,
        member_of[graph.tensor[row]],
        np.where(graph.index[row] == NONE, NONE, np.where(is_send, graph.stage[row], graph.index[row])),
    )


def _uses(subject: Subject, direction: _Direction) -> BoolColumn:
    """Mask of the entries that compute in a direction."""
    table = subject.computes
    return np.asarray((table.forwards if direction.receive is OpKind.RECV_FORWARD else table.backwards) > 0)


def _needed(subject: Subject, direction: _Direction) -> tuple[IntColumn, IntColumn]:
    """(entries that use a tensor of another stage, the entry of its maker on the same rank or ``NONE``)."""
    table = subject.computes
    source = table.stage + direction.source
    stages = np.array(sorted(subject.stage_owners), dtype=np.int64)
    entries = np.flatnonzero(_uses(subject, direction) & np.isin(source, stages))
    return entries, table.find(table.rank[entries], source[entries], table.work_item[entries])


def _direct_flows(subject: Subject, direction: _Direction) -> list[tuple[str, int, int]]:
    """The (name, maker, user) of each tensor that a plan's direct edges bring to a stage in a direction."""
    if subject.lowered is None:
        return []
    if direction.receive is OpKind.RECV_FORWARD:
        return [(edge.name, edge.producer, user) for edge in subject.lowered.direct for user in edge.consumers]
    edges = [edge for edge in subject.lowered.direct if edge.has_gradient]
    return [(edge.name, user, edge.producer) for edge in edges for user in edge.consumers]


def _is_local(subject: Subject, entries: IntColumn, maker: IntColumn, direction: _Direction) -> BoolColumn:
    """Mask of the entries whose input is made on the same rank: by the plan, else by the rank's program."""
    if subject.lowered is None:
        ran: BoolColumn = maker != NONE
        return ran
    table = subject.computes
    return is_expected(subject, table.rank[entries], table.stage[entries] + direction.source, table.work_item[entries])


NEVER_SENT = RuleDoc(
    code="PP125",
    title="a stage computes with a tensor that is never sent to it",
    explanation=(
        "Every stage but the first reads the activation of the previous stage, every stage but the last the gradient "
        "of the next stage. If neither the send nor the receive is in the programs, no backend notices: the "
        "stage computes with the old contents of its buffer. If a boundary has several tensors, each micro-batch "
        "needs all of them."
    ),
    wrong="rank 0: 0F0 0SEND_F0{peer=1} 0F1 WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1F1",
    right=(
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"
    ),
)


def _check_never_sent(subject: Subject) -> Iterator[Finding]:
    table, messages = subject.computes, _messages(subject)
    expected = is_expected(subject, table.rank, table.stage, table.work_item)
    names = _member_names(subject)
    for backward, direction in enumerate(_DIRECTIONS):
        entries, maker = _needed(subject, direction)
        entries = entries[~_is_local(subject, entries, maker, direction) & expected[entries]]
        mask = (messages.backward == backward) & (messages.maker == NONE)
        owed, member = _owed(subject, entries, messages.stage[mask], messages.member[mask], direction)
        keys = packed(
            np.concatenate([messages.rank[mask], table.rank[owed]]),
            np.concatenate([messages.stage[mask], table.stage[owed]]),
            np.concatenate([messages.work_item[mask], table.work_item[owed]]),
            np.concatenate([messages.member[mask], member]),
        )
        num_sent = len(keys) - len(owed)
        for index in np.flatnonzero(~np.isin(keys[num_sent:], keys[:num_sent])).tolist():
            yield _never_sent(subject, int(owed[index]), direction, names[int(member[index])])
        yield from _check_direct(
            subject, messages, np.flatnonzero((messages.backward == backward) & (messages.maker != NONE)), direction
        )


def _check_direct(subject: Subject, messages: _Messages, rows: IntColumn, direction: _Direction) -> Iterator[Finding]:
    """Yield a finding for each tensor of a direct edge that does not come, by the plan or as in other micro-batches."""
    table, names = subject.computes, _member_names(subject)
    columns = (messages.member, messages.maker, messages.stage)
    flows = {
        (names[member], maker, user) for member, maker, user in zip(*(c[rows].tolist() for c in columns), strict=True)
    }
    owners = subject.stage_owners
    flows |= {
        (name, maker, user)
        for name, maker, user in _direct_flows(subject, direction)
        if owners[maker] != owners[user] and (direction.source > 0 or user in _receivers(subject, name))
    }
    expected = _uses(subject, direction) & is_expected(subject, table.rank, table.stage, table.work_item)
    for name, maker, user in sorted(flows):
        entries = np.flatnonzero(expected & (table.stage == user))
        come = rows[(messages.member[rows] == names.index(name)) & (messages.maker[rows] == maker)]
        keys = packed(
            np.concatenate([messages.rank[come], table.rank[entries]]),
            np.concatenate([messages.stage[come], table.stage[entries]]),
            np.concatenate([messages.work_item[come], table.work_item[entries]]),
        )
        for entry in np.flatnonzero(~np.isin(keys[len(come) :], keys[: len(come)])).tolist():
            yield _never_sent(subject, int(entries[entry]), direction, name, maker)


def _receivers(subject: Subject, name: str) -> tuple[int, ...]:
    plan = subject.plan
    return next(plan.receivers(edge) for edge in plan.direct if edge.name == name)


def _relayed(subject: Subject, direction: _Direction) -> Iterator[tuple[int, int]]:
    """The (stage that gets it, member) of each tensor of an edge that stages pass on, in messages of its own."""
    plan, names = subject.plan, _member_names(subject)
    edges = {edge.name for edge in plan.spec.edges}
    for boundary, edge in enumerate(plan.edges if edges and plan.spec.transport.messages != "packed" else ()):
        for tensor in edge.variants[0]:
            crosses = tensor.has_gradient or direction.source < 0
            if crosses and tensor.member in edges:
                yield (boundary + 1 if direction.source < 0 else boundary), names.index(tensor.member)


def _owed(
    subject: Subject, entries: IntColumn, stage: IntColumn, member: IntColumn, direction: _Direction
) -> tuple[IntColumn, IntColumn]:
    """(entry, member) of each tensor that an entry needs, from (stage, member) of the tensors that arrive.

    If a tensor arrives for one micro-batch, all micro-batches need it. With a plan at least one
    tensor crosses each boundary; a graph alone may leave a boundary out.
    """
    num_members = len(_member_names(subject))
    crossing = np.unique(stage * num_members + member)
    users = subject.computes.stage[entries]
    if subject.lowered is not None:
        crossing = np.concatenate([crossing, np.setdiff1d(users, crossing // num_members) * num_members])
        crossing = np.union1d(
            crossing, [stage * num_members + number for stage, number in _relayed(subject, direction)]
        )
    parts = [np.flatnonzero(np.isin(users * num_members + m, crossing)) for m in range(num_members)]
    owing = np.concatenate(parts)
    return entries[owing], np.repeat(np.arange(num_members), [len(part) for part in parts])


def _never_sent(
    subject: Subject, entry: int, direction: _Direction, member: str, maker_stage: int | None = None
) -> Finding:
    graph, table = subject.graph, subject.computes
    rank, stage, work_item = (int(column[entry]) for column in (table.rank, table.stage, table.work_item))
    receive = graph.op_of(direction.receive, stage, work_item)._replace(index=maker_stage)
    send = partner_of(receive)
    forward = direction.receive is OpKind.RECV_FORWARD
    user = int((table.first[OpKind.FORWARD] if forward else table.first_backward)[entry])
    what = f"`{member}`, {send} to {receive}," if member else f"what {send} would send and {receive} receive"
    makers, users = (_replicas(subject, of, work_item) for of in (send.stage, stage))
    maker = makers[users.index(rank) % len(makers)]  # replicas have one order on every stage
    return NEVER_SENT.finding(
        f"{subject.coords_text(rank)} runs {graph.ops[user]} without {what}: neither is in any program",
        help=f"add {send} to the rank of stage {send.stage} and {receive} with its wait before {graph.ops[user]}",
        witness=OpsWitness(
            (
                missing_op(graph.global_rank[maker], send),
                missing_op(graph.global_rank[rank], receive),
                subject.witness_op(user),
            )
        ),
    )


def _replicas(subject: Subject, stage: int, work_item: int) -> list[int]:
    """The ranks that must compute a work item of a stage. If the stage has copies, only the ranks of one."""
    ranks = np.array(subject.stage_owners[stage], dtype=np.int64)
    due = is_expected(subject, ranks, np.full_like(ranks, stage), np.full_like(ranks, work_item))
    return [int(rank) for rank in ranks[due]]


UNEXPECTED = RuleDoc(
    code="PP126",
    title="a tensor is sent to a stage that does not use it",
    explanation=(
        "Both ends agree, but the message does not belong to the pipeline: the first stage receives an activation, the "
        "last one a gradient, a rank sends a tensor that it does not compute or receives one that it does not use, or "
        "the same tensor crosses twice. At best it costs time; more often a rank has taken another rank's role."
    ),
    wrong="rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 0F0",
    right="rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0",
)


def _check_unexpected(subject: Subject) -> Iterator[Finding]:
    graph, messages = subject.graph, _messages(subject)
    receives = np.flatnonzero(~messages.is_send & (graph.match[messages.row] != NONE))
    row = messages.row[receives]
    send = graph.match[row]
    stage, work_item = messages.stage[receives], messages.work_item[receives]
    source = graph.partner_stage(row)

    def has_no_place(rank: IntColumn, of_stage: IntColumn) -> BoolColumn:
        """Not on a rank that must compute it; a rank that computes nothing is not described, and not blamed."""
        described = np.isin(rank, subject.computes.rank)
        return described & ~is_expected(subject, rank, of_stage, work_item)

    meant = (graph.stage[send] == source) & (graph.work_item[send] == work_item)  # else PP302 reports it
    unused, unmade = meant & has_no_place(graph.rank[row], stage), meant & has_no_place(graph.rank[send], source)
    again = meant & _come_already(graph, row)
    for index in np.flatnonzero(unused | unmade | again).tolist():
        ends = int(send[index]), int(row[index])
        maker, user = graph.ops[ends[0]], graph.ops[ends[1]]
        by_maker = unmade[index] and not unused[index]
        if unused[index]:
            what = f"receives {user}, but has no part in stage {user.stage}, which uses it"
        elif by_maker:
            what = f"sends {maker}, but has no part in stage {maker.stage}, which makes it"
        else:
            what = f"receives {user} again: the same elements of the same tensor have come already"
        yield UNEXPECTED.finding(
            f"{subject.coords_text(int(graph.rank[ends[0 if by_maker else 1]]))} {what}",
            help=f"remove {maker} and {user} with their waits, or compute where the tensor goes",
            witness=subject.witness(*ends),
        )


def _come_already(graph: OpGraph, row: IntColumn) -> BoolColumn:
    """Mask of the receives (in program order) of elements that an earlier receive has already brought."""
    tensor = packed(graph.rank[row], graph.kind[row], graph.stage[row], graph.work_item[row], graph.tensor[row])
    again = np.zeros(len(row), dtype=bool)
    ordered = np.sort(tensor)
    several = np.flatnonzero(np.isin(tensor, ordered[1:][ordered[1:] == ordered[:-1]]))  # none, or several parts
    columns = [graph.peer[row[several]], graph.stop[row[several]], graph.start[row[several]], tensor[several]]
    order = np.lexsort(columns)
    same = np.all([column[order][1:] == column[order][:-1] for column in columns], axis=0)
    again[several[order[1:][same]]] = True
    return again


LOCAL_ORDER = RuleDoc(
    code="PP127",
    title="a stage runs before the stage of the same rank that feeds it",
    explanation=(
        "If a rank holds two neighbouring stages, as at the turn of a V schedule, nothing is sent between them: "
        "only the order of the rank's program ensures that the tensor is ready. No transfer waits for it and no "
        "backend notices."
    ),
    wrong="rank 0: 1F0 0F0 1B0 0B0",
    right="rank 0: 0F0 1F0 1B0 0B0",
)


def _check_local_order(subject: Subject) -> Iterator[Finding]:
    graph, table = subject.graph, subject.computes
    expected = is_expected(subject, table.rank, table.stage, table.work_item)  # PP124 reports the others
    for direction, entries, maker in _feeders(subject):
        local = (maker != NONE) & expected[entries] & expected[maker]
        entries, maker = entries[local], maker[local]
        first = table.first[OpKind.FORWARD] if direction.receive is OpKind.RECV_FORWARD else table.first_backward
        user, feeder = first[entries], first[maker]
        for index in np.flatnonzero(user < feeder).tolist():
            ends = int(user[index]), int(feeder[index])
            early, late = (graph.ops[op_id] for op_id in ends)
            yield LOCAL_ORDER.finding(
                f"{subject.coords_text(int(graph.rank[ends[0]]))} runs {early} before {late}, whose result it reads",
                help=f"move {late} before {early}",
                witness=subject.witness(*ends),
            )


def _feeders(subject: Subject) -> Iterator[tuple[_Direction, IntColumn, IntColumn]]:
    """Entries that use a tensor of another stage, and its maker's entries on the same rank, or ``NONE``."""
    table = subject.computes
    for direction in _DIRECTIONS:
        yield direction, *_needed(subject, direction)
        for _, maker, user in _direct_flows(subject, direction):
            entries = np.flatnonzero(_uses(subject, direction) & (table.stage == user))
            rank, work_item = table.rank[entries], table.work_item[entries]
            yield direction, entries, table.find(rank, np.full_like(rank, maker), work_item)


# 145: the parts of a computation are whole and in order, and nothing else is between them.
#
# Other rules treat a computation with parts as one operation at its own row. This rule makes that correct:
# between that row and its last part there are only rows of computations with parts.


PARTS = RuleDoc(
    code="PP145",
    title="the parts of a computation are out of order",
    explanation=(
        "A computation that alternates with another one is a row of its own, followed by its parts: a PART at its "
        "begin and after each exchange. Thus a PART is before and after every collective. Collectives are issued "
        "together only where the all-gather dispatcher does so. A whole backward also has WEIGHTS, each after the "
        "PARTs that deferred its weight gradients, and the last one at its end. Nothing else is between the row and "
        "the last part: a send there would carry a tensor that is not complete."
    ),
    wrong=of_ranks("ep: 0 1", *["0F0 0F0/0.PART 0F0/1.PART 0F0/0.ALL_TO_ALL:ep{group=0 range=0..8 queue=ep}"] * 2),
    right=of_ranks("ep: 0 1", *["0F0 0F0/0.PART 0F0/0.ALL_TO_ALL:ep{group=0 range=0..8 queue=ep} 0F0/1.PART"] * 2),
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

    def together(first: IntColumn, last: IntColumn) -> BoolColumn:
        same = (graph.kind[first] == graph.kind[last]) & np.isin(graph.kind[last], _TOGETHER)
        return np.asarray(same & (graph.axis[first] == _EP) & (graph.axis[last] == _EP))

    wrong[1:] |= ~begins[1:] & (is_part[1:] == is_part[:-1]) & ~together(rows[:-1], rows[1:])
    # a PART between two that are issued together
    wrong[1:-1] |= together(rows[:-2], rows[2:]) & (parent[:-2] == parent[2:]) & is_part[1:-1]
    return np.sort(rows[wrong])


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
    """Rows between a computation and its last part that belong to no computation with parts."""
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


RULES: tuple[Rule, ...] = (
    Rule(PARTS, _check),
    Rule(NEVER_SENT, _check_never_sent),
    Rule(UNEXPECTED, _check_unexpected),
    Rule(LOCAL_ORDER, _check_local_order),
)
