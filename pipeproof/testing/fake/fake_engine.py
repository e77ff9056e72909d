"""Engine of a fake world: it posts and completes operations, by the deadlock definition.

The events are those of ``verify.deadlock.events`` and the times those of
``sim.simpy_model``, implemented independently and without a whole graph:
operations come one by one, when ranks issue them, so the engines of ``sim``,
which need the whole graph, cannot be called. A host that waits does not
issue, so the only other order is that of the channel model's FIFOs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.schedule.op_table import Channel
from pipeproof.schedule.ops import OpKind
from pipeproof.testing.fake.fake_operations import Array, Call, Computation, FakeOp, FakeTimes, MismatchError, Transfer
from pipeproof.verify.fifo_matching import partner_of


def check_pair(send: Transfer, receive: Transfer) -> None:
    """Compare the two ends of a message: PP302, PP303 and PP304 at run time.

    Raises:
        MismatchError: another tensor is meant, or its shape or type differs.
    """
    where = f"message {send.position} from rank {send.rank} to rank {receive.rank}"
    meant = partner_of(send.op)._replace(split=send.op.split)
    if receive.op != meant:
        raise MismatchError(f"{where}: {send.words} means {meant}, but meets {receive.words}")
    if receive.into is None:
        return
    assert send.array is not None
    sent, wanted = (
        f"{dtype} {list(array.shape)}" for dtype, array in ((send.dtype, send.array), (receive.dtype, receive.into))
    )
    if sent != wanted:
        raise MismatchError(f"{where}: {send.words} sends {sent}, but {receive.words} receives into {wanted}")


def fill(receive: Transfer, send: Transfer) -> None:
    """Deliver a message."""
    assert send.array is not None
    receive.array = send.array.copy()
    if receive.into is not None:
        receive.into[...] = send.array


def check_calls(first: Call, other: Call) -> None:
    """Compare a member's part in a collective with that of the first member: PP306 at run time.

    Raises:
        MismatchError: they differ in kind, shape, type, reduction or root.
    """
    if first.form != other.form:
        raise MismatchError(
            f"collective {first.position} of {first.group.axis} group {list(first.group.ranks)} is "
            f"{first.form_words} on rank {first.rank} but {other.form_words} on rank {other.rank}"
        )


_REDUCE: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {"sum": lambda stacked: stacked.sum(axis=0), "max": lambda stacked: stacked.max(axis=0)}
)


def _reduced(stacked: Array, reduction: str) -> Array:
    if reduction == "avg":
        mean: Array = np.asarray(stacked.sum(axis=0) / len(stacked))
        return mean
    reduced: Array = _REDUCE[reduction](stacked).astype(stacked.dtype)
    return reduced


def results(members: Sequence[Call]) -> list[Any]:
    """Return the results in the order of ``members``. Sums are computed in the order of the group."""
    ranks = members[0].group.ranks
    by_rank = {member.rank: member for member in members}
    ordered = [by_rank[rank] for rank in ranks]
    return [_result(member, ordered, ranks.index(member.rank)) for member in members]


def _result(member: Call, ordered: Sequence[Call], place: int) -> Any:
    kind, all_put = member.op.kind, [one.arrays for one in ordered]
    match kind:
        case OpKind.BARRIER:
            return None
        case OpKind.ALL_GATHER:
            return [arrays[0].copy() for arrays in all_put]
        case OpKind.ALL_TO_ALL:
            return [arrays[place].copy() for arrays in all_put]
        case OpKind.BROADCAST:
            return next(one.arrays[0] for one in ordered if one.rank == member.root).copy()
    whole = _reduced(np.stack([arrays[0] for arrays in all_put]), member.reduction)
    return whole if kind is OpKind.ALL_REDUCE else np.split(whole, len(ordered))[place].copy()


class Ends:
    """Sends and receives of one channel in the order of issue."""

    def __init__(self) -> None:
        self.sends: list[Transfer] = []
        self.receives: list[Transfer] = []

    def other(self, transfer: Transfer) -> Transfer | None:
        """Return the other end of a message, if it was issued."""
        there = self.receives if transfer.is_send else self.sends
        return there[transfer.position] if transfer.position < len(there) else None

    def awaited(self, send: Transfer, model: ChannelModel) -> int | None:
        """Return the position of the receive that must end before a buffered send is done; None if there is none."""
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
        """Issued parts of the members, by group and position."""
        self.came: dict[Hashable, set[int]] = defaultdict(set)
        """Ranks that have started to open each connection."""
        self._times = times
        self._last: list[dict[Hashable, Sequence[FakeOp]]] = [{} for _ in range(num_ranks)]
        self._followers: dict[FakeOp, list[FakeOp]] = defaultdict(list)
        self._missing: dict[FakeOp, int] = {}
        """Number of operations that a call waits for before it is posted, by the call's first member."""
        self._held: dict[tuple[Channel, int], list[Transfer]] = defaultdict(list)
        """Sends that wait for buffer space, by the receive that frees it."""
        self._agenda: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[Fraction, int, Callable[[], None]]] = []
        self._sequence = count()

    # --- issue ---

    def issue(self, entry: Sequence[FakeOp]) -> None:
        """Issue one call of a rank, after everything that blocked its host.

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
        """Return the FIFOs of an operation; the order of its host is that of the calls of ``issue``."""
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
        """Process all events that are possible now."""
        while self._agenda:
            self._agenda.popleft()()

    def advance(self) -> bool:
        """Advance to the next timed event; return False if there is none."""
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
        """Return True if a message starts when both ends are posted: in a rendezvous, or without a free buffer."""
        return self.model.completes == "rendezvous" or self.awaited(send) == send.position

    def awaited(self, send: Transfer) -> int | None:
        """Return the position of the receive that a buffered send waits for."""
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
