"""3xx: sends and receives meet by their place in the FIFO, and nothing else.

There are no tags on NCCL (and none that Paddle lets a user set on gloo): the
k-th send of a channel meets the k-th receive, whatever they hold. Collectives
of a group meet the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import numpy as np

from pipeproof.schedule.ops import COLLECTIVE_KINDS, SEND_KINDS, Op, OpKind
from pipeproof.schedule.optable import NONE, EdgeKind, OpGraph, TensorSpec
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding, OpsWitness
from pipeproof.verify.subject import Rule, Subject, finding

_PARTNER = {
    OpKind.SEND_FORWARD: (OpKind.RECV_FORWARD, +1),
    OpKind.RECV_FORWARD: (OpKind.SEND_FORWARD, -1),
    OpKind.SEND_BACKWARD: (OpKind.RECV_BACKWARD, -1),
    OpKind.RECV_BACKWARD: (OpKind.SEND_BACKWARD, +1),
}


def partner_of(transfer: Op) -> Op:
    """The operation that a transfer means to meet: ``0SEND_F3`` means ``1RECV_F3``."""
    kind, step = _PARTNER[transfer.kind]
    return Op(kind, transfer.stage + step, transfer.micro_batch)


def channel_fifos(graph: OpGraph) -> list[tuple[list[int], list[int]]]:
    """(sends, receives) of each channel as op ids, each list in FIFO order."""
    fifos: list[tuple[list[int], list[int]]] = [([], []) for _ in graph.channels]
    for op_id in np.flatnonzero(graph.channel != NONE).tolist():
        side = 0 if graph.ops[op_id].kind in SEND_KINDS else 1
        fifos[int(graph.channel[op_id])][side].append(op_id)
    return fifos


def _matched_tensors(graph: OpGraph) -> Iterator[tuple[int, int, TensorSpec, TensorSpec]]:
    """(send, receive, the sender's tensor, the receiver's tensor) of each matched pair."""
    for send, receive in graph.edges[EdgeKind.MATCH].tolist():
        yield send, receive, graph.tensors[int(graph.tensor[send])], graph.tensors[int(graph.tensor[receive])]


UNMATCHED = RuleDoc(
    code="PP301",
    title="a send or receive has no counterpart",
    severity="error",
    explanation=(
        "A channel carries more sends than receives, or more receives than sends. The surplus operation waits "
        "for a peer that never comes: the job hangs, or an eager backend leaves a message behind that the next "
        "step will receive."
    ),
    wrong="rank 0: 0SEND_F0 0SEND_F1      rank 1: 1RECV_F0",
    right="rank 0: 0SEND_F0 0SEND_F1      rank 1: 1RECV_F0 1RECV_F1",
)


def _check_unmatched(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    for channel, (sends, receives) in zip(graph.channels, channel_fifos(graph), strict=True):
        surplus = sends[len(receives) :] or receives[len(sends) :]
        if not surplus:
            continue
        missing_rank = channel.dst if len(sends) > len(receives) else channel.src
        first = graph.ops[surplus[0]]
        yield finding(
            UNMATCHED,
            f"channel {channel} has {len(sends)} sends and {len(receives)} receives; "
            f"{first} on rank {int(graph.rank[surplus[0]])} never meets a counterpart",
            help=f"add {partner_of(first)} to rank {missing_rank}, or remove {first}",
            witness=OpsWitness(tuple(subject.witness_op(op_id) for op_id in surplus)),
        )


IDENTITY = RuleDoc(
    code="PP302",
    title="the k-th send of a channel meets a receive that means another tensor",
    severity="error",
    explanation=(
        "Both sides agree in size, so no backend notices: the receiver takes one micro-batch's tensor for "
        "another's, or an activation for a gradient. Training goes on with wrong values."
    ),
    wrong="rank 0: 0SEND_F0 0SEND_F1      rank 1: 1RECV_F1 1RECV_F0",
    right="rank 0: 0SEND_F0 0SEND_F1      rank 1: 1RECV_F0 1RECV_F1",
)


def _check_identity(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    for send, receive in graph.edges[EdgeKind.MATCH].tolist():
        meant = partner_of(graph.ops[send])
        if graph.ops[receive] != meant:
            position = int(graph.position[send])
            yield finding(
                IDENTITY,
                f"on channel {graph.channels[int(graph.channel[send])]} the send at FIFO position {position} is "
                f"{graph.ops[send]} and means {meant}, but the receive there is {graph.ops[receive]}",
                help="issue the receives in the order of the sends; a FIFO has no tags to tell them apart",
                witness=OpsWitness((subject.witness_op(send), subject.witness_op(receive))),
            )


SIZE = RuleDoc(
    code="PP303",
    title="a message and its receive buffer differ in size or shape",
    severity="error",
    explanation=(
        "Sizes are not negotiated. On NCCL a mismatch hangs or leaves partial data; gloo aborts on a longer "
        "message and accepts a shorter one, leaving the rest of the buffer stale. The same number of elements "
        "in another shape or dim order is accepted everywhere, and scrambles the values."
    ),
    wrong="sender [16, 2, 64], receiver [8, 2, 64]",
    right="sender [16, 2, 64], receiver [16, 2, 64]",
)


def _check_size(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    for send, receive, sent, wanted in _matched_tensors(graph):
        num_sent = int(graph.stop[send] - graph.start[send])
        num_wanted = int(graph.stop[receive] - graph.start[receive])
        same_form = (sent.shape, sent.dims) == (wanted.shape, wanted.dims)
        if num_sent != num_wanted or not same_form:
            yield finding(
                SIZE,
                f"{graph.ops[send]} on rank {int(graph.rank[send])} sends {num_sent} elements of "
                f"{sent.dims} {list(sent.shape)}, but {graph.ops[receive]} on rank {int(graph.rank[receive])} "
                f"expects {num_wanted} of {wanted.dims} {list(wanted.shape)}",
                help="give both sides of the boundary the same shape, dim order and slice",
                witness=OpsWitness((subject.witness_op(send), subject.witness_op(receive))),
            )


DTYPE = RuleDoc(
    code="PP304",
    title="a message and its receive buffer differ in dtype",
    severity="error",
    explanation=(
        "No backend checks the dtype of a message: the bytes are taken as they are, so that float32 read as "
        "int32, or bfloat16 as float16, gives numbers that mean nothing."
    ),
    wrong="sender float32, receiver float64",
    right="sender float32, receiver float32",
)


def _check_dtype(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    for send, receive, sent, wanted in _matched_tensors(graph):
        if sent.dtype != wanted.dtype:
            yield finding(
                DTYPE,
                f"{graph.ops[send]} on rank {int(graph.rank[send])} sends {sent.dtype}, but "
                f"{graph.ops[receive]} on rank {int(graph.rank[receive])} expects {wanted.dtype}",
                help=f"receive as {sent.dtype}, or cast before the send",
                witness=OpsWitness((subject.witness_op(send), subject.witness_op(receive))),
            )


LAYOUT = RuleDoc(
    code="PP305",
    title="the two sides of a boundary declare different layouts",
    severity="error",
    explanation=(
        "The sender's tensor and the receiver's lie differently over the tensor-parallel ranks, and nothing "
        "between them changes the layout. The receiver computes with values that mean something else."
    ),
    wrong="sender sharded(0) over tp, receiver invariant over tp",
    right="both sharded(0), or a gather between them",
)


def _check_layout(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    for send, receive, sent, wanted in _matched_tensors(graph):
        if sent.placement != wanted.placement:
            yield finding(
                LAYOUT,
                f"the {sent.name} is {sent.placement} over tp, but the {wanted.name} is declared {wanted.placement}",
                help="declare the same layout on both sides, or add the reshard between them",
                witness=OpsWitness((subject.witness_op(send), subject.witness_op(receive))),
            )


COLLECTIVE = RuleDoc(
    code="PP306",
    title="the members of a group issue different collectives",
    severity="error",
    explanation=(
        "Every member of a group must issue the same sequence of collectives: the k-th call of one meets the "
        "k-th call of the others. A member that is missing hangs the group; one that differs mixes up values "
        "or hangs."
    ),
    wrong="rank 0: ALL_REDUCE of 64 elements      rank 1: ALL_REDUCE of 32 elements",
    right="rank 0: ALL_REDUCE of 64 elements      rank 1: ALL_REDUCE of 64 elements",
)


def group_sequences(graph: OpGraph) -> list[dict[int, list[int]]]:
    """By group: the collectives that each member issues on it, as op ids in order."""
    sequences: list[dict[int, list[int]]] = [{rank: [] for rank in group.ranks} for group in graph.groups]
    for op_id in np.flatnonzero(graph.group != NONE).tolist():
        if graph.ops[op_id].kind in COLLECTIVE_KINDS:
            sequences[int(graph.group[op_id])].setdefault(int(graph.rank[op_id]), []).append(op_id)
    return sequences


def _check_collectives(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph

    def call(op_id: int | None) -> tuple[object, ...] | None:
        if op_id is None:
            return None
        return (
            graph.ops[op_id],
            int(graph.stop[op_id] - graph.start[op_id]),
            graph.reduction_names[int(graph.reduction[op_id])],
        )

    for group, sequences in zip(graph.groups, group_sequences(graph), strict=True):
        leader = group.ranks[0]
        for rank in group.ranks[1:]:
            pairs = zip_longest(sequences[leader], sequences[rank])
            for position, (ours, theirs) in enumerate(pairs):
                if call(ours) == call(theirs):
                    continue
                yield finding(
                    COLLECTIVE,
                    f"collective {position} of {group.axis} group {list(group.ranks)} is "
                    f"{_describe(graph, ours)} on rank {leader} but {_describe(graph, theirs)} on rank {rank}",
                    help="issue the same collectives in the same order on every member of the group",
                    witness=OpsWitness(tuple(subject.witness_op(o) for o in (ours, theirs) if o is not None)),
                )
                break  # what follows the first difference is out of step anyway


def _describe(graph: OpGraph, op_id: int | None) -> str:
    if op_id is None:
        return "missing"
    return f"{graph.ops[op_id]} of {int(graph.stop[op_id] - graph.start[op_id])} elements"


RULES = (
    Rule(UNMATCHED, _check_unmatched),
    Rule(IDENTITY, _check_identity),
    Rule(SIZE, _check_size),
    Rule(DTYPE, _check_dtype),
    Rule(LAYOUT, _check_layout),
    Rule(COLLECTIVE, _check_collectives),
)
