"""Lanes of multi-token prediction on one rank: one tensor between stages, a list of tensors inside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.ahead import ahead, module_weight
from pipeproof.stages.describe.lanes import num_modules
from pipeproof.stages.describe.synthetic import Batch
from pipeproof.stages.paddle.gathered import GatheredInput, source_of

Tensor: TypeAlias = paddle.Tensor


def split_lanes(joined: Tensor, num_lanes: int, rows_dim: int) -> list[Tensor]:
    """The lanes of what crosses between stages, along the rows of the micro-batch; parts of what is gathered are so."""
    if num_lanes == 1:
        return [joined]
    lanes = list(paddle.split(joined, num_lanes, axis=rows_dim))
    source = source_of(joined)
    if isinstance(source, GatheredInput):
        for number, lane in enumerate(lanes):
            source.mark_part(lane, partial(_lane, number=number, num_lanes=num_lanes, rows_dim=rows_dim))
    return lanes


def _lane(joined: Tensor, number: int, num_lanes: int, rows_dim: int) -> Tensor:
    return paddle.split(joined, num_lanes, axis=rows_dim)[number]


def join_lanes(lanes: Sequence[Tensor], rows_dim: int) -> Tensor:
    """What crosses between stages, from its lanes."""
    return lanes[0] if len(lanes) == 1 else paddle.concat(list(lanes), axis=rows_dim)


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
