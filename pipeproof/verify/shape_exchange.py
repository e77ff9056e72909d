"""3xx: where shapes are exchanged ahead of tensors, every tensor is the one that was announced.

A receiver that learns the shape from a META message makes its buffer by it
and keeps it until the next announcement for the same input. Sending the shape
once is right only as long as it does not change.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.derive import packed
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import FORWARD_KINDS, META_KINDS, RECV_KINDS
from pipeproof.verify.fifo_matching import rank_of
from pipeproof.verify.subject import Rule, Subject

ANNOUNCED = RuleDoc(
    code="PP313",
    title="a tensor differs from the shape that was announced for it",
    severity="error",
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


def _check_announced(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    is_meta = graph.is_kind(META_KINDS)
    if not is_meta.any():
        return
    receives = np.flatnonzero(graph.is_kind(RECV_KINDS) & (graph.match != NONE))
    sent = graph.tensor[graph.match[receives]]
    receives, sent = receives[sent != NONE], sent[sent != NONE]
    announcement = _last_announcement(graph, receives, sent)
    forms: dict[object, int] = {}
    form = np.array([forms.setdefault((t.shape, t.dims, t.dtype), len(forms)) for t in graph.tensors])
    known = announcement != NONE
    wrong = np.zeros(len(receives), dtype=bool)
    wrong[known] = form[sent[known]] != form[sent[announcement[known]]]
    for place in np.flatnonzero(wrong & ~is_meta[receives]).tolist():
        receive, meta = int(receives[place]), int(receives[announcement[place]])
        got, announced = graph.tensors[int(sent[place])], graph.tensors[int(sent[announcement[place]])]
        yield ANNOUNCED.finding(
            f"{graph.ops[receive]} on rank {rank_of(graph, receive)} gets {got.dtype} {got.dims} {list(got.shape)}, "
            f"but {graph.ops[meta]} announced {announced.dtype} {announced.dims} {list(announced.shape)}",
            help=f"announce the shape again before {graph.ops[receive]}, or exchange it for every micro-batch",
            witness=subject.witness(meta, receive),
        )


def _last_announcement(graph: OpGraph, receives: IntColumn, sent: IntColumn) -> IntColumn:
    """For each receive the place of the META receive before it that speaks of the same input; ``NONE`` without any.

    An input is a stage of a rank, a direction, and which of the tensors that cross together it is.
    """
    names = sorted({tensor.member for tensor in graph.tensors})
    member = np.array([names.index(tensor.member) for tensor in graph.tensors], dtype=np.int64)[sent]
    forward = graph.is_kind(FORWARD_KINDS)[receives].astype(np.int64)
    key = packed(graph.rank[receives], graph.stage[receives], forward, member)
    order = np.lexsort((receives, key))
    meta = graph.is_kind(META_KINDS)[receives][order]
    last = np.maximum.accumulate(np.where(meta, np.arange(len(order)), NONE))
    same = (last != NONE) & (key[order][last] == key[order])
    result = np.full(len(receives), NONE, dtype=np.int64)
    result[order[same]] = order[last[same]]
    return result


RULES = (Rule(ANNOUNCED, _check_announced),)
