"""A fake transport: carry real numbers through a graph's messages, without a process or a framework.

For tests of communication invariants: give each rank the tensor it holds, and
see what every receiver ends up with. Values are carried here, identities in
``pipeproof.verify.provenance``; the two must agree on every graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeproof.schedule.ops import GATHER_KINDS, RECV_KINDS, Op
from pipeproof.schedule.optable import EdgeKind, OpGraph

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def deliver(graph: OpGraph, held: Mapping[tuple[int, Op], Array]) -> dict[tuple[int, Op], Array]:
    """What each receiver holds once its message has come and, where there is one, its gather is done.

    Args:
        graph: the messages to carry.
        held: for each (rank, SEND operation) the whole tensor that the rank
            sends from, of that tensor's local shape; only the range that the
            operation names travels. Sends that are not in here are left out.

    Returns:
        For each (rank, RECV operation) whose message was carried, the
        receiver's tensor in its local shape. Elements that nothing wrote are
        zero.

    Raises:
        ValueError: an array has another shape than the graph's tensor.
    """
    received: dict[int, Array] = {}
    for send, receive in graph.edges[EdgeKind.MATCH].tolist():
        source = held.get((int(graph.rank[send]), graph.ops[send]))
        if source is not None:
            shape = graph.tensors[int(graph.tensor[send])].shape
            if source.shape != shape:
                raise ValueError(f"{graph.ops[send]}: an array of shape {source.shape}, the graph says {shape}")
            received[receive] = source.reshape(-1)[int(graph.start[send]) : int(graph.stop[send])]
    gather_of = {
        source: target
        for source, target in graph.edges[EdgeKind.DATA].tolist()
        if graph.ops[source].kind in RECV_KINDS and graph.ops[target].kind in GATHER_KINDS
    }
    receive_of = {gather: receive for receive, gather in gather_of.items()}
    result = {}
    for receive, message in received.items():
        tensor = graph.tensors[int(graph.tensor[receive])]
        buffer = np.zeros(tensor.numel, dtype=message.dtype)
        if receive in gather_of:
            members = graph.members_of(gather_of[receive])
            parts = [received[receive_of[member]] for member in members]
            joined = np.concatenate(parts)[: tensor.numel]
            buffer[: joined.size] = joined
        else:
            start = int(graph.start[receive])
            buffer[start : start + message.size] = message
        result[int(graph.rank[receive]), graph.ops[receive]] = buffer.reshape(tensor.shape)
    return result
