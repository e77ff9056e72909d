"""What is posted and done in a fake world, and when: the deadlock definition as it happens.

The events are those of ``verify.deadlock.events`` and the times those of
``sim.model``, written once more without a whole graph at hand: operations
come one by one, as the ranks issue them. A host that waits simply does not
issue; so what is left of the order is the FIFOs of the channel model.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from functools import partial
from itertools import count

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.schedule.optable import Channel
from pipeproof.testing.fake.clock import FakeTimes
from pipeproof.testing.fake.matching import check_calls, check_pair, fill, results
from pipeproof.testing.fake.operations import Call, Computation, FakeOp, Transfer


class Ends:
    """The sends and the receives of one channel in the order of issue."""

    def __init__(self) -> None:
        self.sends: list[Transfer] = []
        self.receives: list[Transfer] = []

    def other(self, transfer: Transfer) -> Transfer | None:
        """The other end of a message, if it was issued."""
        there = self.receives if transfer.is_send else self.sends
        return there[transfer.position] if transfer.position < len(there) else None

    def awaited(self, send: Transfer, model: ChannelModel) -> int | None:
        """The position of the receive that must be over before a send is done under a buffer; None if none."""
        if model.completes == "slots":
            return send.position - model.slots if send.position >= model.slots else None
        if model.completes == "rendezvous" or model.eager_bytes is None:
            return None
        size = 0
        for earlier in range(send.position, -1, -1):
            size += self.sends[earlier].num_bytes
            if size > model.eager_bytes:
                return earlier
        return None


class Engine:
    """All operations that were issued, and the clock."""

    def __init__(self, num_ranks: int, model: ChannelModel, times: FakeTimes) -> None:
        self.model, self.now_us = model, Fraction(0)
        self.channels: dict[Channel, Ends] = defaultdict(Ends)
        self.calls: dict[tuple[int, int], list[Call]] = defaultdict(list)
        """By group and position, the members' parts that were issued."""
        self.came: dict[Hashable, set[int]] = defaultdict(set)
        """By connection, the ranks that have come to open it."""
        self._times = times
        self._last: list[dict[Hashable, Sequence[FakeOp]]] = [{} for _ in range(num_ranks)]
        self._followers: dict[FakeOp, list[FakeOp]] = defaultdict(list)
        self._missing: dict[FakeOp, int] = {}
        """By the first member of a call that is not posted, how many operations it waits for."""
        self._held: dict[tuple[Channel, int], list[Transfer]] = defaultdict(list)
        """Sends that wait for room, by the receive that makes it."""
        self._agenda: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[Fraction, int, Callable[[], None]]] = []
        self._sequence = count()

    # --- issue ---

    def issue(self, entry: Sequence[FakeOp]) -> None:
        """Take one call of a rank, after everything that held its host.

        Raises:
            MismatchError: the other end is there, and means something else.
        """
        for op in entry:
            op.members = entry
            if isinstance(op, Transfer):
                self._join_channel(op)
            elif isinstance(op, Call):
                self._join_call(op)
        last = self._last[entry[0].rank]
        orders = dict.fromkeys(order for op in entry for order in self._orders(op))
        before = dict.fromkeys(earlier for order in orders for earlier in last.get(order, ()) if not earlier.is_done)
        last.update(dict.fromkeys(orders, entry))
        for op in entry:
            op.follows = tuple(before)
        first = entry[0]
        self._missing[first] = len(before)
        for earlier in before:
            self._followers[earlier].append(first)
        if not before:
            self._agenda.append(partial(self._post, first))

    def _join_channel(self, op: Transfer) -> None:
        ends = self.channels[op.channel]
        mine = ends.sends if op.is_send else ends.receives
        op.position = len(mine)
        mine.append(op)
        other = ends.other(op)
        if other is not None:
            check_pair(*((op, other) if op.is_send else (other, op)))

    def _join_call(self, op: Call) -> None:
        members = self.calls[op.group_index, op.position]
        members.append(op)
        check_calls(members[0], op)

    def _orders(self, op: FakeOp) -> Sequence[Hashable]:
        """The FIFOs in which an operation stands; its host's order is that of the calls of ``issue``."""
        queue = self.model.queue
        if not isinstance(op, Transfer):
            return ("device",) if queue == "device" and isinstance(op, Call) else ()
        end = (op.channel, op.is_send)
        match queue:
            case "device" | "rank":
                return (end, queue)
            case "direction":
                return (end, ("direction", op.is_send))
            case "communicator":
                return (end, ("communicator", op.channel.communicator))
            case "pair":
                return (end, ("pair", op.peer))
            case _:
                return (end,)

    # --- what happens ---

    def settle(self) -> None:
        """Let everything happen that can happen now."""
        while self._agenda:
            self._agenda.popleft()()

    def advance(self) -> bool:
        """Go on to the next thing that happens by itself; False if there is none."""
        if not self._timers:
            return False
        self.now_us, _, happens = heapq.heappop(self._timers)
        happens()
        self.settle()
        return True

    def _later(self, time_us: Fraction, happens: Callable[[], None]) -> None:
        if time_us > 0:
            heapq.heappush(self._timers, (self.now_us + time_us, next(self._sequence), happens))
        else:
            self._agenda.append(happens)

    def _post(self, first: FakeOp) -> None:
        for op in first.members:
            op.posted_us = self.now_us
            if isinstance(op, Computation):
                self._later(op.duration_us, partial(self._done, op))
            elif isinstance(op, Call):
                self._take_part(op)
            elif isinstance(op, Transfer):
                (self._send if op.is_send else self._receive)(op)

    def _done(self, op: FakeOp) -> None:
        op.done_us = self.now_us
        for first in self._followers.pop(op, ()):
            self._missing[first] -= 1
            if not self._missing[first]:
                self._agenda.append(partial(self._post, first))

    def _take_part(self, call: Call) -> None:
        members = self.calls[call.group_index, call.position]
        if len(members) < len(call.group.ranks) or any(member.posted_us is None for member in members):
            return
        time = self._times.collective_us(call.op.kind, call.group.ranks, call.num_bytes)

        def over() -> None:
            for member, result in zip(members, results(members), strict=True):
                member.result = result
                self._done(member)

        self._later(time, over)

    def meets(self, send: Transfer) -> bool:
        """Whether a message is on its way when both ends are posted: in a rendezvous, or where no buffer holds it."""
        return self.model.completes == "rendezvous" or self.awaited(send) == send.position

    def awaited(self, send: Transfer) -> int | None:
        """The position of the receive that a buffered send waits for."""
        return self.channels[send.channel].awaited(send, self.model)

    def _send(self, send: Transfer) -> None:
        ends = self.channels[send.channel]
        if self.meets(send):
            receive = ends.other(send)
            if receive is not None and receive.posted_us is not None:
                self._begin(send)
            return
        awaited = self.awaited(send)
        if awaited is None or (awaited < len(ends.receives) and ends.receives[awaited].is_done):
            self._begin(send)
        else:
            self._held[send.channel, awaited].append(send)

    def _receive(self, receive: Transfer) -> None:
        send = self.channels[receive.channel].other(receive)
        if send is None:
            return
        if self.meets(send):
            if send.posted_us is not None:
                self._begin(send)
        elif send.begun_us is not None:
            rest = send.begun_us + self._message_us(send) - self.now_us
            self._later(rest, partial(self._received, receive, send))

    def _message_us(self, send: Transfer) -> Fraction:
        return self._times.message_us(send.rank, send.peer, send.num_bytes)

    def _begin(self, send: Transfer) -> None:
        """A message is on its way."""
        send.begun_us = self.now_us
        receive = self.channels[send.channel].other(send)
        if self.meets(send):
            assert receive is not None
            self._later(self._message_us(send), partial(self._met, send, receive))
            return
        self._done(send)
        if receive is not None and receive.posted_us is not None:
            self._later(self._message_us(send), partial(self._received, receive, send))

    def _met(self, send: Transfer, receive: Transfer) -> None:
        self._done(send)
        self._received(receive, send)

    def _received(self, receive: Transfer, send: Transfer) -> None:
        fill(receive, send)
        self._done(receive)
        for held in self._held.pop((receive.channel, receive.position), ()):
            self._begin(held)
