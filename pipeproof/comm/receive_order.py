"""Order in which ranks post their receives: the order of the sends, or earlier.

A rank that holds several stages may send to another in one order, and that one
may compute in another. Messages have no names on the wire: the k-th receive
gets the k-th message. So receives are posted in the order of the sends, some
of them before the computation that another message is for.

``transport.recv_order`` posts receives before the rank needs them. An early
post lets its message come in while the rank computes. Where
transfers share a FIFO it may also come before a send that its own sender
waits for, and then the step hangs. So there is one order of all messages: that
in which computations end if each takes a unit of time (a whole backward two)
and begins as soon as it can, of equal ones that of the lower rank first. A
receive is not posted before a send of its rank that comes earlier in that
order:

- ``prefetch_one``: just before the computation that precedes the one that needs
  it or, if what that one sends comes earlier, right after that;
- ``send_order``: right after the last send of its rank that comes earlier, which
  puts all transfers of every rank into the one order. PyTorch's pipeline
  runtime has an order of its own by the same idea: a receive goes into its
  rank's program when the send goes into the sender's (``_add_send_recv`` in
  torch/distributed/pipelining/schedules.py), behind what the rank has computed
  by then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from math import inf

import numpy as np

from pipeproof.comm.plan_context import PlanContext
from pipeproof.schedule.asap import Time, asap, even_costs
from pipeproof.schedule.columns import NONE, work_item_of
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import SEND_KINDS, Op, OpKind

Link = tuple[bool, int, int]
"""Forward or backward, from one pipeline rank to another."""


def used_as_sent(graph: OpGraph) -> bool:
    """Return True if each receive that is posted just before its use gets the message that it is for."""
    send = np.flatnonzero(graph.is_kind(SEND_KINDS) & (graph.match != NONE))
    receive = graph.match[send]
    same = (graph.work_item[send] == graph.work_item[receive]) & (abs(graph.stage[send] - graph.stage[receive]) == 1)
    return bool(same.all())


def receives_as_sent(plan: PlanContext) -> tuple[Mapping[int, tuple[Op, ...]], ...]:
    """By pipeline rank and place in its program: the computations whose inputs are received before the one there.

    Places before which only that one's own input is received are left out.
    """
    sent: dict[Link, list[Op]] = {}
    for rank, program in enumerate(plan.programs):
        for op in program:
            for user, link in uses_of(plan, rank, op):
                sent.setdefault(link, []).append(user)
    send_index = {(link, user): place for link, users in sent.items() for place, user in enumerate(users)}
    return tuple(_posts(plan, rank, sent, send_index) for rank in range(len(plan.programs)))


def _posts(
    plan: PlanContext, rank: int, sent: Mapping[Link, list[Op]], send_index: Mapping[tuple[Link, Op], int]
) -> dict[int, tuple[Op, ...]]:
    posted = dict.fromkeys(sent, 0)
    posts: dict[int, tuple[Op, ...]] = {}
    for place, op in enumerate(plan.programs[rank]):
        link, user = input_link(plan, rank, op)
        if link is None or (link, user) not in send_index:
            continue  # nothing comes from another rank, or nobody sends it: then the rules speak
        first, index = posted[link], send_index[link, user]
        posted[link] = max(first, index + 1)
        if first != index:
            posts[place] = tuple(sent[link][first : index + 1])
    return posts


def uses_of(plan: PlanContext, rank: int, op: Op) -> Iterator[tuple[Op, Link]]:
    """The computation of another rank that needs what this one makes; backwards are all named B."""
    forward = op.kind is OpKind.FORWARD
    stage = op.stage + 1 if forward else op.stage - 1
    if op.kind is not OpKind.BACKWARD_WEIGHT and 0 <= stage < len(plan.owner):
        owner = int(plan.owner[stage, work_item_of(op, plan.num_splits)])
        if owner not in (rank, NONE):
            kind = OpKind.FORWARD if forward else OpKind.BACKWARD
            yield Op(kind, stage, op.micro_batch, split=op.split), (forward, rank, owner)


def input_link(plan: PlanContext, rank: int, op: Op) -> tuple[Link | None, Op]:
    """(where the input of a computation comes from, the computation as ``uses_of`` names it)."""
    forward = op.kind is OpKind.FORWARD
    stage = op.stage - 1 if forward else op.stage + 1
    kind = OpKind.FORWARD if forward else OpKind.BACKWARD
    user = Op(kind, op.stage, op.micro_batch, split=op.split)
    if op.kind is OpKind.BACKWARD_WEIGHT or not 0 <= stage < len(plan.owner):
        return None, user
    owner = int(plan.owner[stage, work_item_of(op, plan.num_splits)])
    return (None if owner in (rank, NONE) else (forward, owner, rank)), user


_MessageKey = tuple[Time | float, int, int]
"""Key of a message in the global order: the end of its computation, and the rank and place of that."""

_NEVER: _MessageKey = (inf, 0, 0)

Posts = Mapping[int, tuple[Op, ...]]
"""By place in a rank's program, the computations whose inputs are received before the one there."""


def early_receives(plan: PlanContext, most: int | None) -> tuple[Posts, ...]:
    """By pipeline rank, the receives before each place, at most ``most`` computations ahead of their use (None: any).

    A pair that overlaps counts as one. Places before which only that one's own
    input is received are left out, as in ``receives_as_sent``. Of a program
    that never ends, which the rules speak of, receives are posted just in time.
    """
    as_used = receives_as_sent(plan)
    try:
        timed = asap(plan.schedule, even_costs(plan.spec.num_stages))
    except ValueError:
        return as_used
    keys: dict[tuple[Link, Op], _MessageKey] = {}
    sent: list[dict[int, _MessageKey]] = [{} for _ in plan.programs]
    for rank, program in enumerate(plan.programs):
        for place, op in enumerate(program):
            for user, link in uses_of(plan, rank, op):
                keys[link, user] = sent[rank][place] = (timed.ends[rank][place], rank, place)
    return tuple(_Rank(plan, rank, sent[rank], keys).posts(as_used[rank], most) for rank in range(len(sent)))


class _Rank:
    """The entries of one rank's program: computations one by one, those that overlap in twos."""

    def __init__(
        self, plan: PlanContext, rank: int, sent: Mapping[int, _MessageKey], keys: Mapping[tuple[Link, Op], _MessageKey]
    ) -> None:
        self._plan, self._rank, self._keys = plan, rank, keys
        self._program = plan.programs[rank]
        seconds = {place + 1 for place in plan.schedule.pairs_of(rank)}
        self._begins = [place for place in range(len(self._program)) if place not in seconds]
        self._sending: list[int] = []
        """The entries that send, and below the key of the first message of each: in order, as time is."""
        self._sent: list[_MessageKey] = []
        for entry, places in enumerate(self._entries()):
            key = min((sent[place] for place in places if place in sent), default=None)
            if key is not None:
                self._sending.append(entry)
                self._sent.append(key)

    def _entries(self) -> list[range]:
        ends = [*self._begins[1:], len(self._program)]
        return [range(begin, end) for begin, end in zip(self._begins, ends, strict=True)]

    def posts(self, as_used: Posts, most: int | None) -> Posts:
        """The receives before each place; ``as_used`` has those of receives just in time."""
        received_at: list[list[tuple[_MessageKey, Op]]] = [[] for _ in self._begins]
        for entry, places in enumerate(self._entries()):
            first = 0 if most is None else max(0, entry - most)
            for place in places:
                for user in as_used.get(place, (self._program[place],)):
                    link, name = input_link(self._plan, self._rank, user)
                    if link is not None:
                        key = self._keys.get((link, name), _NEVER)
                        received_at[min(entry, max(first, self._after_sends_before(key)))].append((key, user))
        posts: dict[int, tuple[Op, ...]] = {}
        for places, received in zip(self._entries(), received_at, strict=True):
            users = tuple(user for _, user in sorted(received, key=lambda message: message[0]))
            if users != self._own(places):
                posts |= dict.fromkeys(places, ()) | {places[0]: users}
        return posts

    def _own(self, places: Sequence[int]) -> tuple[Op, ...]:
        """The computations of an entry that need something from another rank."""
        ops = [self._program[place] for place in places]
        return tuple(op for op in ops if input_link(self._plan, self._rank, op)[0] is not None)

    def _after_sends_before(self, key: _MessageKey) -> int:
        """The first entry behind all sends of the rank that come earlier than a message."""
        earlier = bisect_left(self._sent, key)
        return self._sending[earlier - 1] + 1 if earlier else 0
