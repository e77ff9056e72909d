"""Memory order of messages: both ends store the tensor's elements in one order and without holes."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.op_table import NONE, TensorSpec
from pipeproof.verify.fifo_matching import Pairs, rank_of
from pipeproof.verify.subject import Rule, Subject

MEMORY_ORDER = RuleDoc(
    code="PP312",
    title="a message is sent from, or into, memory of another order",
    explanation=(
        "NCCL takes as many bytes as there are elements, from the tensor's address on: of a transposed view the "
        "elements in another order, of a slice with holes the wrong elements. (PyTorch's gloo refuses such "
        "messages, but takes such tensors for all_reduce and broadcast. Paddle refuses both. NCCL does not look.)"
    ),
    wrong=(
        "tensor sent: shape=8x4 dtype=float32 placement=invariant dims=sh strides=1x8\n"
        "tensor wanted: shape=8x4 dtype=float32 placement=invariant dims=sh\n"
        "rank 0: 0F0 0SEND_F0{peer=1 tensor=0 range=0..32} WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_F0{peer=0 tensor=1 range=0..32} WAIT(1RECV_F0) 1F0"
    ),
    right=(
        "tensor sent: shape=8x4 dtype=float32 placement=invariant dims=sh strides=4x1\n"
        "tensor wanted: shape=8x4 dtype=float32 placement=invariant dims=sh\n"
        "rank 0: 0F0 0SEND_F0{peer=1 tensor=0 range=0..32} WAIT(0SEND_F0)\n"
        "rank 1: 1RECV_F0{peer=0 tensor=1 range=0..32} WAIT(1RECV_F0) 1F0"
    ),
)


def memory_order(tensor: TensorSpec) -> tuple[int, ...]:
    """The strides that matter, in elements: those of the dims that have more than one element.

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
    holes = [has_holes(tensor) for tensor in graph.tensors]
    other_order = pairs.differ(memory_order) & ~pairs.differ(lambda tensor: tensor.shape)  # else PP303 speaks
    wrong = other_order | pairs.either(holes)
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


RULES = (Rule(MEMORY_ORDER, _check_memory_order),)
