"""Proof that a transport delivers a tensor, for all values (PP201, for layouts only); delivery of given values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Literal, get_args

import numpy as np

from pipeproof.diagnostics.finding import ElementRange, RangesWitness
from pipeproof.diagnostics.text_output import witness_lines
from pipeproof.schedule.columns import Row
from pipeproof.schedule.op_table import NONE, EdgeKind, Group, OpGraph, TensorSpec, build_graph
from pipeproof.schedule.ops import SEND_KINDS, Op, OpKind
from pipeproof.specs.axis_layout import Placement, dtype_bytes, parse_placement
from pipeproof.stages.describe.boundary import effective_transport, reshard_messages, slice_range
from pipeproof.verify.boundary_transport import Layouts, places_of
from pipeproof.verify.provenance import events, gathers_of_receives
from pipeproof.verify.subject import graph_subject

Way = Literal["full", "partial", "reshard"]
"""Each rank sends all it holds to its counterpart; Fleet's slices and gather; messages made for the two layouts."""

_SEND, _RECEIVE, _GATHER = (
    Op(kind, stage, 0)
    for kind, stage in ((OpKind.SEND_FORWARD, 0), (OpKind.RECV_FORWARD, 1), (OpKind.GATHER_FORWARD, 1))
)


@dataclass(frozen=True, slots=True)
class TransportVerdict:
    """Result of a transport of a tensor; true if every receiver gets exactly the tensor of its layout.

    ``way`` is the transport in effect: ``partial`` of a tensor that does not
    divide is ``full``. Senders are ranks 0 to tp - 1, receivers tp to 2 tp -
    1. ``lost`` are ranges that receivers should hold and do not, ``foreign``
    those that are there instead. ``num_bytes`` is the number of bytes that all
    senders send, without the gather among the receivers.
    """

    way: Way
    num_elements: int
    num_lost: int
    lost: tuple[ElementRange, ...]
    foreign: tuple[ElementRange, ...]
    num_bytes: int

    def __bool__(self) -> bool:
        return not self.lost

    def __str__(self) -> str:
        if self:
            return f"{self.way} delivers all {self.num_elements} elements, with {self.num_bytes} bytes on the wire"
        lines = witness_lines(RangesWitness(self.lost, self.foreign))
        head = f"{self.way} delivers {self.num_lost} of {self.num_elements} elements wrongly"
        return "\n  ".join([head, *lines])


def check_transport(
    sender: str | Placement,
    receiver: str | Placement,
    transport: Way,
    shape: Sequence[int],
    *,
    tp: int,
    dtype: str = "float32",
) -> TransportVerdict:
    """Send the identity of every element through a transport and compare with the receivers' layout.

    Identities travel as ranges, so the size of the tensor does not matter.

    Args:
        sender: layout of the tensor over the sending ranks: ``replicated``,
            ``invariant``, ``sharded(0)``, ``partial`` (addends), ``varying``.
        receiver: required layout over the receiving ranks.
        transport: see ``Way``.
        shape: of the whole tensor, over all ``tp`` ranks of a side.
        tp: tensor-parallel ranks of each side.
        dtype: type of the elements, for the bytes.

    Raises:
        ValueError: a layout is invalid or does not divide, ``tp`` or ``shape`` is not positive, or no messages can
            bring one layout to the other (``reshard``).
    """
    if transport not in get_args(Way):
        raise ValueError(f"transport {transport!r} is none of {', '.join(get_args(Way))}")
    if tp < 1 or not shape or min(shape) < 1 or len(shape) > len(ascii_lowercase):
        raise ValueError(f"tp {tp} and shape {list(shape)} must be positive, the shape of 1 to 26 dims")
    source, sink = (p if isinstance(p, Placement) else parse_placement(p) for p in (sender, receiver))
    whole = tuple(shape)
    tensors = [_tensor(name, whole, p, tp, dtype) for name, p in (("sent", source), ("wanted", sink))]
    way: Way = transport
    if transport == "partial":
        way = effective_transport("partial", tensors[0].numel, tp).value
    ranks = _rows(way, whole, source, sink, tensors, tp)
    groups = [Group("tp", tuple(range(first, first + tp))) for first in (0, tp)]
    return _verdict(build_graph(ranks, tensors, groups), way, tensors[1].numel * tp, dtype_bytes(dtype))


def _tensor(name: str, shape: tuple[int, ...], placement: Placement, tp: int, dtype: str) -> TensorSpec:
    if placement.dim is not None and placement.dim >= len(shape):
        raise ValueError(f"{placement} of a tensor with {len(shape)} dims")
    local = placement.local_shape(shape, tp)
    return TensorSpec(name, local, dtype, str(placement), ascii_lowercase[: len(shape)])


def _rows(
    way: Way, shape: tuple[int, ...], source: Placement, sink: Placement, tensors: list[TensorSpec], tp: int
) -> list[list[Row]]:
    ranks: list[list[Row]] = [[] for _ in range(2 * tp)]
    if way == "reshard":
        for message in reshard_messages(shape, source, tp, sink, tp):
            send = message.send_start, message.send_start + message.length
            receive = message.recv_start, message.recv_start + message.length
            ranks[message.sender].append(Row(_SEND, tp + message.receiver, 0, *send))
            ranks[tp + message.receiver].append(Row(_RECEIVE, message.sender, 1, *receive))
        return ranks
    sent, wanted = (tensor.numel for tensor in tensors)
    for index in range(tp):
        mine = (0, sent) if way == "full" else slice_range(sent, tp, index)
        ranks[index].append(Row(_SEND, tp + index, 0, *mine))
        ranks[tp + index].append(Row(_RECEIVE, index, 1, mine[0], min(mine[1], wanted)))
        if way == "partial":
            ranks[tp + index].append(Row(_GATHER, NONE, 1, *mine, group=1))
    return ranks


def _verdict(graph: OpGraph, way: Way, num_elements: int, element_bytes: int) -> TransportVerdict:
    subject = graph_subject(graph)
    places = places_of(subject)
    layouts, found = Layouts(subject, places), events(graph, places)
    losses = [
        loss
        for event in np.flatnonzero(found.classes != NONE).tolist()
        for delivery in found.deliveries(event, places)
        if (loss := layouts.loss(delivery)) is not None
    ]
    sends = graph.is_kind(SEND_KINDS)
    lost = tuple(item for loss in losses for item in loss.lost)
    return TransportVerdict(
        way=way,
        num_elements=num_elements,
        num_lost=sum(item.stop - item.start for item in lost),
        lost=lost,
        foreign=tuple(item for loss in losses for item in loss.foreign),
        num_bytes=int((graph.stop - graph.start)[sends].sum()) * element_bytes,
    )


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
