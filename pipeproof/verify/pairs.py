"""Pairs of transfers: what a transfer means to meet, and what meets what by place in the FIFO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.ops import META_KINDS, SEND_KINDS, Op, OpKind
from pipeproof.schedule.optable import NONE, IntColumn, OpGraph, TensorSpec

PARTNER: Mapping[OpKind, tuple[OpKind, int]] = MappingProxyType(
    {
        OpKind.SEND_FORWARD: (OpKind.RECV_FORWARD, +1),
        OpKind.RECV_FORWARD: (OpKind.SEND_FORWARD, -1),
        OpKind.SEND_BACKWARD: (OpKind.RECV_BACKWARD, -1),
        OpKind.RECV_BACKWARD: (OpKind.SEND_BACKWARD, +1),
        OpKind.SEND_META_FORWARD: (OpKind.RECV_META_FORWARD, +1),
        OpKind.RECV_META_FORWARD: (OpKind.SEND_META_FORWARD, -1),
        OpKind.SEND_META_BACKWARD: (OpKind.RECV_META_BACKWARD, -1),
        OpKind.RECV_META_BACKWARD: (OpKind.SEND_META_BACKWARD, +1),
    }
)
"""By kind of a transfer: the kind that it means to meet, and where that one's stage lies from its own."""


def partner_of(transfer: Op) -> Op:
    """The operation that a transfer means to meet: ``0SEND_F3`` means ``1RECV_F3``."""
    kind, step = PARTNER[transfer.kind]
    return Op(kind, transfer.stage + step, transfer.micro_batch)


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
        """Whether the tensors of both ends differ in ``feature``; not where an end names no tensor."""
        codes: dict[object, int] = {}
        table = [codes.setdefault(feature(tensor), len(codes)) for tensor in self.graph.tensors]
        column = np.array([*table, NONE], dtype=np.int64)[self.graph.tensor]
        sent, wanted = column[self.send], column[self.receive]
        wrong: BoolColumn = (sent != NONE) & (wanted != NONE) & (sent != wanted)
        return wrong

    def either(self, by_tensor: Sequence[bool]) -> BoolColumn:
        """Whether the tensor of one end or the other is marked; an end without a tensor is not."""
        column = np.array([*by_tensor, False])[self.graph.tensor]
        marked: BoolColumn = column[self.send] | column[self.receive]
        return marked

    def is_payload(self) -> BoolColumn:
        """Which pairs carry a tensor: both ends do, so that neither announces a shape."""
        meta = self.graph.is_kind(META_KINDS)
        return ~meta[self.send] & ~meta[self.receive]

    def num_elements(self) -> tuple[IntColumn, IntColumn]:
        """How many elements each send puts in and each receive expects."""
        length = self.graph.stop - self.graph.start
        return length[self.send], length[self.receive]

    def may_reshard(self) -> BoolColumn:
        """Which pairs carry a part of a tensor between unlike layouts or sizes.

        Such messages may together change the layout on the way; whether every
        element then lies where the receiver's layout says is for the rules on
        transports. A whole tensor, or a slice between two alike, changes nothing.
        """
        sizes = np.array([*(tensor.numel for tensor in self.graph.tensors), NONE], dtype=np.int64)
        graph = self.graph
        whole = (graph.start == 0) & (graph.stop == sizes[graph.tensor])
        unlike = self.differ(lambda t: t.placement) | self.differ(lambda t: t.numel)
        partly: BoolColumn = unlike & ~(whole[self.send] & whole[self.receive])
        return partly


def rank_of(graph: OpGraph, op_id: int) -> int:
    """The global rank that issues an operation."""
    return graph.global_rank[int(graph.rank[op_id])]


def channel_text(graph: OpGraph, index: int) -> str:
    """``forward 0->1``: a channel of the graph with its global ranks."""
    channel = graph.channels[index]
    return f"{channel.communicator} {graph.global_rank[channel.src]}->{graph.global_rank[channel.dst]}"
