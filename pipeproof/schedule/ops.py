"""Operations and their text form.

An operation is one action of one rank: compute, send, receive, wait, take part in a collective. Its text form is
PyTorch's pipeline IR where the two overlap (``2F0``, ``3SEND_F1``, ``1RECV_B0``, ``2UNSHARD``) and extends it:

EBNF::

    op         = compute | copy | transfer | transport | collective | child | part | update | scale | stage_op | wait
               | free ;
    compute    = stage , ( "F" | "B" | "I" | "W" ) , work_item ;
    copy       = stage , ( "OFFLOAD" | "RELOAD" ) , work_item ;
    transfer   = stage , ( "SEND" | "RECV" ) , [ "_META" ] , direction , work_item , [ ( ">" | "<" ) , stage ] ;
    transport  = stage , ( "SLICE" | "GATHER" ) , direction , work_item ;
    work_item  = micro_batch , [ ".s" , split ] ;
    direction  = "_F" | "_B" ;
    collective = stage , call , [ micro_batch ] , ":" , axis ;
    child      = ( compute | update ) , "/" , index , "." , call , ":" , axis ;
    part       = compute , "/" , index , "." , ( "PART" | "WEIGHTS" ) ;
    call       = "ALL_REDUCE" | "ALL_GATHER" | "REDUCE_SCATTER" | "ALL_TO_ALL" | "BROADCAST" | "BARRIER" ;
    update     = stage , ( "REDUCE_GRAD" , [ micro_batch ] | "GATHER_WEIGHT" ) , [ ":" , axis ] ;
    scale      = stage , "SCALE_GRAD" , [ micro_batch ] ;
    stage_op   = stage , ( "STEP" | "UNSHARD" | "RESHARD" ) ;
    wait       = "WAIT(" , target , ")" ;
    free       = "FREE(" , target , ")" ;
    target     = ? any op but a wait or a free ? ;
    axis       = "pp" | "dp" | "tp" | "cp" | "ep" ;
    stage = micro_batch = split = index = "0" | nonzero digit , { digit } ;

A work item is a micro-batch or, where sequences are split, one
split of a micro-batch (``2F0.s1``). A ``META`` transfer is an exchange of shapes ahead of the tensor itself.
A transfer of an edge that leads past the next stage names the stage at its other end: ``0SEND_F2>3`` sends to stage 3,
``3RECV_F2<0`` receives it. ``OFFLOAD`` copies the tensors that a forward keeps for its backward into host memory,
``RELOAD`` copies them back. ``REDUCE_GRAD`` sums all that a stage's gradients hold, with a micro-batch its share
alone (sharded gradients). ``UNSHARD`` and ``RESHARD`` gather and drop a stage's sharded weights (FSDP).
``GATHER_WEIGHT`` joins the shares of a stage's weights that ranks have updated (a sharded optimizer). ``PART`` is the
part of a computation between two of its collectives, ``WEIGHTS`` the weight gradients that a backward has deferred: the
parts of an overlapped pair (``schedule.overlap``). Parsing matches the whole string: ``2F0x``, ``02F0`` and ``2f0`` are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class OpKind(StrEnum):
    """Kinds of operations; the value is the mark in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    SEND_META_FORWARD = "SEND_META_F"
    RECV_META_FORWARD = "RECV_META_F"
    SEND_META_BACKWARD = "SEND_META_B"
    RECV_META_BACKWARD = "RECV_META_B"
    SLICE_FORWARD = "SLICE_F"
    SLICE_BACKWARD = "SLICE_B"
    GATHER_FORWARD = "GATHER_F"
    GATHER_BACKWARD = "GATHER_B"
    WAIT = "WAIT"
    FREE = "FREE"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    SCALE_GRAD = "SCALE_GRAD"
    STEP = "STEP"
    ALL_REDUCE = "ALL_REDUCE"
    ALL_GATHER = "ALL_GATHER"
    REDUCE_SCATTER = "REDUCE_SCATTER"
    ALL_TO_ALL = "ALL_TO_ALL"
    BROADCAST = "BROADCAST"
    BARRIER = "BARRIER"
    GATHER_WEIGHT = "GATHER_WEIGHT"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    PART = "PART"
    WEIGHTS = "WEIGHTS"

    __hash__ = str.__hash__  # the enum's own is Python code, and every operation of a graph is hashed


KINDS: tuple[OpKind, ...] = tuple(OpKind)
"""All kinds; a kind's index is its code in the op table."""
KIND_CODE: Mapping[OpKind, int] = MappingProxyType({kind: code for code, kind in enumerate(KINDS)})

COMPUTE_KINDS = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})
PART_KINDS = frozenset({OpKind.PART, OpKind.WEIGHTS})
"""Parts of a computation that alternates with another one; its own row is their container."""
COPY_KINDS = frozenset({OpKind.OFFLOAD, OpKind.RELOAD})
"""Copies of a work item's activations between device and host memory."""
META_KINDS = frozenset(
    {OpKind.SEND_META_FORWARD, OpKind.RECV_META_FORWARD, OpKind.SEND_META_BACKWARD, OpKind.RECV_META_BACKWARD}
)
META_OF: Mapping[OpKind, OpKind] = MappingProxyType(
    {
        OpKind.SEND_FORWARD: OpKind.SEND_META_FORWARD,
        OpKind.RECV_FORWARD: OpKind.RECV_META_FORWARD,
        OpKind.SEND_BACKWARD: OpKind.SEND_META_BACKWARD,
        OpKind.RECV_BACKWARD: OpKind.RECV_META_BACKWARD,
    }
)
"""By kind of a transfer of a tensor: the kind of the transfer of its shape."""
SEND_KINDS = frozenset({OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD, OpKind.SEND_META_FORWARD, OpKind.SEND_META_BACKWARD})
RECV_KINDS = frozenset({OpKind.RECV_FORWARD, OpKind.RECV_BACKWARD, OpKind.RECV_META_FORWARD, OpKind.RECV_META_BACKWARD})
TRANSFER_KINDS = SEND_KINDS | RECV_KINDS
STEP_OF_TRANSFER: Mapping[OpKind, int] = MappingProxyType(
    {kind: 1 if ("SEND" in kind) == kind.endswith("_F") else -1 for kind in sorted(TRANSFER_KINDS)}
)
"""By kind of a transfer: the offset to the stage at its other end, between neighbouring stages."""
SLICE_KINDS = frozenset({OpKind.SLICE_FORWARD, OpKind.SLICE_BACKWARD})
GATHER_KINDS = frozenset({OpKind.GATHER_FORWARD, OpKind.GATHER_BACKWARD})
CHILD_KINDS = frozenset(
    {
        OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL, OpKind.BROADCAST,
        OpKind.BARRIER,
    }
)  # fmt: skip
"""Collectives by name: mostly below a compute operation or a reduction, but they may also be separate."""
UPDATE_KINDS = frozenset({OpKind.REDUCE_GRAD, OpKind.GATHER_WEIGHT})
"""Kinds that are a sum or a gather over one axis, with a collective below it for each weight."""
FORWARD_KINDS = frozenset(
    {
        OpKind.FORWARD, OpKind.SEND_FORWARD, OpKind.RECV_FORWARD, OpKind.SLICE_FORWARD, OpKind.GATHER_FORWARD,
        OpKind.SEND_META_FORWARD, OpKind.RECV_META_FORWARD,
    }
)  # fmt: skip
"""Kinds that belong to the forward direction."""
COLLECTIVE_KINDS = GATHER_KINDS | CHILD_KINDS
"""Kinds that every member of a group must issue together."""
TARGET_KINDS = frozenset({OpKind.WAIT, OpKind.FREE})
"""Kinds that are about another operation of their rank."""

AXES = ("pp", "dp", "tp", "cp", "ep")

TRACE_PREFIX = "pipeproof:"
"""Begin of the name of an operation's range in the trace of a profiler; the text of the operation follows."""


class Op(NamedTuple):
    """One operation of one rank's program.

    ``micro_batch`` is None for operations of a whole step; ``split`` is the split of its sequences, if these are split.
    ``target`` is the operation that a ``WAIT`` waits for or a ``FREE`` frees, or the parent of a child collective or
    part. ``index`` is the child's position among its parent's collectives, or parts of one kind; for a transfer past
    the next stage it is the stage at its other end. ``axis`` is the mesh axis of a reduction or collective.
    """

    kind: OpKind
    stage: int
    micro_batch: int | None = None
    target: Op | None = None
    index: int | None = None  # type: ignore[assignment]  # an operation is not searched by value
    axis: str | None = None
    split: int | None = None

    def __str__(self) -> str:
        if self.kind in TARGET_KINDS:
            return f"{self.kind}({self.target})"
        if self.kind in CHILD_KINDS and self.target is not None:
            return f"{self.target}/{self.index}.{self.kind}:{self.axis}"
        if self.kind in PART_KINDS:
            return f"{self.target}/{self.index}.{self.kind}"
        micro_batch = "" if self.micro_batch is None else self.micro_batch
        split = "" if self.split is None else f".s{self.split}"
        axis = "" if self.axis is None else f":{self.axis}"
        other = "" if self.index is None else f"{'>' if self.kind in SEND_KINDS else '<'}{self.index}"
        return f"{self.stage}{self.kind}{micro_batch}{split}{axis}{other}"

    @property
    def is_forward(self) -> bool:
        """True if this operation belongs to the forward direction."""
        return self.kind in FORWARD_KINDS


def wait_for(target: Op) -> Op:
    """The operation that blocks its queue until ``target`` is done."""
    return Op(OpKind.WAIT, target.stage, target.micro_batch, target=target, split=target.split)


def free_of(target: Op) -> Op:
    """The operation that gives back the memory that ``target`` reads or writes."""
    return Op(OpKind.FREE, target.stage, target.micro_batch, target=target, split=target.split)


def child_of(parent: Op, index: int, kind: OpKind, axis: str) -> Op:
    """The ``index``-th collective that ``parent`` issues while it runs."""
    return Op(kind, parent.stage, parent.micro_batch, target=parent, index=index, axis=axis, split=parent.split)


def part_of(parent: Op, index: int, kind: OpKind) -> Op:
    """The ``index``-th part of ``parent``: PART or WEIGHTS."""
    return Op(kind, parent.stage, parent.micro_batch, target=parent, index=index, split=parent.split)


def _names(kinds: frozenset[OpKind]) -> str:
    """A pattern for the kinds' marks; longer marks first, because one may begin another."""
    return "|".join(sorted((str(kind) for kind in kinds), key=lambda name: (-len(name), name)))


_NUMBER = r"(0|[1-9]\d*)"
_AXIS = rf"({'|'.join(AXES)})"
_OF_WORK_ITEM = COMPUTE_KINDS | COPY_KINDS | TRANSFER_KINDS | SLICE_KINDS | GATHER_KINDS
_INDEXED = re.compile(rf"{_NUMBER}({_names(_OF_WORK_ITEM)}){_NUMBER}(?:\.s{_NUMBER})?(?:([<>]){_NUMBER})?", re.ASCII)
_COLLECTIVE = re.compile(rf"{_NUMBER}({_names(CHILD_KINDS)}){_NUMBER}?:{_AXIS}", re.ASCII)
_UPDATE = re.compile(rf"{_NUMBER}(?:(REDUCE_GRAD){_NUMBER}?|(GATHER_WEIGHT))(?::{_AXIS})?", re.ASCII)
_SCALE = re.compile(rf"{_NUMBER}SCALE_GRAD{_NUMBER}?", re.ASCII)
_STAGE_OP = re.compile(rf"{_NUMBER}(STEP|UNSHARD|RESHARD)", re.ASCII)
_TARGETED = re.compile(r"(WAIT|FREE)\(([^()]*)\)")
_CHILD = re.compile(rf"([^/]*)/{_NUMBER}\.({_names(CHILD_KINDS)}):{_AXIS}", re.ASCII)
_PART = re.compile(rf"([^/]*)/{_NUMBER}\.({_names(PART_KINDS)})", re.ASCII)


def parse_op(text: str) -> Op:
    """Read the text form; ``str(parse_op(t)) == t`` for every accepted ``t``.

    Raises:
        ValueError: ``text`` is not the whole text form of one operation.
    """
    if match := _INDEXED.fullmatch(text):
        kind = OpKind(match[2])
        split, other = (None if match[group] is None else int(match[group]) for group in (4, 6))
        if match[5] is None or (match[5] == ">" and kind in SEND_KINDS) or (match[5] == "<" and kind in RECV_KINDS):
            return Op(kind, int(match[1]), int(match[3]), index=other, split=split)
    if match := _COLLECTIVE.fullmatch(text):
        return Op(OpKind(match[2]), int(match[1]), None if match[3] is None else int(match[3]), axis=match[4])
    if match := _UPDATE.fullmatch(text):
        micro_batch = None if match[3] is None else int(match[3])
        return Op(OpKind(match[2] or match[4]), int(match[1]), micro_batch, axis=match[5])
    if match := _SCALE.fullmatch(text):
        return Op(OpKind.SCALE_GRAD, int(match[1]), None if match[2] is None else int(match[2]))
    if match := _STAGE_OP.fullmatch(text):
        return Op(OpKind(match[2]), int(match[1]))
    if match := _TARGETED.fullmatch(text):
        return (wait_for if match[1] == "WAIT" else free_of)(parse_op(match[2]))
    if match := _CHILD.fullmatch(text):
        parent = parse_op(match[1])
        if parent.kind not in COMPUTE_KINDS | UPDATE_KINDS:
            raise ValueError(
                f"{text!r}: a child collective belongs to a compute, REDUCE_GRAD or GATHER_WEIGHT op, not {parent}"
            )
        return child_of(parent, int(match[2]), OpKind(match[3]), match[4])
    if match := _PART.fullmatch(text):
        parent = parse_op(match[1])
        if parent.kind not in COMPUTE_KINDS:
            raise ValueError(f"{text!r}: a part belongs to a compute op, not {parent}")
        return part_of(parent, int(match[2]), OpKind(match[3]))
    raise ValueError(f"{text!r} is not an operation; examples: 2F0, 3SEND_B1, WAIT(1RECV_F0), 0STEP")
