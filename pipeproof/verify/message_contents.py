"""PP303 to PP305: both ends of a message declare the same size, shape, dtype and layout; nothing is negotiated."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.problems import listed
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.op_parts import TensorPart
from pipeproof.schedule.op_table import NONE, OpGraph, TensorSpec
from pipeproof.verify.fifo_matching import Pairs, rank_of
from pipeproof.verify.subject import Rule, Subject

SIZE = RuleDoc(
    code="PP303",
    title="a message and its receive buffer differ in size or shape",
    explanation=(
        "Sizes are not negotiated. On NCCL a mismatch hangs or leaves partial data; gloo aborts on a longer "
        "message and accepts a shorter one, leaving the rest of the buffer stale. The same number of elements "
        "in another shape or dim order is accepted everywhere, and scrambles the values."
    ),
    wrong=(
        "tensor sent: shape=16x2x64 dtype=float32 placement=invariant dims=sbh\n"
        "tensor wanted: shape=8x2x64 dtype=float32 placement=invariant dims=sbh\n"
        "rank 0: 0F0 0SEND_F0{peer=1 tensor=0 range=0..2048} WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_F0{peer=0 tensor=1 range=0..1024} WAIT(1RECV_F0) 1F0"
    ),
    right=(
        "tensor sent: shape=16x2x64 dtype=float32 placement=invariant dims=sbh\n"
        "tensor wanted: shape=16x2x64 dtype=float32 placement=invariant dims=sbh\n"
        "rank 0: 0F0 0SEND_F0{peer=1 tensor=0 range=0..2048} WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_F0{peer=0 tensor=1 range=0..2048} WAIT(1RECV_F0) 1F0"
    ),
)


def _check_size(subject: Subject) -> Iterator[Finding]:
    graph, pairs = subject.graph, Pairs(subject.graph)
    num_sent, num_wanted = pairs.num_elements()
    other_form = pairs.differ(_form) & pairs.is_payload() & ~pairs.may_reshard()
    for send, receive in pairs.where((num_sent != num_wanted) | other_form):
        yield SIZE.finding(
            f"{graph.ops[send]} on rank {rank_of(graph, send)} sends {_elements(graph, send)}, but "
            f"{graph.ops[receive]} on rank {rank_of(graph, receive)} expects {_elements(graph, receive)}",
            help="give both sides of the boundary the same shape, dim order and slice",
            witness=subject.witness(send, receive),
        )


def _form(tensor: TensorSpec) -> object:
    """Shape and dims, and those of the parts of a packed message in the order of their names.

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
        "No backend checks the dtype of a message: the bytes are taken as they are, so that float32 read as "
        "int32, or bfloat16 as float16, gives numbers that mean nothing."
    ),
    wrong=(
        "tensor sent: shape=8x4 dtype=bfloat16 placement=invariant dims=sh\n"
        "tensor wanted: shape=8x4 dtype=float32 placement=invariant dims=sh\n"
        "rank 0: 0F0 0SEND_F0{peer=1 tensor=0 range=0..32} WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_F0{peer=0 tensor=1 range=0..32} WAIT(1RECV_F0) 1F0"
    ),
    right=(
        "tensor sent: shape=8x4 dtype=bfloat16 placement=invariant dims=sh\n"
        "tensor wanted: shape=8x4 dtype=bfloat16 placement=invariant dims=sh\n"
        "rank 0: 0F0 0SEND_F0{peer=1 tensor=0 range=0..32} WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_F0{peer=0 tensor=1 range=0..32} WAIT(1RECV_F0) 1F0"
    ),
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
    """The type, or those of the parts of a packed message."""
    return tuple(part.dtype for part in _by_name(tensor)) or (tensor.dtype,)


LAYOUT = RuleDoc(
    code="PP305",
    title="the two sides of a boundary declare different layouts",
    explanation=(
        "The sender's tensor and the receiver's lie differently over the tensor-parallel ranks, and nothing "
        "between them changes the layout. The receiver computes with values that mean something else."
    ),
    wrong=(
        "tensor sent: shape=8x4 dtype=float32 placement=sharded(0) dims=sh\n"
        "tensor wanted: shape=8x4 dtype=float32 placement=invariant dims=sh\n"
        "rank 0: 0F0 0SEND_F0{peer=1 tensor=0 range=0..32} WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_F0{peer=0 tensor=1 range=0..32} WAIT(1RECV_F0) 1F0"
    ),
    right=(
        "tensor sent: shape=8x4 dtype=float32 placement=sharded(0) dims=sh\n"
        "tensor wanted: shape=8x4 dtype=float32 placement=sharded(0) dims=sh\n"
        "rank 0: 0F0 0SEND_F0{peer=1 tensor=0 range=0..32} WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_F0{peer=0 tensor=1 range=0..32} WAIT(1RECV_F0) 1F0"
    ),
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
    """The placement, or those of the parts of a packed message."""
    return tuple(part.placement for part in _by_name(tensor)) or (tensor.placement,)


RULES = (Rule(SIZE, _check_size), Rule(DTYPE, _check_dtype), Rule(LAYOUT, _check_layout))
