"""Multi-token prediction for the references: what weights several predictions share, and what is trained on.

Lane 0 is the main model's prediction, lane j + 1 that of module j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.ahead import module_weight
from pipeproof.stages.reference.pieces import Copies

Tensor: TypeAlias = paddle.Tensor


def for_lanes(weight: Tensor, num_lanes: int) -> list[Tensor]:
    """One weight for each lane; its gradient adds those of the lanes in their order."""
    return [weight] if num_lanes == 1 else list(Copies.apply(weight, num_lanes))


def together(losses: Sequence[Tensor]) -> Tensor:
    """The losses of all lanes as they are reported: a scalar, or of several lanes a vector."""
    return losses[0] if len(losses) == 1 else paddle.stack(list(losses))


def trained_on(plan: PlanSpec, losses: Tensor) -> Tensor:
    """The one number whose gradients are taken: the main loss, and those of modules with their weight."""
    mtp = plan.model.mtp
    if mtp is None:
        return losses
    weights = np.array([1.0] + [module_weight(mtp)] * mtp.num_modules, dtype=plan.run.dtype)
    return (losses * paddle.to_tensor(weights)).sum()
