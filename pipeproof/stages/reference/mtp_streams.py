"""Multi-token prediction for the references: shared weights and the training loss.

MTP stream 0 is the prediction of the main model, stream j + 1 that of module j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.mtp_streams import module_weight
from pipeproof.stages.reference.sharded_tensors import Copies

Tensor: TypeAlias = paddle.Tensor


def copies_for_mtp_streams(weight: Tensor, num_streams: int) -> list[Tensor]:
    """Return one copy of a weight for each MTP stream. Their gradients are added in the order of the streams."""
    return [weight] if num_streams == 1 else list(Copies.apply(weight, num_streams))


def stacked_losses(losses: Sequence[Tensor]) -> Tensor:
    """The losses of all MTP streams as reported: a scalar, or a vector for several streams."""
    return losses[0] if len(losses) == 1 else paddle.stack(list(losses))


def training_loss(plan: PlanSpec, losses: Tensor) -> Tensor:
    """The loss that is trained on, a scalar: the main loss plus the weighted losses of modules."""
    mtp = plan.gpt.mtp
    if mtp is None:
        return losses
    weights = np.array([1.0] + [module_weight(mtp)] * mtp.num_modules, dtype=plan.run.dtype)
    return (losses * paddle.to_tensor(weights)).sum()
