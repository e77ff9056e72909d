"""The references' optimizer on Paddle: Paddle's own, from its beginning or from what another one kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import RunSpec
from pipeproof.stages.reference.pieces import Pieces

_THEIRS = MappingProxyType(
    {"moment1": "moment1", "moment2": "moment2", "beta1_power": "beta1_pow_acc", "beta2_power": "beta2_pow_acc"}
)
"""By slot, what Paddle calls it."""


def optimizer_of(run: RunSpec, weights: Sequence[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    """Paddle's SGD, or its AdamW with betas 0.9 and 0.999, epsilon 1e-8 and decay 0.01 of every weight."""
    if run.optimizer == "sgd":
        return paddle.optimizer.SGD(run.learning_rate, parameters=list(weights))
    return paddle.optimizer.AdamW(
        run.learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, parameters=list(weights)
    )


def go_on(
    optimizer: paddle.optimizer.Optimizer,
    weights: Mapping[str, Pieces],
    kept: Mapping[tuple[str, str], Sequence[npt.NDArray[Any]]],
) -> None:
    """Let an optimizer that has made no step go on with what is ``kept``, by weight and slot: one for each piece."""
    state = {
        f"{piece.name}_{_THEIRS[slot]}_0": np.atleast_1d(array)
        for (name, slot), arrays in kept.items()
        for piece, array in zip(weights[name], arrays, strict=True)
    }
    if state:
        optimizer.set_state_dict(state)
