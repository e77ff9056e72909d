"""The tensors at the ends of stages, which transfers carry: one for each side, direction, size and member.

A plan may pack the members of an edge into one message: then they are one tensor, a vector of their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.schedule.op_parts import TensorPart, part_starts
from pipeproof.schedule.op_table import BoundaryPosition, TensorSpec
from pipeproof.specs.axis_layout import INVARIANT, VARYING, parse_placement
from pipeproof.specs.transport import TransportSpec
from pipeproof.stages.describe.boundary import Boundary, Edge
from pipeproof.stages.describe.layer import COUNTS_DTYPE, Layer

PACKED = -1
"""In place of a member: the packed message of all that cross in its direction."""


def is_packed(members: Sequence[Boundary], transport: TransportSpec, *, gradient: bool) -> bool:
    """Return True if the members of an edge, or their gradients, are one packed message: where they are several."""
    num_crossing = sum(member.has_gradient for member in members) if gradient else len(members)
    return transport.messages == "packed" and num_crossing > 1


def message_name(members: Sequence[Boundary], transport: TransportSpec) -> str:
    """Return the name of the message that carries the first member of an edge forward."""
    if is_packed(members, transport, gradient=False):
        return _packed_name([member.member for member in members])
    return members[0].member


def _packed_name(members: Iterable[str]) -> str:
    return " + ".join(members)


@dataclass(frozen=True)
class BoundaryTensors:
    """The tensors at the stages' ends, and the index of each by (``input_grad``, stage, variant, member)."""

    specs: tuple[TensorSpec, ...]
    index: Mapping[tuple[str, int, int, int], int]
    inside: Mapping[str, int]
    """The index of the tensor that collectives inside layers move in a dtype of their own, by dtype."""


def tensors_of(
    edges: Sequence[Edge], layers: Sequence[Layer], transport: TransportSpec, num_loads: int = 0
) -> BoundaryTensors:
    """Input and output of each stage that has one, with their gradients, in each variant of the micro-batches.

    After them, for each dtype that only collectives of ``layers`` have, the largest tensor that they move.
    ``num_loads`` numbers are summed at the end of the step for each router.
    """
    specs: list[TensorSpec] = []
    index: dict[tuple[str, int, int, int], int] = {}
    for stage in range(len(edges) + 1):
        for side in ("input", "output"):
            edge = stage - 1 if side == "input" else stage
            if not 0 <= edge < len(edges):
                continue
            for variant, members in enumerate(edges[edge].variants):
                for number, gradient in _messages(members, transport):
                    name = f"{side}_grad" if gradient else side
                    title = f"{name.replace('_', ' ')} of stage {stage}"
                    position = BoundaryPosition(edge, variant, number)
                    index[name, stage, variant, number] = len(specs)
                    if number == PACKED:
                        specs.append(_packed(title, members, side, gradient, position))
                    else:
                        specs.append(_tensor(title, members[number], side, gradient, position))
    largest = {COUNTS_DTYPE: num_loads} if num_loads else dict[str, int]()
    for layer in layers:
        for collective in (*layer.forward_collectives, *layer.backward_collectives):
            if collective.dtype is not None:
                largest[collective.dtype] = max(largest.get(collective.dtype, 0), collective.numel)
    inside = {dtype: len(specs) + place for place, dtype in enumerate(largest)}
    specs += [TensorSpec(f"{dtype} inside layers", (n,), dtype, str(INVARIANT), "x") for dtype, n in largest.items()]
    return BoundaryTensors(tuple(specs), index, inside)


def _messages(members: Sequence[Boundary], transport: TransportSpec) -> list[tuple[int, bool]]:
    """The members of an edge that cross one by one, and ``PACKED``; each with whether it is the gradient."""
    packed = [gradient for gradient in (False, True) if is_packed(members, transport, gradient=gradient)]
    alone = [
        (number, gradient)
        for number, member in enumerate(members)
        for gradient in ((False, True) if member.has_gradient else (False,))
        if gradient not in packed
    ]
    return alone + [(PACKED, gradient) for gradient in packed]


def _packed(
    name: str, members: Sequence[Boundary], side: str, gradient: bool, position: BoundaryPosition
) -> TensorSpec:
    """The message with the bytes of all members that cross. Equal parts on all TP ranks are equal messages."""
    tensors = [
        (index, _tensor(name, member, side, gradient, position))
        for index, member in enumerate(members)
        if member.has_gradient or not gradient
    ]
    parts = tuple(TensorPart(t.member, t.shape, t.dtype, t.placement, t.dims, index) for index, t in tensors)
    is_equal = all(parse_placement(part.placement).holds_equal_values for part in parts)
    num_bytes = part_starts(part.num_bytes for part in parts)[-1]
    return TensorSpec(
        name, (num_bytes,), "uint8", str(INVARIANT if is_equal else VARYING), "x",
        _packed_name(part.member for part in parts), position=position, parts=parts,
    )  # fmt: skip


def _tensor(name: str, boundary: Boundary, side: str, gradient: bool, position: BoundaryPosition) -> TensorSpec:
    at_sender = side == "output"
    placement = boundary.placement(at_sender=at_sender, gradient=gradient)
    shape = boundary.local_shape_at(at_sender=at_sender)
    return TensorSpec(name, shape, boundary.dtype, str(placement), boundary.dims, boundary.member, position=position)
