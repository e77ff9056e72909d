"""3xx: sends and receives meet only by their FIFO position; group calls are not too large.

There are no tags on NCCL (and none that Paddle lets a user set on gloo): the
k-th send of a channel meets the k-th receive, independent of their contents. The rules
check the pairs that the graph has matched that way; the tests compare them
with the definition on a networkx graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pipeproof.diagnostics.finding import Finding, OpsWitness, RuleDoc
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.op_table import NONE, OpGraph, TensorSpec
from pipeproof.schedule.ops import (
    KIND_CODE,
    KINDS,
    META_KINDS,
    SEND_KINDS,
    STEP_OF_TRANSFER,
    TRANSFER_KINDS,
    Op,
    OpKind,
)
from pipeproof.verify.subject import Rule, Subject, missing_op

_PARTNER: Mapping[OpKind, OpKind] = MappingProxyType(
    {
        kind: OpKind(kind.replace("SEND", "RECV") if kind in SEND_KINDS else kind.replace("RECV", "SEND"))
        for kind in sorted(TRANSFER_KINDS)
    }
)
"""By kind of a transfer: the kind that it means to meet."""


def partner_of(transfer: Op) -> Op:
    """The operation that a transfer means to meet: ``0SEND_F3`` means ``1RECV_F3``, ``0SEND_F3>2`` ``2RECV_F3<0``."""
    kind = _PARTNER[transfer.kind]
    if transfer.index is not None:
        return transfer._replace(kind=kind, stage=transfer.index, index=transfer.stage)
    return transfer._replace(kind=kind, stage=transfer.stage + STEP_OF_TRANSFER[transfer.kind])


class Pairs:
    """All sends that meet a receive, with the receive: two columns of op ids of one length."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.send = np.flatnonzero(graph.is_kind(SEND_KINDS) & (graph.match != NONE))
        self.receive = graph.match[self.send]

    def where(self, wrong: BoolColumn) -> Iterator[tuple[int, int]]:
        """(send, receive) of the pairs that are wrong, in order of the sends."""
        places = np.flatnonzero(wrong)
        return zip(self.send[places].tolist(), self.receive[places].tolist(), strict=True)

    def differ(self, feature: Callable[[TensorSpec], object]) -> BoolColumn:
        """Mask of the pairs whose tensors differ in ``feature``; False if an end names no tensor."""
        codes: dict[object, int] = {}
        table = [codes.setdefault(feature(tensor), len(codes)) for tensor in self.graph.tensors]
        column = np.array([*table, NONE], dtype=np.int64)[self.graph.tensor]
        sent, expected = column[self.send], column[self.receive]
        wrong: BoolColumn = (sent != NONE) & (expected != NONE) & (sent != expected)
        return wrong

    def is_payload(self) -> BoolColumn:
        """Mask of the pairs that carry a tensor: both ends do, and neither exchanges a shape."""
        meta = self.graph.is_kind(META_KINDS)
        return ~meta[self.send] & ~meta[self.receive]

    def may_reshard(self) -> BoolColumn:
        """Mask of the pairs that carry a part of a tensor between different layouts or sizes.

        Such messages together may change the layout; the rules on transports
        check the final layout. A whole tensor, or a slice between equal layouts, changes nothing.
        """
        sizes = np.array([*(tensor.numel for tensor in self.graph.tensors), NONE], dtype=np.int64)
        graph = self.graph
        whole = (graph.start == 0) & (graph.stop == sizes[graph.tensor])
        unlike = self.differ(lambda t: t.placement) | self.differ(lambda t: t.numel)
        partly: BoolColumn = unlike & ~(whole[self.send] & whole[self.receive])
        return partly


@dataclass(frozen=True, slots=True)
class ChannelFaults:
    """Faults of one channel by identity, as op ids.

    One missing message shifts all that follow in its FIFO. Without the ends that the other side lacks, both sides hold
    the same messages; if their order differs, they form blocks that are faults of their own.
    ``counterpart`` is the other end that each operation means to meet. ``sends_alone`` and ``receives_alone`` are the
    ends without one in the programs, in program order.
    ``block_of`` gives the number of the block for each operation of a block in another order. ``run_of`` gives for
    each operation how many pairs before it meet as they should, if the channel has as many sends as receives:
    operations with one number are shifted by one fault. Otherwise it is 0.
    """

    counterpart: Mapping[int, int]
    sends_alone: tuple[int, ...]
    receives_alone: tuple[int, ...]
    block_of: Mapping[int, int]
    run_of: Mapping[int, int]


class FaultsByChannel:
    """The faults of a graph's channels, each found when it is asked for."""

    def __init__(self, subject: Subject) -> None:
        self._graph = subject.graph
        self._found: dict[int, ChannelFaults] = {}

    def __getitem__(self, channel: int) -> ChannelFaults:
        if channel not in self._found:
            self._found[channel] = _faults(self._graph, channel)
        return self._found[channel]


def _faults(graph: OpGraph, channel: int) -> ChannelFaults:
    rows = np.flatnonzero(graph.channel == channel)
    is_send = graph.is_kind(SEND_KINDS)[rows]
    named = bool((graph.tensor[rows] != NONE).all())  # else a member of a tuple cannot be compared by its name
    sends, receives = (_by_identity(graph, rows[is_send == side].tolist(), named=named) for side in (True, False))
    sends_alone = tuple(op_id for key, op_id in sends.items() if key not in receives)
    receives_alone = tuple(op_id for key, op_id in receives.items() if key not in sends)
    positions = {key: number for number, key in enumerate(key for key in receives if key in sends)}
    sent = [key for key in sends if key in receives]
    block_of: dict[int, int] = {}
    begin, last = 0, NONE
    for number, key in enumerate(sent):
        last = max(last, positions[key])
        if last == number:  # both sides have the same messages so far
            for moved in sent[begin : number + 1] if number > begin else ():
                block_of[sends[moved]] = block_of[receives[moved]] = begin
            begin = number + 1
    run_of: dict[int, int] = {}
    num_right = 0
    for sent_key, received_key in zip(sends, receives, strict=False):
        run_of[sends[sent_key]] = run_of[receives[received_key]] = num_right if len(sends) == len(receives) else 0
        num_right += sent_key == received_key
    ends = [(sends[key], receives[key]) for key in sent]
    counterpart = {**dict(ends), **{receive: send for send, receive in ends}}
    return ChannelFaults(counterpart, sends_alone, receives_alone, block_of, run_of)


def _by_identity(graph: OpGraph, ops: Sequence[int], *, named: bool) -> dict[tuple[str, str, int], int]:
    """The operations of one end by (text of the receive that is meant, tensor, how often it came before)."""
    seen: Counter[tuple[str, str]] = Counter()
    by_key: dict[tuple[str, str, int], int] = {}
    for op_id in ops:
        op = graph.ops[op_id]
        member = graph.tensors[int(graph.tensor[op_id])].member if named else ""
        key = str(partner_of(op) if op.kind in SEND_KINDS else op), member
        by_key[*key, seen[key]] = op_id
        seen[key] += 1
    return by_key


def rank_of(graph: OpGraph, op_id: int) -> int:
    """The global rank that issues an operation."""
    return graph.global_rank[int(graph.rank[op_id])]


def channel_text(graph: OpGraph, index: int) -> str:
    """``forward 0->1``: a channel of the graph with its global ranks."""
    channel = graph.channels[index]
    return f"{channel.communicator} {graph.global_rank[channel.src]}->{graph.global_rank[channel.dst]}"


UNMATCHED = RuleDoc(
    code="PP301",
    title="a send or receive has no counterpart",
    explanation=(
        "A channel carries more sends than receives, or more receives than sends. The surplus operation waits "
        "for a peer that never comes: the job hangs, or an eager backend leaves a message behind that the next "
        "step will receive. Two ends that name different communicators are on different channels."
    ),
    wrong="rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1}\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0",
    right=(
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"
    ),
)


def _check_unmatched(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    transfers = np.flatnonzero(graph.channel != NONE)
    is_send = graph.is_kind(SEND_KINDS)
    counts = [
        np.bincount(graph.channel[transfers[is_send[transfers] == side]], minlength=len(graph.channels))
        for side in (True, False)
    ]
    for index in np.flatnonzero(counts[0] != counts[1]).tolist():
        channel, num_sends, num_receives = graph.channels[index], int(counts[0][index]), int(counts[1][index])
        more_sends = num_sends > num_receives
        faults = subject.once(FaultsByChannel)[index]
        alone = (faults.sends_alone if more_sends else faults.receives_alone)[: abs(num_sends - num_receives)]
        missing_rank = graph.global_rank[channel.dst if more_sends else channel.src]
        first = graph.ops[alone[0]]
        partner = partner_of(first)
        yield UNMATCHED.finding(
            f"channel {channel_text(graph, index)} has {num_sends} sends and {num_receives} receives: "
            f"{first} on rank {rank_of(graph, alone[0])} has no {partner} of its own on rank {missing_rank}",
            help=f"add {partner} to rank {missing_rank}, or remove {first}",
            witness=OpsWitness((*map(subject.witness_op, alone), missing_op(missing_rank, partner))),
        )


IDENTITY = RuleDoc(
    code="PP302",
    title="the k-th send of a channel meets a receive that means another tensor",
    explanation=(
        "Both sides agree in size, so no backend notices: the receiver takes one micro-batch's tensor for "
        "another's, an activation for a gradient (two ranks with several stages each are both next and previous to "
        "one another), or the mask for the positions. Training continues with wrong values."
    ),
    wrong=(
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F1{peer=0} 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 WAIT(1RECV_F1) 1F1"
    ),
    right=(
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F0{peer=0} 1RECV_F1{peer=0} WAIT(1RECV_F0) 1F0 WAIT(1RECV_F1) 1F1"
    ),
)


def _check_identity(subject: Subject) -> Iterator[Finding]:
    graph, pairs = subject.graph, Pairs(subject.graph)
    kind_of_partner = np.arange(len(KINDS))
    for kind, partner in _PARTNER.items():
        kind_of_partner[KIND_CODE[kind]] = KIND_CODE[partner]
    send, receive = pairs.send, pairs.receive
    other = (
        (graph.kind[receive] != kind_of_partner[graph.kind[send]])
        | (graph.stage[receive] != graph.partner_stage(send))
        | (graph.index[receive] != np.where(graph.index[send] == NONE, NONE, graph.stage[send]))
        | (graph.work_item[receive] != graph.work_item[send])
    )
    other_member = pairs.differ(_members_in_order)
    for sent, received in pairs.where(other | other_member):
        meant = partner_of(graph.ops[sent])
        of_sent = of_received = ""
        if graph.ops[received] == meant:  # then the members differ, and both ends name a tensor
            of_sent, of_received = (
                f" of `{' + '.join(_members_in_order(graph.tensors[int(graph.tensor[i])]))}`" for i in (sent, received)
            )
        yield IDENTITY.finding(
            f"on channel {channel_text(graph, int(graph.channel[sent]))} the send at FIFO position "
            f"{int(graph.position[sent])} is {graph.ops[sent]}{of_sent} and means {meant}, but the receive there is "
            f"{graph.ops[received]}{of_received}",
            help="issue the receives in the order of the sends; a FIFO has no tags to distinguish them",
            witness=subject.witness(sent, received),
        )


def _members_in_order(tensor: TensorSpec) -> tuple[str, ...]:
    """The members of the boundary that a message carries, in order; several if it is packed."""
    return tuple(part.member for part in tensor.parts) or (tensor.member,)


def _example(num_sends: int) -> str:
    """Python code of a program that sends so many micro-batches in one group call."""
    return "\n".join(
        [
            "from pipeproof.comm.backends import table_named",
            "from pipeproof.verify.subject import program_subject",
            "",
            "def of_all(text):",
            f"    return ' '.join(text.replace('#', str(i)) for i in range({num_sends}))",
            "",
            "sender = of_all('0F#') + ' ' + of_all('0SEND_F#{batch=0}') + ' ' + of_all('WAIT(0SEND_F#)')",
            "receiver = of_all('1RECV_F# WAIT(1RECV_F#) 1F#')",
            "program = f'rank 0: {sender}\\nrank 1: {receiver}'",
            "subject = program_subject(program, backend=table_named('torch-nccl'))",
        ]
    )


TOO_MANY = RuleDoc(
    code="PP316",
    title="a group call has more sends and receives than the backend is known to take",
    explanation=(
        "The proofs presume that all transfers of a batch progress together. NCCL divides a large group call into "
        "several kernels, which run one after the other, and each rank divides its own list. A send may be in a "
        "rank's first kernel and its receive in the peer's second kernel, while the peer's first kernel waits for "
        "the second kernel here: the job hangs. The limit is a row of the backend's table, "
        "`max_batched_transfers`; gloo has no group calls."
    ),
    wrong=_example(257),
    right=_example(256),
)


def _check_size(subject: Subject) -> Iterator[Finding]:
    graph, limit = subject.graph, subject.backend.max_batched_transfers
    rows = np.flatnonzero(graph.is_kind(TRANSFER_KINDS) & (graph.batch != NONE))
    if not limit or len(rows) <= limit:
        return
    _, number, counts = np.unique(packed(graph.rank[rows], graph.batch[rows]), return_inverse=True, return_counts=True)
    for call in np.flatnonzero(counts > limit).tolist():
        members = rows[number == call]
        first, beyond = int(members[0]), int(members[limit])
        yield TOO_MANY.finding(
            f"rank {rank_of(graph, first)} issues {len(members)} sends and receives in one batch, from "
            f"{graph.ops[first]} on, and {subject.backend.name} is known to take {limit}",
            help=f"begin another batch at {graph.ops[beyond]}, and at the matching transfer of its peer",
            witness=subject.witness(first, beyond),
        )


RULES: tuple[Rule, ...] = (
    Rule(TOO_MANY, _check_size),
    Rule(UNMATCHED, _check_unmatched),
    Rule(IDENTITY, _check_identity),
)
