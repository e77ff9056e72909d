"""The channels that messages really went over, and what each end of a message is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.interop.record.log import LoggedCall, LoggedGroup, Mark, RankLog
from pipeproof.schedule.ops import Op, OpKind

IN_ORDER = ("nccl", "xccl", "hccl", "bkcl")
"""Backends that have no tags, and carry the operations of a communicator out in their order."""


@dataclass(eq=False)
class Channel:
    """Messages from a rank to another on one communicator; the k-th send meets the k-th receive.

    Gloo matches by tags, so each is a channel of its own. On NCCL a single
    message has a communicator of its pair of ranks, one in a batch that of
    its group, unless the group's was made at once.
    """

    group: LoggedGroup
    about: str
    src: int
    dst: int
    sends: list[LoggedCall] = field(default_factory=list)
    receives: list[LoggedCall] = field(default_factory=list)
    first_number: int = 0

    @property
    def communicator(self) -> str:
        """Its communicator, in words."""
        return f"{self.group.title}{self.about}"

    def names(self) -> Mapping[tuple[int, int], Name]:
        """By (rank, number) of each end: its name in the graph."""
        base = self.first_number
        found = {}
        for place, send in enumerate(self.sends):
            found[send.rank, send.seq] = Name(self, place, base + place, OpKind.SEND_FORWARD, send.mark)
        longest = max(len(self.sends), len(self.receives))
        for place, receive in enumerate(self.receives):
            sent = self.sends[place].mark if place < len(self.sends) else None
            number = base + place if agree(sent, receive.mark) else base + longest + place
            found[receive.rank, receive.seq] = Name(self, place, number, OpKind.RECV_FORWARD, receive.mark)
        return found

    @property
    def num_numbers(self) -> int:
        """How many numbers its names may take."""
        return max(len(self.sends), len(self.receives)) + len(self.receives)


@dataclass(frozen=True)
class Name:
    """What an end of a message is called in the graph, and in words."""

    channel: Channel
    place: int
    number: int
    kind: OpKind
    mark: Mark | None

    @property
    def op(self) -> Op:
        """The operation."""
        return Op(self.kind, 0 if self._is_send else 1, self.number)

    @property
    def text(self) -> str:
        """``send 0->1 #2 (F 3 of stage 0)``; counted from 0 as people count micro-batches."""
        channel = self.channel
        about = f" ({self.mark})" if self.mark is not None else ""
        if self._is_send:
            return f"send {channel.src}->{channel.dst} #{self.place}{about}"
        return f"recv {channel.dst}<-{channel.src} #{self.place}{about}"

    @property
    def partner(self) -> Op:
        """The other end that it means, as rules speak of it."""
        return Op(OpKind.RECV_FORWARD, 1, self.number) if self._is_send else Op(OpKind.SEND_FORWARD, 0, self.number)

    @property
    def partner_text(self) -> str:
        """The other end in words, for where no rank issues it."""
        about = "" if self.mark is None else f" ({_meant(self.mark, is_send=self._is_send)})"
        channel = self.channel
        if self._is_send:
            return f"recv {channel.dst}<-{channel.src}{about or f' #{self.place}'}"
        return f"send {channel.src}->{channel.dst}{about or f' #{self.place}'}"

    @property
    def _is_send(self) -> bool:
        return self.kind is OpKind.SEND_FORWARD


def channels_of(logs: Sequence[RankLog]) -> list[Channel]:
    """All channels between ranks that have logs, by first use, with numbers for the names of their messages."""
    known = {log.rank for log in logs}
    found: dict[tuple[LoggedGroup, str, int, int], Channel] = {}
    for log in logs:
        for call in log.calls:
            if not call.is_message or call.peer is None or call.peer not in known or call.tensor is None:
                continue
            src, dst = (call.rank, call.peer) if call.op == "send" else (call.peer, call.rank)
            key = call.group, _about(call), src, dst
            channel = found.setdefault(key, Channel(*key))
            (channel.sends if call.op == "send" else channel.receives).append(call)
    base = 0
    for channel in found.values():
        channel.first_number = base
        base += channel.num_numbers
    return list(found.values())


def _about(call: LoggedCall) -> str:
    if call.group.backend in IN_ORDER:
        return "" if call.batch is not None or call.group.opened else ", single messages"
    return f", tag {call.tag}" if call.tag else ""


def agree(sent: Mark | None, received: Mark | None) -> bool:
    """Whether two ends may mean the same: what either does not say does not count."""
    if sent is None or received is None:
        return True
    expected = _meant(sent, is_send=True)
    pairs = zip((expected.kind, expected.micro_batch, expected.stage),
                (received.kind, received.micro_batch, received.stage), strict=True)  # fmt: skip
    return all(one is None or other is None or one == other for one, other in pairs)


def _meant(mark: Mark, *, is_send: bool) -> Mark:
    """What the other end of a message should say: an activation goes to the next stage, a gradient back."""
    step = 1 if (mark.kind == "F") == is_send else -1
    return Mark(mark.kind, None if mark.stage is None else mark.stage + step, mark.micro_batch)
