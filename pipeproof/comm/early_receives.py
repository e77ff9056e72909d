"""Receives that are posted before a rank comes to what needs them: ``transport.recv_post``.

To post a receive early lets its message come in while the rank computes. Where
transfers share a FIFO it may also stand before a send that its own sender
waits for, and then the step hangs. So there is one order of all messages: that
in which computations end if each takes a unit of time (a whole backward two)
and begins as soon as it can, of equal ones that of the lower rank first. A
receive is not posted before a send of its rank that comes earlier in that
order:

- ``one_ahead``: just before the computation that precedes the one that needs
  it or, if what that one sends comes earlier, right after that;
- ``as_sent``: right after the last send of its rank that comes earlier, which
  puts all transfers of every rank into the one order. PyTorch's pipeline
  runtime has an order of its own by the same idea: a receive goes into its
  rank's program when the send goes into the sender's (``_add_send_recv`` in
  torch/distributed/pipelining/schedules.py), behind what the rank has computed
  by then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from pipeproof.comm.receive_order import Link, input_link, receives_as_sent, uses_of
from pipeproof.schedule.asap import Time, asap, even_costs
from pipeproof.schedule.ops import Op

if TYPE_CHECKING:
    from pipeproof.comm.lowered import LoweredPlan

_Turn = tuple[Time | float, int, int]
"""Where a message stands in the one order: the end of its computation, the rank and the place of that."""

_NEVER: _Turn = (inf, 0, 0)

Posts = Mapping[int, tuple[Op, ...]]
"""By place in a rank's program, the computations whose inputs are received before the one there."""


def early_receives(plan: LoweredPlan, most: int | None) -> tuple[Posts, ...]:
    """By pipeline rank, what is received where, at most so many computations ahead of its use (None: any number).

    A pair that overlaps counts as one. Places before which only that one's own
    input is received are left out, as in ``receives_as_sent``. Of a program
    that never ends, which the rules speak of, receives are posted just in time.
    """
    as_used = receives_as_sent(plan)
    try:
        timed = asap(plan.schedule, even_costs(plan.spec.num_stages))
    except ValueError:
        return as_used
    turns: dict[tuple[Link, Op], _Turn] = {}
    sent: list[dict[int, _Turn]] = [{} for _ in plan.programs]
    for rank, program in enumerate(plan.programs):
        for place, op in enumerate(program):
            for user, link in uses_of(plan, rank, op):
                turns[link, user] = sent[rank][place] = (timed.ends[rank][place], rank, place)
    return tuple(_Rank(plan, rank, sent[rank], turns).posts(as_used[rank], most) for rank in range(len(sent)))


class _Rank:
    """The entries of one rank's program: computations one by one, those that overlap in twos."""

    def __init__(
        self, plan: LoweredPlan, rank: int, sent: Mapping[int, _Turn], turns: Mapping[tuple[Link, Op], _Turn]
    ) -> None:
        self._plan, self._rank, self._turns = plan, rank, turns
        self._program = plan.programs[rank]
        seconds = {place + 1 for place in plan.schedule.pairs_of(rank)}
        self._begins = [place for place in range(len(self._program)) if place not in seconds]
        self._sending: list[int] = []
        """The entries that send, and below the turn of the first message of each: in order, as time is."""
        self._sent: list[_Turn] = []
        for entry, places in enumerate(self._entries()):
            turn = min((sent[place] for place in places if place in sent), default=None)
            if turn is not None:
                self._sending.append(entry)
                self._sent.append(turn)

    def _entries(self) -> list[range]:
        ends = [*self._begins[1:], len(self._program)]
        return [range(begin, end) for begin, end in zip(self._begins, ends, strict=True)]

    def posts(self, as_used: Posts, most: int | None) -> Posts:
        """What is received before which places; ``as_used`` says it of receives just in time."""
        at: list[list[tuple[_Turn, Op]]] = [[] for _ in self._begins]
        for entry, places in enumerate(self._entries()):
            first = 0 if most is None else max(0, entry - most)
            for place in places:
                for user in as_used.get(place, (self._program[place],)):
                    link, name = input_link(self._plan, self._rank, user)
                    if link is not None:
                        turn = self._turns.get((link, name), _NEVER)
                        at[min(entry, max(first, self._after_sends_before(turn)))].append((turn, user))
        posts: dict[int, tuple[Op, ...]] = {}
        for places, received in zip(self._entries(), at, strict=True):
            users = tuple(user for _, user in sorted(received, key=lambda one: one[0]))
            if users != self._own(places):
                posts |= dict.fromkeys(places, ()) | {places[0]: users}
        return posts

    def _own(self, places: Sequence[int]) -> tuple[Op, ...]:
        """The computations of an entry that need something from another rank."""
        ops = [self._program[place] for place in places]
        return tuple(op for op in ops if input_link(self._plan, self._rank, op)[0] is not None)

    def _after_sends_before(self, turn: _Turn) -> int:
        """The first entry behind all sends of the rank that come earlier than a message."""
        earlier = bisect_left(self._sent, turn)
        return self._sending[earlier - 1] + 1 if earlier else 0
