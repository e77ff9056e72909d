"""Operations and their text form.

An operation is what one rank does once: compute, send, receive, wait, take
part in a collective. Its text form is PyTorch's pipeline IR where the two
overlap (``2F0``, ``3SEND_F1``, ``1RECV_B0``) and extends it:

EBNF::

    op         = compute | transfer | transport | wait | child | reduce | step ;
    compute    = stage , ( "F" | "B" | "I" | "W" ) , micro_batch ;
    transfer   = stage , ( "SEND" | "RECV" ) , direction , micro_batch ;
    transport  = stage , ( "SLICE" | "GATHER" ) , direction , micro_batch ;
    direction  = "_F" | "_B" ;
    wait       = "WAIT(" , transfer , ")" ;
    reduce     = stage , "REDUCE_GRAD:" , axis ;
    step       = stage , "STEP" ;
    child      = ( compute | reduce ) , "/" , index , "." , collective , ":" , axis ;
    collective = "ALL_REDUCE" | "ALL_GATHER" | "REDUCE_SCATTER" ;
    axis       = "pp" | "dp" | "tp" | "cp" | "ep" ;
    stage = micro_batch = index = "0" | nonzero digit , { digit } ;

Parsing matches the whole string: ``2F0x``, ``02F0`` and ``2f0`` are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class OpKind(StrEnum):
    """What an operation does; the value is its mark in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    SLICE_FORWARD = "SLICE_F"
    SLICE_BACKWARD = "SLICE_B"
    GATHER_FORWARD = "GATHER_F"
    GATHER_BACKWARD = "GATHER_B"
    WAIT = "WAIT"
    REDUCE_GRAD = "REDUCE_GRAD"
    STEP = "STEP"
    ALL_REDUCE = "ALL_REDUCE"
    ALL_GATHER = "ALL_GATHER"
    REDUCE_SCATTER = "REDUCE_SCATTER"

    __hash__ = str.__hash__  # the enum's own is Python code, and every operation of a graph is hashed


COMPUTE_KINDS = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})
SEND_KINDS = frozenset({OpKind.SEND_FORWARD, OpKind.SEND_BACKWARD})
RECV_KINDS = frozenset({OpKind.RECV_FORWARD, OpKind.RECV_BACKWARD})
TRANSFER_KINDS = SEND_KINDS | RECV_KINDS
SLICE_KINDS = frozenset({OpKind.SLICE_FORWARD, OpKind.SLICE_BACKWARD})
GATHER_KINDS = frozenset({OpKind.GATHER_FORWARD, OpKind.GATHER_BACKWARD})
CHILD_KINDS = frozenset({OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER})
FORWARD_KINDS = frozenset(
    {
        OpKind.FORWARD, OpKind.SEND_FORWARD, OpKind.RECV_FORWARD, OpKind.SLICE_FORWARD, OpKind.GATHER_FORWARD,
    }
)  # fmt: skip
"""Kinds that belong to the forward direction."""
COLLECTIVE_KINDS = GATHER_KINDS | CHILD_KINDS
"""Kinds that every member of a group must issue together."""

AXES = ("pp", "dp", "tp", "cp", "ep")


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank's program.

    ``micro_batch`` is None for ``STEP`` and ``REDUCE_GRAD``. ``target`` is the
    transfer that a ``WAIT`` waits for, or the parent of a child collective;
    ``index`` is the child's place among its parent's collectives; ``axis`` the
    mesh axis of a reduction or child collective.
    """

    kind: OpKind
    stage: int
    micro_batch: int | None = None
    target: Op | None = None
    index: int | None = None
    axis: str | None = None

    def __str__(self) -> str:
        if self.kind is OpKind.WAIT:
            return f"WAIT({self.target})"
        if self.kind in CHILD_KINDS:
            return f"{self.target}/{self.index}.{self.kind}:{self.axis}"
        if self.kind is OpKind.REDUCE_GRAD:
            return f"{self.stage}{self.kind}:{self.axis}"
        if self.kind is OpKind.STEP:
            return f"{self.stage}{self.kind}"
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def is_forward(self) -> bool:
        """Whether this operation belongs to the forward direction."""
        return self.kind in FORWARD_KINDS


def wait_for(transfer: Op) -> Op:
    """The operation that blocks its rank until ``transfer`` is done."""
    return Op(OpKind.WAIT, transfer.stage, transfer.micro_batch, target=transfer)


def child_of(parent: Op, index: int, kind: OpKind, axis: str) -> Op:
    """The ``index``-th collective that ``parent`` issues while it runs."""
    return Op(kind, parent.stage, parent.micro_batch, target=parent, index=index, axis=axis)


_NUMBER = r"(0|[1-9]\d*)"
_INDEXED = re.compile(
    rf"{_NUMBER}(SEND_F|SEND_B|RECV_F|RECV_B|SLICE_F|SLICE_B|GATHER_F|GATHER_B|F|B|I|W){_NUMBER}", re.ASCII
)
_REDUCE = re.compile(rf"{_NUMBER}REDUCE_GRAD:({'|'.join(AXES)})", re.ASCII)
_STEP = re.compile(rf"{_NUMBER}STEP", re.ASCII)
_WAIT = re.compile(r"WAIT\(([^()]*)\)")
_CHILD = re.compile(rf"([^/]*)/{_NUMBER}\.(ALL_REDUCE|ALL_GATHER|REDUCE_SCATTER):({'|'.join(AXES)})", re.ASCII)


def parse_op(text: str) -> Op:
    """Read the text form; ``str(parse_op(t)) == t`` for every accepted ``t``.

    Raises:
        ValueError: ``text`` is not the whole text form of one operation.
    """
    if match := _INDEXED.fullmatch(text):
        return Op(OpKind(match[2]), int(match[1]), int(match[3]))
    if match := _REDUCE.fullmatch(text):
        return Op(OpKind.REDUCE_GRAD, int(match[1]), axis=match[2])
    if match := _STEP.fullmatch(text):
        return Op(OpKind.STEP, int(match[1]))
    if match := _WAIT.fullmatch(text):
        target = parse_op(match[1])
        if target.kind not in TRANSFER_KINDS:
            raise ValueError(f"{text!r}: WAIT takes a SEND or RECV, not {target}")
        return wait_for(target)
    if match := _CHILD.fullmatch(text):
        parent = parse_op(match[1])
        if parent.kind not in COMPUTE_KINDS and parent.kind is not OpKind.REDUCE_GRAD:
            raise ValueError(f"{text!r}: a child collective belongs to a compute or REDUCE_GRAD op, not {parent}")
        return child_of(parent, int(match[2]), OpKind(match[3]), match[4])
    raise ValueError(f"{text!r} is not an operation; examples: 2F0, 3SEND_B1, WAIT(1RECV_F0), 0STEP")
