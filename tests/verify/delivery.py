"""Delivery of given values through the messages and gathers of a graph, without a process."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipeproof.schedule.op_table import NONE, EdgeKind, OpGraph
from pipeproof.schedule.ops import SEND_KINDS, Op
from pipeproof.verify.provenance import gathers_of_receives

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def deliver(graph: OpGraph, held: Mapping[tuple[int, Op], Array]) -> dict[tuple[int, Op], Array]:
    """Return the tensor of each receiver after its message and, if there is one, its gather.

    For graphs in which one tensor crosses each boundary, in one message; for
    others see ``deliver_rows``.

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
    sends = np.flatnonzero(graph.is_kind(SEND_KINDS)).tolist()
    by_row = {i: held[key] for i in sends if (key := (int(graph.rank[i]), graph.ops[i])) in held}
    return {(int(graph.rank[i]), graph.ops[i]): array for i, array in deliver_rows(graph, by_row).items()}


def deliver_rows(graph: OpGraph, held: Mapping[int, Array]) -> dict[int, Array]:
    """Return the final tensor of each receiver by op id of its RECV; ``held`` is by op id of the SEND.

    Receives of one rank into the same tensor of the same micro-batch fill one
    array between them.

    Raises:
        ValueError: an array has another shape than the graph's tensor.
    """
    received: dict[int, Array] = {}
    for send, receive in graph.edges[EdgeKind.MATCH].tolist():
        if send in held:
            shape = graph.tensors[int(graph.tensor[send])].shape
            if held[send].shape != shape:
                raise ValueError(f"{graph.ops[send]}: an array of shape {held[send].shape}, the graph has {shape}")
            received[receive] = held[send].reshape(-1)[int(graph.start[send]) : int(graph.stop[send])]
    buffers: dict[tuple[int, Op, int], Array] = {}
    for receive, message in sorted(received.items()):
        tensor, start = graph.tensors[int(graph.tensor[receive])], int(graph.start[receive])
        buffer = buffers.setdefault(_place(graph, receive), np.zeros(tensor.numel, dtype=message.dtype))
        buffer[start : start + message.size] = message[: int(graph.stop[receive]) - start]
    gather_of = gathers_of_receives(graph)
    parts = {
        int(gather_of[receive]): buffers[_place(graph, receive)][
            int(graph.start[gather_of[receive]]) : int(graph.stop[gather_of[receive]])
        ]
        for receive in received
        if gather_of[receive] != NONE
    }
    result = {}
    for receive in received:
        tensor, whole = graph.tensors[int(graph.tensor[receive])], buffers[_place(graph, receive)]
        if gather_of[receive] != NONE:
            joined = np.concatenate([parts[m] for m in graph.members_of(int(gather_of[receive])) if m in parts])
            whole = np.zeros(tensor.numel, dtype=joined.dtype)
            whole[: joined.size] = joined[: tensor.numel]
        result[receive] = whole.reshape(tensor.shape)
    return result


def _place(graph: OpGraph, receive: int) -> tuple[int, Op, int]:
    return int(graph.rank[receive]), graph.ops[receive], int(graph.tensor[receive])
