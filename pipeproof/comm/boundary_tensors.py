"""The tensors at the ends of stages, which transfers carry: one for each side, direction, size and member."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeproof.schedule.op_table import BoundaryPosition, TensorSpec
from pipeproof.specs.axis_layout import INVARIANT
from pipeproof.stages.describe.boundary import Boundary, Edge
from pipeproof.stages.describe.layer import COUNTS_DTYPE, Layer


@dataclass(frozen=True)
class BoundaryTensors:
    """The tensors at the stages' ends, and the index of each by (``input_grad``, stage, variant, member)."""

    specs: tuple[TensorSpec, ...]
    index: Mapping[tuple[str, int, int, int], int]
    inside: Mapping[str, int]
    """The index of the tensor that collectives inside layers move in a dtype of their own, by dtype."""


def tensors_of(edges: Sequence[Edge], layers: Sequence[Layer], num_loads: int = 0) -> BoundaryTensors:
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
                for number, member in enumerate(members):
                    position = BoundaryPosition(edge, variant, number)
                    for gradient in (False, True) if member.has_gradient else (False,):
                        name = f"{side}_grad" if gradient else side
                        index[name, stage, variant, number] = len(specs)
                        title = f"{name.replace('_', ' ')} of stage {stage}"
                        specs.append(_tensor(title, member, side, gradient, position))
    largest = {COUNTS_DTYPE: num_loads} if num_loads else dict[str, int]()
    for layer in layers:
        for collective in (*layer.forward_collectives, *layer.backward_collectives):
            if collective.dtype is not None:
                largest[collective.dtype] = max(largest.get(collective.dtype, 0), collective.numel)
    inside = {dtype: len(specs) + place for place, dtype in enumerate(largest)}
    specs += [TensorSpec(f"{dtype} inside layers", (n,), dtype, str(INVARIANT), "x") for dtype, n in largest.items()]
    return BoundaryTensors(tuple(specs), index, inside)


def _tensor(name: str, boundary: Boundary, side: str, gradient: bool, position: BoundaryPosition) -> TensorSpec:
    at_sender = side == "output"
    placement = boundary.placement(at_sender=at_sender, gradient=gradient)
    shape = boundary.local_shape_at(at_sender=at_sender)
    return TensorSpec(name, shape, boundary.dtype, str(placement), boundary.dims, boundary.member, position=position)
