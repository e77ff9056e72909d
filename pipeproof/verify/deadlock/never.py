"""PP402: what is waited for and never comes, found on the columns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.ops import COLLECTIVE_KINDS, KIND_CODE, SEND_KINDS, OpKind
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding, OpsWitness
from pipeproof.verify.deadlock.verdict import promised
from pipeproof.verify.pairs import partner_of
from pipeproof.verify.subject import Subject, finding, missing_op

NEVER = RuleDoc(
    code="PP402",
    title="a rank waits for something that never comes",
    severity="error",
    explanation=(
        "The operation that is waited for has no counterpart, is posted only later in the program, or was waited "
        "for already; or a member of the group never issues the collective."
    ),
    wrong=("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: WAIT(1RECV_F0) 1RECV_F0{peer=0} 1F0"),
    right=("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
)


def check_never(subject: Subject) -> Iterator[Finding]:
    """Waits that never end, in program order, then collectives that a member never joins."""
    graph = subject.graph
    waits = np.flatnonzero(graph.kind == KIND_CODE[OpKind.WAIT])
    target = graph.waits_for[waits]
    for wait in waits[(target == NONE) | _never_done(graph, promised(subject))[target]].tolist():
        yield _endless(subject, wait)
    yield from _not_joined(subject)


def _never_done(graph: OpGraph, model: ChannelModel) -> BoolColumn:
    """By operation, with one place more for NONE: transfers that need a counterpart that is not there."""
    alone = (graph.channel != NONE) & (graph.match == NONE)
    is_send = graph.is_kind(SEND_KINDS)
    if model.completes == "eager":
        alone &= ~is_send
    elif model.completes == "slots":
        receives = graph.channel[(graph.channel != NONE) & ~is_send]
        num_receives = np.bincount(receives, minlength=len(graph.channels) + 1)
        alone &= ~is_send | (graph.position - model.slots >= num_receives[graph.channel])
    return np.append(alone, False)


def _endless(subject: Subject, wait: int) -> Finding:
    graph = subject.graph
    op, target, rank = graph.ops[wait], int(graph.waits_for[wait]), graph.global_rank[int(graph.rank[wait])]
    assert op.target is not None
    if target == NONE:
        return finding(
            NEVER,
            f"rank {rank} runs {op}, but no {op.target} is under way there",
            help=f"post {op.target} before the wait, and wait for it once",
            witness=OpsWitness((subject.witness_op(wait),)),
        )
    peer, partner = graph.global_rank[int(graph.peer[target])], partner_of(op.target)
    return finding(
        NEVER,
        f"rank {rank} waits for {op.target}, but rank {peer} never issues its counterpart {partner}",
        help=f"add {partner} to rank {peer}",
        witness=OpsWitness((subject.witness_op(wait), missing_op(peer, partner))),
    )


def _not_joined(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    calls = np.flatnonzero(graph.is_kind(COLLECTIVE_KINDS) & (graph.group != NONE))
    counts: IntColumn = np.zeros((len(graph.groups), graph.num_ranks), dtype=np.int64)
    np.add.at(counts, (graph.group[calls], graph.rank[calls]), 1)
    for index in np.flatnonzero(counts.any(axis=1)).tolist():
        group, by_rank = graph.groups[index], counts[index]
        most = int(by_rank.argmax())
        for rank in group.ranks:
            if by_rank[rank] == by_rank[most]:
                continue
            theirs = calls[(graph.group[calls] == index) & (graph.rank[calls] == most)]
            waited, number = int(theirs[by_rank[rank]]), int(by_rank[rank])
            op = graph.ops[waited]
            members = [graph.global_rank[member] for member in group.ranks]
            lacking = graph.global_rank[rank]
            yield finding(
                NEVER,
                f"rank {graph.global_rank[most]} issues {op} on {group.axis} group {members}, but "
                f"rank {lacking} issues only {number} collectives there and never joins it",
                help=f"add {op} to rank {lacking}",
                witness=OpsWitness((subject.witness_op(waited), missing_op(lacking, op))),
            )
