"""Lanes of multi-token prediction on one rank: one tensor between stages, a list of tensors inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.ahead import module_weight

Tensor: TypeAlias = torch.Tensor


def split_lanes(joined: Tensor, num_lanes: int, rows_dim: int) -> list[Tensor]:
    """The lanes of what crosses between stages, along the rows of the micro-batch."""
    return [joined] if num_lanes == 1 else list(joined.chunk(num_lanes, dim=rows_dim))


def join_lanes(lanes: Sequence[Tensor], rows_dim: int) -> Tensor:
    """What crosses between stages, from its lanes."""
    return lanes[0] if len(lanes) == 1 else torch.cat(list(lanes), dim=rows_dim)


def whole_loss(plan: PlanSpec, losses: Sequence[Tensor]) -> Tensor:
    """What is trained on: the main loss, and those of modules with their weight, ``losses`` being scaled already."""
    total = losses[0]
    if plan.model.mtp is not None:
        for loss in losses[1:]:
            total = total + loss * module_weight(plan.model.mtp)
    return total
