"""Lanes of multi-token prediction on one rank: one tensor between stages, a list of tensors inside."""

from __future__ import annotations

from collections.abc import Sequence

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.ops import Ops, Tensor
from pipeproof.stages.describe.ahead import ahead, module_weight
from pipeproof.stages.describe.lanes import num_modules
from pipeproof.stages.describe.synthetic import Batch


def split_lanes(ops: Ops, joined: Tensor, num_lanes: int, rows_dim: int) -> list[Tensor]:
    """The lanes of what crosses between stages, along the rows of the micro-batch."""
    return [joined] if num_lanes == 1 else list(ops.chunk(joined, num_lanes, rows_dim))


def join_lanes(ops: Ops, lanes: Sequence[Tensor], rows_dim: int) -> Tensor:
    """What crosses between stages, from its lanes."""
    return lanes[0] if len(lanes) == 1 else ops.concat(list(lanes), rows_dim)


def lane_batches(plan: PlanSpec, batch: Batch) -> list[Batch]:
    """The micro-batch as each lane reads and predicts it, the main lane first."""
    return [ahead(batch, distance) for distance in range(1 + num_modules(plan.model))]


def whole_loss(plan: PlanSpec, losses: Sequence[Tensor]) -> Tensor:
    """What is trained on: the main loss, and those of modules with their weight, ``losses`` being scaled already."""
    total = losses[0]
    if plan.model.mtp is not None:
        for loss in losses[1:]:
            total = total + loss * module_weight(plan.model.mtp)
    return total
