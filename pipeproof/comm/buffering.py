"""How far a send may run ahead of its receives: which receive must be over before a send is done, as columns."""

from __future__ import annotations

import numpy as np

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.schedule.columns import NONE, IntColumn
from pipeproof.schedule.ops import SEND_KINDS
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.dtypes import dtype_bytes


def message_bytes(graph: OpGraph) -> IntColumn:
    """Bytes that each row's range holds in its tensor; 0 where a row has none."""
    sizes = np.array([*(dtype_bytes(tensor.dtype) for tensor in graph.tensors), 0], dtype=np.int64)
    return (graph.stop - graph.start) * sizes[graph.tensor]  # NONE is the last place


def awaited_receives(graph: OpGraph, model: ChannelModel) -> tuple[IntColumn, IntColumn]:
    """(sends, the receive that must be over before each is done) under slots or an eager buffer.

    Sends that wait for no receive, or for one that is missing, are left out.
    """
    sends, receive = _awaited(graph, model)
    return sends[receive != NONE], receive[receive != NONE]


def awaited_by_sends(graph: OpGraph, model: ChannelModel) -> dict[int, int]:
    """The same by send; ``NONE`` stands for a receive that is missing, so that the send is never done."""
    sends, receive = _awaited(graph, model)
    return dict(zip(sends.tolist(), receive.tolist(), strict=True))


def _awaited(graph: OpGraph, model: ChannelModel) -> tuple[IntColumn, IntColumn]:
    sends = np.flatnonzero(graph.is_kind(SEND_KINDS))
    sends = sends[np.argsort(graph.channel[sends], kind="stable")]  # of one rank, so FIFO order within a channel
    if model.completes == "slots":
        earlier = np.arange(len(sends)) - model.slots
    elif model.completes == "rendezvous" or model.eager_bytes is None:
        return sends[:0], sends[:0]
    else:  # the last j for which messages j..k take more bytes than there is room for
        before = np.concatenate([[0], np.cumsum(message_bytes(graph)[sends])])
        earlier = np.searchsorted(before, before[1:] - model.eager_bytes, side="left") - 1
    there = earlier >= 0
    there[there] = graph.channel[sends[earlier[there]]] == graph.channel[sends[there]]
    return sends[there], graph.match[sends[earlier[there]]]
