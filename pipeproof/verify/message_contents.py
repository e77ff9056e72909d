"""3xx: both ends of a message declare one size, shape, dtype, layout and memory order, or exchange shapes ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from pipeproof.diagnostics.finding import Finding, RuleDoc
from pipeproof.diagnostics.problems import listed
from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE
from pipeproof.schedule.derive import BoolColumn, packed, place_in_group
from pipeproof.schedule.op_parts import TensorPart
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph, TensorSpec
from pipeproof.schedule.ops import FORWARD_KINDS, META_KINDS, META_OF, RECV_KINDS
from pipeproof.verify.fifo_matching import Pairs, rank_of
from pipeproof.verify.subject import Rule, Subject

_FORM = {"shape": "8x4", "dtype": "float32", "placement": "invariant", "dims": "sh"}


def _message(sent: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """A program with one message, whose ends have tensors of ``_FORM`` with changed attributes."""
    forms = [{**_FORM, **changed} for changed in (sent, wanted)]
    tensors = (" ".join(f"{name}={value}" for name, value in form.items()) for form in forms)
    num_sent, num_wanted = (prod(map(int, form["shape"].split("x"))) for form in forms)
    return (
        "tensor sent: {}\ntensor wanted: {}\n".format(*tensors)
        + f"rank 0: 0F0 0SEND_F0{{peer=1 tensor=0 range=0..{num_sent}}} WAIT(0SEND_F0)\n"
        + f"rank 1: 1RECV_F0{{peer=0 tensor=1 range=0..{num_wanted}}} WAIT(1RECV_F0) 1F0"
    )


SIZE = RuleDoc(
    code="PP303",
    title="a message and its receive buffer differ in size or shape",
    explanation=(
        "Sizes are not negotiated. On NCCL a mismatch hangs or leaves partial data; gloo aborts on a longer "
        "message and accepts a shorter one, leaving the rest of the buffer stale. The same number of elements "
        "in another shape or dim order is accepted everywhere, and scrambles the values."
    ),
    wrong=_message({"shape": "16x2x64", "dims": "sbh"}, {"shape": "8x2x64", "dims": "sbh"}),
    right=_message({"shape": "16x2x64", "dims": "sbh"}, {"shape": "16x2x64", "dims": "sbh"}),
)


def _check_size(subject: Subject) -> Iterator[Finding]:
    graph, pairs = subject.graph, Pairs(subject.graph)
    length = graph.stop - graph.start
    other_form = pairs.differ(_form) & pairs.is_payload() & ~pairs.may_reshard()
    for send, receive in pairs.where((length[pairs.send] != length[pairs.receive]) | other_form):
        yield SIZE.finding(
            f"{graph.ops[send]} on rank {rank_of(graph, send)} sends {_elements(graph, send)}, but "
            f"{graph.ops[receive]} on rank {rank_of(graph, receive)} expects {_elements(graph, receive)}",
            help="give both sides of the boundary the same shape, dim order and slice",
            witness=subject.witness(send, receive),
        )


def _form(tensor: TensorSpec) -> object:
    """Shape and dims; for a packed message also of its parts, in the order of their names.

    The rule on the identity of messages compares the order of parts.
    """
    return tensor.shape, tensor.dims, tuple((part.shape, part.dims) for part in _by_name(tensor))


def _by_name(tensor: TensorSpec) -> list[TensorPart]:
    return sorted(tensor.parts, key=lambda part: part.member)


def _elements(graph: OpGraph, op_id: int) -> str:
    count, tensor = int(graph.stop[op_id] - graph.start[op_id]), int(graph.tensor[op_id])
    if tensor == NONE:
        return f"{count} elements"
    spec = graph.tensors[tensor]
    parts = ", ".join(f"`{part.member}` {part.dims} {list(part.shape)}" for part in spec.parts)
    return f"{count} bytes of {parts}" if parts else f"{count} elements of {spec.dims} {list(spec.shape)}"


DTYPE = RuleDoc(
    code="PP304",
    title="a message and its receive buffer differ in dtype",
    explanation=(
        "No backend checks the dtype of a message: the bytes are taken as they are. Float32 read as "
        "int32, or bfloat16 as float16, gives meaningless numbers."
    ),
    wrong=_message({"dtype": "bfloat16"}, {}),
    right=_message({"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
)


def _check_dtype(subject: Subject) -> Iterator[Finding]:
    graph, pairs = subject.graph, Pairs(subject.graph)
    for send, receive in pairs.where(pairs.differ(_dtypes) & pairs.is_payload()):
        sent, wanted = (graph.tensors[int(graph.tensor[i])] for i in (send, receive))
        yield DTYPE.finding(
            f"{graph.ops[send]} on rank {rank_of(graph, send)} sends {listed(_dtypes(sent), 'and')}, but "
            f"{graph.ops[receive]} on rank {rank_of(graph, receive)} expects {listed(_dtypes(wanted), 'and')}",
            help=f"receive as {listed(_dtypes(sent), 'and')}, or cast before the send",
            witness=subject.witness(send, receive),
        )


def _dtypes(tensor: TensorSpec) -> tuple[str, ...]:
    """The type, or the types of the parts of a packed message."""
    return tuple(part.dtype for part in _by_name(tensor)) or (tensor.dtype,)


LAYOUT = RuleDoc(
    code="PP305",
    title="the two sides of a boundary declare different layouts",
    explanation=(
        "The sender's tensor and the receiver's have different layouts over the tensor-parallel ranks, and nothing "
        "between them changes the layout. The receiver computes with values that mean something else."
    ),
    wrong=_message({"placement": "sharded(0)"}, {}),
    right=_message({"placement": "sharded(0)"}, {"placement": "sharded(0)"}),
)


def _check_layout(subject: Subject) -> Iterator[Finding]:
    graph, pairs = subject.graph, Pairs(subject.graph)
    wrong = pairs.differ(_placements) & pairs.is_payload() & ~pairs.may_reshard()
    for send, receive in pairs.where(wrong):
        sent, wanted = (graph.tensors[int(graph.tensor[i])] for i in (send, receive))
        yield LAYOUT.finding(
            f"the {sent.name} is {listed(_placements(sent), 'and')} over tp, but the {wanted.name} is declared "
            f"{listed(_placements(wanted), 'and')}",
            help="declare the same layout on both sides, or add the reshard between them",
            witness=subject.witness(send, receive),
        )


def _placements(tensor: TensorSpec) -> tuple[str, ...]:
    """The placement, or the placements of the parts of a packed message."""
    return tuple(part.placement for part in _by_name(tensor)) or (tensor.placement,)


MEMORY_ORDER = RuleDoc(
    code="PP312",
    title="a message is sent from, or into, memory of another order",
    explanation=(
        "NCCL sends as many bytes as there are elements, from the tensor's address on: for a transposed view the "
        "elements in another order, for a slice with holes the wrong elements. (PyTorch's gloo refuses such "
        "messages, but accepts such tensors for all_reduce and broadcast. Paddle refuses both. NCCL does not check.)"
    ),
    wrong=_message({"strides": "1x8"}, {}),
    right=_message({"strides": "4x1"}, {}),
)


def memory_order(tensor: TensorSpec) -> tuple[int, ...]:
    """The strides that matter, in elements: of the dims with more than one element.

    Raises:
        ValueError: the tensor has another number of strides than of dims.
    """
    strides = _in_c_order(tensor.shape) if tensor.strides is None else tensor.strides
    if len(strides) != len(tensor.shape):
        raise ValueError(f"tensor {tensor.name!r} has {len(tensor.shape)} dims and {len(strides)} strides")
    return tuple(stride for stride, size in zip(strides, tensor.shape, strict=True) if size > 1)


def has_holes(tensor: TensorSpec) -> bool:
    """Return True if the tensor's strides leave holes in memory, or use an address twice."""
    sizes = [size for size in tensor.shape if size > 1]
    expected = 1
    for stride, size in sorted(zip(memory_order(tensor), sizes, strict=True)):
        if stride != expected:
            return True
        expected *= size
    return False


def _in_c_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def _check_memory_order(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    if all(tensor.strides is None for tensor in graph.tensors):
        return
    pairs = Pairs(graph)
    holes = np.array([*map(has_holes, graph.tensors), False])[graph.tensor]  # False: an end without a tensor
    wrong = pairs.differ(memory_order) & ~pairs.differ(lambda tensor: tensor.shape)  # else PP303 speaks
    wrong |= holes[pairs.send] | holes[pairs.receive]
    for send, receive in pairs.where(wrong & pairs.is_payload()):
        stated = [
            f"{graph.ops[op_id]} on rank {rank_of(graph, op_id)} has strides {list(memory_order(tensor))}"
            + (" with holes" if has_holes(tensor) else "")
            for op_id in (send, receive)
            for tensor in [graph.tensors[int(graph.tensor[op_id])]]
            if graph.tensor[op_id] != NONE
        ]
        yield MEMORY_ORDER.finding(
            " and ".join(stated),
            help="make the tensor contiguous before it is sent, and receive into a contiguous buffer",
            witness=subject.witness(send, receive),
        )


# 3xx: where shapes are exchanged ahead of tensors, every tensor is the one that was announced.
#
# A receiver that learns the shape from a META message sizes its buffer by it.
# The META message of the same work item has the shape of a tensor, else the last
# one before it for the same input: a runtime that sends the shape once and keeps
# it is right as long as the shape does not change.


ANNOUNCED = RuleDoc(
    code="PP313",
    title="a tensor differs from the shape that was announced for it",
    explanation=(
        "The receiver's buffer has the shape and dtype of the last META message for that input. Runtimes that send "
        "it once and keep it (Fleet, DeepSpeed) are right as long as every micro-batch has the first one's shape; a "
        "longer sequence then meets a buffer that is too short, a shorter one leaves the rest of it stale."
    ),
    wrong=(
        "tensor short: shape=8x4 dtype=float32 placement=invariant dims=sh\n"
        "tensor long: shape=16x4 dtype=float32 placement=invariant dims=sh\n"
        "rank 0: 0SEND_META_F0{peer=1 tensor=0} 0F0 0SEND_F0{peer=1 tensor=0 range=0..32} "
        "0F1 0SEND_F1{peer=1 tensor=1 range=0..64} WAIT(0SEND_META_F0) WAIT(0SEND_F0) WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_META_F0{peer=0} WAIT(1RECV_META_F0) 1RECV_F0{peer=0 tensor=0 range=0..32} WAIT(1RECV_F0) 1F0 "
        "1RECV_F1{peer=0 tensor=1 range=0..64} WAIT(1RECV_F1) 1F1"
    ),
    right=(
        "tensor short: shape=8x4 dtype=float32 placement=invariant dims=sh\n"
        "tensor long: shape=16x4 dtype=float32 placement=invariant dims=sh\n"
        "rank 0: 0SEND_META_F0{peer=1 tensor=0} 0F0 0SEND_F0{peer=1 tensor=0 range=0..32} "
        "0SEND_META_F1{peer=1 tensor=1} 0F1 0SEND_F1{peer=1 tensor=1 range=0..64} WAIT(0SEND_META_F0) "
        "WAIT(0SEND_F0) WAIT(0SEND_META_F1) WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_META_F0{peer=0} WAIT(1RECV_META_F0) 1RECV_F0{peer=0 tensor=0 range=0..32} WAIT(1RECV_F0) 1F0 "
        "1RECV_META_F1{peer=0} WAIT(1RECV_META_F1) 1RECV_F1{peer=0 tensor=1 range=0..64} WAIT(1RECV_F1) 1F1"
    ),
)


@dataclass(frozen=True, eq=False)
class Exchange:
    """The receives of tensors that meet a tensor, and the receives of shapes that meet a shape.

    ``own`` is the META receive of the same work item, ``last`` the last META
    receive before the tensor for the same input (a stage of a rank, a direction,
    and the member of the boundary); ``NONE`` without any. ``surplus`` are META receives of no tensor.
    """

    tensors: IntColumn
    own: IntColumn
    last: IntColumn
    surplus: IntColumn


def exchange_of(subject: Subject) -> Exchange:
    """The shape exchange of a subject; see ``Subject.once``."""
    graph = subject.graph
    is_meta = graph.is_kind(META_KINDS)
    rows = np.flatnonzero(graph.is_kind(RECV_KINDS) & (graph.match != NONE))
    rows = rows[is_meta[rows] == is_meta[graph.match[rows]]]  # the rules of matching report others
    meta = is_meta[rows]
    if not meta.any():
        none = np.full(len(rows), NONE, dtype=np.int64)
        return Exchange(rows, none, none, none[:0])
    forward = graph.is_kind(FORWARD_KINDS)[rows].astype(np.int64)
    input_key = packed(graph.rank[rows], graph.stage[rows], forward, _members(graph, rows, meta))
    item = packed(input_key, graph.work_item[rows])
    key = packed(item, place_in_group(packed(item, meta.astype(np.int64))))
    _, tensor, announcement = np.intersect1d(key[~meta], key[meta], assume_unique=True, return_indices=True)
    tensors, metas = rows[~meta], rows[meta]
    own = np.full(len(tensors), NONE, dtype=np.int64)
    own[tensor] = metas[announcement]
    return Exchange(tensors, own, _last_before(rows, meta, input_key)[~meta], np.delete(metas, announcement))


def _members(graph: OpGraph, rows: IntColumn, meta: BoolColumn) -> IntColumn:
    """By receive a number for the member of its boundary; 0 for all if a META message does not name its tensor."""
    sent = graph.tensor[graph.match[rows]]
    if (sent[meta] == NONE).any():
        return np.zeros(len(rows), dtype=np.int64)
    names = sorted({tensor.member for tensor in graph.tensors})
    return np.array([*(names.index(tensor.member) for tensor in graph.tensors), NONE], dtype=np.int64)[sent]


def _last_before(rows: IntColumn, meta: BoolColumn, key: IntColumn) -> IntColumn:
    """For each receive the last META receive before it with the same key; ``NONE`` without any."""
    order = np.lexsort((rows, key))
    last = np.maximum.accumulate(np.where(meta[order], np.arange(len(order)), NONE))
    same = (last != NONE) & (key[order][last] == key[order])
    result = np.full(len(rows), NONE, dtype=np.int64)
    result[order[same]] = rows[order[last[same]]]
    return result


def _check_announced(subject: Subject) -> Iterator[Finding]:
    graph, exchange = subject.graph, subject.once(exchange_of)
    tensors = exchange.tensors
    is_own = (exchange.own != NONE) & (exchange.own < tensors)
    meta = np.where(is_own, exchange.own, exchange.last)  # by which the tensor's buffer is made
    sent, announced = (np.where(rows == NONE, NONE, graph.tensor[graph.match[rows]]) for rows in (tensors, meta))
    forms: dict[object, int] = {}
    form = np.array([*(forms.setdefault((t.shape, t.dims, t.dtype), len(forms)) for t in graph.tensors), NONE])
    for index in np.flatnonzero((sent != NONE) & (announced != NONE) & (form[sent] != form[announced])).tolist():
        receive, source = int(tensors[index]), int(meta[index])
        got, expected = graph.tensors[int(sent[index])], graph.tensors[int(announced[index])]
        yield ANNOUNCED.finding(
            f"{graph.ops[receive]} on rank {rank_of(graph, receive)} gets {got.dtype} {got.dims} {list(got.shape)}, "
            f"but {graph.ops[source]} announced {expected.dtype} {expected.dims} {list(expected.shape)}",
            help=f"announce the shape again before {graph.ops[receive]}, or exchange it for every micro-batch",
            witness=subject.witness(source, receive),
        )


INCOMPLETE = RuleDoc(
    code="PP314",
    title="a tensor has no META message of its own, or a META message has no tensor",
    explanation=(
        "With `transport.shape_exchange: per_message` (variable sequence lengths) each rank receives a shape before "
        "each tensor. A tensor without one has a buffer of unknown size, or of the size of an earlier micro-batch. "
        "In any program, a shape whose tensor never comes takes the place of the next message of its channel in a "
        "runtime that reads a shape and a tensor in turn."
    ),
    wrong=(
        "rank 0: 0F0 0SEND_META_F0{peer=1} 0SEND_META_F0{peer=1} 0SEND_F0{peer=1} WAIT(0SEND_META_F0) "
        "WAIT(0SEND_META_F0) WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_META_F0{peer=0} WAIT(1RECV_META_F0) 1RECV_META_F0{peer=0} WAIT(1RECV_META_F0) "
        "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"
    ),
    right=(
        "rank 0: 0F0 0SEND_META_F0{peer=1} 0SEND_F0{peer=1} WAIT(0SEND_META_F0) WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_META_F0{peer=0} WAIT(1RECV_META_F0) 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"
    ),
)


def _check_complete(subject: Subject) -> Iterator[Finding]:
    graph, exchange = subject.graph, subject.once(exchange_of)
    for meta in exchange.surplus.tolist():
        send = int(graph.match[meta])
        yield INCOMPLETE.finding(
            f"{graph.ops[meta]} on rank {rank_of(graph, meta)} gets the shape of a tensor that is never received",
            help=f"remove {graph.ops[send]} from rank {rank_of(graph, send)} and {graph.ops[meta]}, or send the tensor",
            witness=subject.witness(meta, send),
        )
    if subject.lowered is None or subject.plan.spec.transport.shape_exchange == "none":
        return
    for receive in exchange.tensors[exchange.own == NONE].tolist():
        send = int(graph.match[receive])
        metas = [op._replace(kind=META_OF[op.kind]) for op in (graph.ops[send], graph.ops[receive])]
        yield INCOMPLETE.finding(
            f"{graph.ops[receive]} on rank {rank_of(graph, receive)} has no META message, and "
            "`transport.shape_exchange` is per_message",
            help=f"add {metas[0]} on rank {rank_of(graph, send)}, and {metas[1]} with its wait before "
            f"{graph.ops[receive]}",
            witness=subject.witness(receive, send),
        )


TOO_EARLY = RuleDoc(
    code="PP315",
    title="a receive is posted before the shape of its tensor is known",
    explanation=(
        "A receive needs a buffer of the size of its message, which the META message has. A receive that is posted "
        "before the wait for the META message has a buffer of the last shape, or none. A wait on a side queue does not "
        "hold the host, which allocates the buffer."
    ),
    wrong=(
        "rank 0: 0F0 0SEND_META_F0{peer=1} 0SEND_F0{peer=1} WAIT(0SEND_META_F0) WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_META_F0{peer=0} 1RECV_F0{peer=0} WAIT(1RECV_META_F0) WAIT(1RECV_F0) 1F0"
    ),
    right=(
        "rank 0: 0F0 0SEND_META_F0{peer=1} 0SEND_F0{peer=1} WAIT(0SEND_META_F0) WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_META_F0{peer=0} WAIT(1RECV_META_F0) 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"
    ),
)


def _check_known(subject: Subject) -> Iterator[Finding]:
    graph, exchange = subject.graph, subject.once(exchange_of)
    tensors = exchange.tensors
    meta = np.where(exchange.own == NONE, exchange.last, exchange.own)
    if (meta == NONE).all():
        return
    waits = np.flatnonzero(graph.waits_for != NONE)
    waited = np.full(graph.num_ops + 1, NONE, dtype=np.int64)  # by operation and for NONE: its first wait on the host
    waited[graph.waits_for[waits]] = graph.num_ops
    holds = waits[np.isin(graph.queue[waits], (COMPUTE_QUEUE, HOST_QUEUE))]
    np.minimum.at(waited, graph.waits_for[holds], holds)
    for index in np.flatnonzero((meta > tensors) | (waited[meta] > tensors)).tolist():
        receive, source = int(tensors[index]), int(meta[index])
        yield TOO_EARLY.finding(
            f"rank {rank_of(graph, receive)} posts {graph.ops[receive]} before it knows the shape: "
            + (
                f"{graph.ops[source]} comes later"
                if source > receive
                else f"it waits for {graph.ops[source]} only later, or on another queue"
            ),
            help=f"put WAIT({graph.ops[source]}) before {graph.ops[receive]}",
            witness=subject.witness(source, receive),
        )


RULES: tuple[Rule, ...] = (
    Rule(ANNOUNCED, _check_announced),
    Rule(INCOMPLETE, _check_complete),
    Rule(TOO_EARLY, _check_known),
    Rule(SIZE, _check_size),
    Rule(DTYPE, _check_dtype),
    Rule(LAYOUT, _check_layout),
    Rule(MEMORY_ORDER, _check_memory_order),
)
