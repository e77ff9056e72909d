"""In which order ranks post their receives, where that is not the order in which they use what comes.

A rank that holds several stages may send to another in one order, and that one
may compute in another. Messages have no names on the wire: the k-th receive
gets the k-th message. So receives are posted in the order of the sends, some
of them before the computation that another message is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.schedule.columns import NONE, unit_of
from pipeproof.schedule.ops import SEND_KINDS, Op, OpKind
from pipeproof.schedule.optable import OpGraph

if TYPE_CHECKING:
    from pipeproof.comm.lowered import LoweredPlan

Link = tuple[bool, int, int]
"""Forward or backward, from one pipeline rank to another."""


def used_as_sent(graph: OpGraph) -> bool:
    """Whether each receive that is posted just before its use gets the message that it is for."""
    send = np.flatnonzero(graph.is_kind(SEND_KINDS) & (graph.match != NONE))
    receive = graph.match[send]
    same = (graph.unit[send] == graph.unit[receive]) & (abs(graph.stage[send] - graph.stage[receive]) == 1)
    return bool(same.all())


def receives_as_sent(plan: LoweredPlan) -> tuple[Mapping[int, tuple[Op, ...]], ...]:
    """By pipeline rank and place in its program: the computations whose inputs are received before the one there.

    Places before which only that one's own input is received are left out.
    """
    sent: dict[Link, list[Op]] = {}
    for rank, program in enumerate(plan.programs):
        for op in program:
            for user, link in uses_of(plan, rank, op):
                sent.setdefault(link, []).append(user)
    turn = {(link, user): place for link, users in sent.items() for place, user in enumerate(users)}
    return tuple(_posts(plan, rank, sent, turn) for rank in range(len(plan.programs)))


def _posts(
    plan: LoweredPlan, rank: int, sent: Mapping[Link, list[Op]], turn: Mapping[tuple[Link, Op], int]
) -> dict[int, tuple[Op, ...]]:
    posted = dict.fromkeys(sent, 0)
    posts: dict[int, tuple[Op, ...]] = {}
    for place, op in enumerate(plan.programs[rank]):
        link, user = input_link(plan, rank, op)
        if link is None or (link, user) not in turn:
            continue  # nothing comes from another rank, or nobody sends it: then the rules speak
        first, mine = posted[link], turn[link, user]
        posted[link] = max(first, mine + 1)
        if first != mine:
            posts[place] = tuple(sent[link][first : mine + 1])
    return posts


def uses_of(plan: LoweredPlan, rank: int, op: Op) -> Iterator[tuple[Op, Link]]:
    """The computation of another rank that needs what this one makes; backwards are all named B."""
    forward = op.kind is OpKind.FORWARD
    stage = op.stage + 1 if forward else op.stage - 1
    if op.kind is not OpKind.BACKWARD_WEIGHT and 0 <= stage < len(plan.owner):
        owner = int(plan.owner[stage, unit_of(op, plan.num_splits)])
        if owner not in (rank, NONE):
            kind = OpKind.FORWARD if forward else OpKind.BACKWARD
            yield Op(kind, stage, op.micro_batch, split=op.split), (forward, rank, owner)


def input_link(plan: LoweredPlan, rank: int, op: Op) -> tuple[Link | None, Op]:
    """(where the input of a computation comes from, the computation as ``uses_of`` names it)."""
    forward = op.kind is OpKind.FORWARD
    stage = op.stage - 1 if forward else op.stage + 1
    kind = OpKind.FORWARD if forward else OpKind.BACKWARD
    user = Op(kind, op.stage, op.micro_batch, split=op.split)
    if op.kind is OpKind.BACKWARD_WEIGHT or not 0 <= stage < len(plan.owner):
        return None, user
    owner = int(plan.owner[stage, unit_of(op, plan.num_splits)])
    return (None if owner in (rank, NONE) else (forward, owner, rank)), user
