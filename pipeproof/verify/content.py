"""Symbolic contents of buffers: the results that each kind of operation writes to, and expects in, its named buffers.

The kind of an operation states its inputs: ``1F0`` reads the activation of stage
0 for micro-batch 0. The names on its row state where they are stored. A program
is right if every read through a name finds the input of the kind. So contents
are symbolic: the *terms* of a buffer are the results of forwards and backwards
in it, one for a tensor, several for a sum.

An operation is assumed to compute correctly from its inputs. A wrong read is
reported where it happens, and not again for later operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import CHILD_KINDS, KINDS, OpKind


class Role(Enum):
    """The kind of result that a term is."""

    ACTIVATION = "activation"
    """The output of a forward."""
    INPUT_GRADIENT = "input gradient"
    """The result of a backward that goes to the stage before."""
    ADDEND = "weight gradient"
    """The result of a backward that is added to the gradient of the weights."""
    EITHER = "gradient"
    """One of the two: the result of a backward that adds to no buffer."""


class Term(NamedTuple):
    """The result of a stage's forward or backward for one work item. A ``received`` one came from another rank."""

    role: Role
    stage: int
    work_item: int
    received: bool = False


class State(Enum):
    """A content without terms."""

    UNSET = "what was there before"
    """Nothing has written it yet, or the optimizer has: it is there from the start."""
    ZERO = "zeros"
    OTHER = "other values"
    """Gathered weights, a count, a norm: neither an activation nor a gradient."""


Change = tuple[int, int, int, int]
"""(kind, axis, reduction, scale) of a reduction or scaling that a gradient has gone through."""


class Share(NamedTuple):
    """The number of times that a term is in a buffer, and its reductions and scalings in this memory."""

    times: int = 1
    changes: frozenset[Change] = frozenset()


Terms = Mapping[Term, Share]


@dataclass(frozen=True, slots=True)
class Content:
    """The content of one buffer at one time.

    ``writer`` is the operation that wrote last, ``NONE`` at the start, and
    ``step`` the step in which it did. ``unread`` are terms that nothing has
    read. ``lost`` are terms of a sum that were overwritten before anything
    read them, each with the operation that did so.
    """

    state: State = State.UNSET
    terms: Terms = field(default_factory=lambda: MappingProxyType({}))
    writer: int = NONE
    step: int = 0
    unread: frozenset[Term] = frozenset()
    lost: Mapping[Term, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def is_value(self) -> bool:
        """True for a number that forwards add up (tokens, a loss)."""
        return len(self.terms) > 1 and all(t.role is Role.ACTIVATION and not t.received for t in self.terms)

    @property
    def is_gradient(self) -> bool:
        """True if it can be a gradient of weights: addends, and nothing else."""
        return bool(self.terms) and all(t.role in ADDENDS and not t.received for t in self.terms)


UNSET = Content()

ADDENDS = frozenset({Role.ADDEND, Role.EITHER})
_ACTIVATIONS = frozenset({Role.ACTIVATION})
_INPUT_GRADIENTS = frozenset({Role.INPUT_GRADIENT, Role.EITHER})

RESULT: Mapping[OpKind, tuple[Role, int, bool]] = MappingProxyType(
    {
        # kind: (role, stage of the result relative to the operation's, received)
        OpKind.FORWARD: (Role.ACTIVATION, 0, False),
        OpKind.BACKWARD: (Role.EITHER, 0, False),
        OpKind.BACKWARD_INPUT: (Role.INPUT_GRADIENT, 0, False),
        OpKind.BACKWARD_WEIGHT: (Role.ADDEND, 0, False),
        # A transfer is named after the stage of its own end: 1RECV_F0 brings the result of stage 0.
        OpKind.SEND_FORWARD: (Role.ACTIVATION, 0, False),
        OpKind.SLICE_FORWARD: (Role.ACTIVATION, 0, False),
        OpKind.RECV_FORWARD: (Role.ACTIVATION, -1, True),
        OpKind.GATHER_FORWARD: (Role.ACTIVATION, -1, True),
        OpKind.SEND_BACKWARD: (Role.INPUT_GRADIENT, 0, False),
        OpKind.SLICE_BACKWARD: (Role.INPUT_GRADIENT, 0, False),
        OpKind.RECV_BACKWARD: (Role.INPUT_GRADIENT, 1, True),
        OpKind.GATHER_BACKWARD: (Role.INPUT_GRADIENT, 1, True),
        # The activations that the forward saved, in host memory and back.
        OpKind.OFFLOAD: (Role.ACTIVATION, 0, False),
        OpKind.RELOAD: (Role.ACTIVATION, 0, False),
    }
)
"""The result that an operation writes to its named buffers. Other kinds pass on their input."""

ADDERS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})
UPDATES = frozenset({OpKind.REDUCE_GRAD, OpKind.SCALE_GRAD, OpKind.STEP})
"""Kinds that read the gradient of a stage as a whole."""
_OUTGOING = frozenset({OpKind.SEND_FORWARD, OpKind.SLICE_FORWARD, OpKind.SEND_BACKWARD, OpKind.SLICE_BACKWARD})
TENSOR_READERS = _OUTGOING | {OpKind.GATHER_FORWARD, OpKind.GATHER_BACKWARD, OpKind.OFFLOAD, OpKind.RELOAD}
"""Kinds that read one tensor and nothing else."""


def result_of(graph: OpGraph, op: int) -> Term | None:
    """The term that an operation writes; None for kinds that compute no tensor of a work item."""
    entry = RESULT.get(KINDS[graph.kind[op]])
    if entry is None or graph.work_item[op] == NONE:
        return None
    role, offset, received = entry
    return Term(role, int(graph.stage[op]) + offset, int(graph.work_item[op]), received)


def input_of(graph: OpGraph, op: int) -> tuple[frozenset[Role], int, int] | None:
    """(roles, stage, work item) of the term that an operation must read; None if it needs none of another operation."""
    wanted = _INPUT.get(KINDS[graph.kind[op]])
    if wanted is None or graph.work_item[op] == NONE:
        return None
    roles, offset = wanted
    return roles, int(graph.stage[op]) + offset, int(graph.work_item[op])


_INPUT: Mapping[OpKind, tuple[frozenset[Role], int]] = MappingProxyType(
    {
        # kind: (roles, stage of the input relative to the operation's)
        OpKind.FORWARD: (_ACTIVATIONS, -1),
        OpKind.GATHER_FORWARD: (_ACTIVATIONS, -1),
        OpKind.SEND_FORWARD: (_ACTIVATIONS, 0),
        OpKind.SLICE_FORWARD: (_ACTIVATIONS, 0),
        OpKind.OFFLOAD: (_ACTIVATIONS, 0),
        OpKind.RELOAD: (_ACTIVATIONS, 0),
        OpKind.BACKWARD: (_INPUT_GRADIENTS, 1),
        OpKind.BACKWARD_INPUT: (_INPUT_GRADIENTS, 1),
        OpKind.GATHER_BACKWARD: (_INPUT_GRADIENTS, 1),
        OpKind.SEND_BACKWARD: (_INPUT_GRADIENTS, 0),
        OpKind.SLICE_BACKWARD: (_INPUT_GRADIENTS, 0),
    }
)


def holds(content: Content, wanted: tuple[frozenset[Role], int, int]) -> bool:
    """Return True if a content has a term of these roles, stage and work item."""
    roles, stage, work_item = wanted
    return any(t.role in roles and (t.stage, t.work_item) == (stage, work_item) for t in content.terms)


def suits(graph: OpGraph, op: int, content: Content, step: int, *, adds: bool) -> bool:
    """Return True if ``op`` may read ``content`` in ``step``; it ``adds`` if it also writes the buffer.

    Contents from before the start are unknown, and suit every reader.
    """
    kind = KINDS[graph.kind[op]]
    if content.terms and content.step != step and kind in RESULT:
        return content.is_value  # a number may continue over steps; a tensor or a gradient may not
    if not content.terms:
        if content.state is State.OTHER:
            return not (adds and kind in ADDERS)
        return content.state is State.UNSET or kind not in _OUTGOING
    if kind in UPDATES or (kind in CHILD_KINDS and content.is_gradient):
        return not content.is_gradient or any(term.stage == graph.stage[op] for term in content.terms)
    if graph.work_item[op] == NONE or (adds and kind in ADDERS and content.is_gradient):
        return True
    if kind in TENSOR_READERS:
        return _is_tensor(graph, op, content)
    feeds = _feeds_forward if kind is OpKind.FORWARD else _feeds_backward
    return all(feeds(term, int(graph.stage[op]), int(graph.work_item[op])) for term in content.terms)


def is_number(graph: OpGraph, op: int, content: Content) -> bool:
    """Return True for a value that an operation may read next to its input, or add to.

    That is a number that forwards add up, or, for a forward, the result of its
    stage for another work item: a running count, a shared table.
    """
    if content.is_value:
        return True
    return (
        bool(content.terms)
        and KINDS[graph.kind[op]] is OpKind.FORWARD
        and all(
            term.role is Role.ACTIVATION and not term.received and term.stage == graph.stage[op]
            for term in content.terms
        )
    )


def _is_tensor(graph: OpGraph, op: int, content: Content) -> bool:
    """Return True for the tensor of a send, slice or gather; if several cross, one may be passed on unchanged."""
    wanted = input_of(graph, op)
    assert wanted is not None
    if len(content.terms) > 1:
        return False
    if holds(content, wanted):
        return True
    roles, stage, work_item = wanted
    before = stage - 1 if Role.ACTIVATION in roles else stage + 1
    has_members = graph.tensor[op] != NONE and bool(graph.tensors[int(graph.tensor[op])].member)
    return has_members and holds(content, (roles, before, work_item))


def _feeds_forward(term: Term, stage: int, work_item: int) -> bool:
    if term.work_item != work_item or term.role is not Role.ACTIVATION:
        return False
    return term.stage == stage - 1 if term.received else term.stage <= stage


def _feeds_backward(term: Term, stage: int, work_item: int) -> bool:
    if term.work_item != work_item or term.role is Role.ADDEND:
        return False
    forward = term.role is Role.ACTIVATION
    if term.received:
        return term.stage == stage + (-1 if forward else 1)
    return term.stage <= stage if forward else term.stage >= stage
