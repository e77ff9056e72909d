"""Optimizer and gradient clip of the Paddle references.

The clip multiplies gradients by limit / max(norm, limit), with the norm of all gradients together. Squares are added
part by part within a weight, then weight by weight in the order of the model. If the optimizer is sharded over dp
ranks, each shard of a part is added separately first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan_sections import RunSpec
from pipeproof.stages.describe.stage_memory import shard_range
from pipeproof.stages.reference.sharded_tensors import Shards, add

_PADDLE_NAMES = MappingProxyType(
    {"moment1": "moment1", "moment2": "moment2", "beta1_power": "beta1_pow_acc", "beta2_power": "beta2_pow_acc"}
)
"""Paddle's name of each slot."""


def optimizer_of(run: RunSpec, weights: Sequence[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    """Paddle's SGD, or its AdamW with betas 0.9 and 0.999, epsilon 1e-8 and weight decay 0.01."""
    if run.optimizer == "sgd":
        return paddle.optimizer.SGD(run.learning_rate, parameters=list(weights))
    return paddle.optimizer.AdamW(
        run.learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, parameters=list(weights)
    )


def restore_optimizer(
    optimizer: paddle.optimizer.Optimizer,
    weights: Mapping[str, Shards],
    saved: Mapping[tuple[str, str], Sequence[npt.NDArray[Any]]],
) -> None:
    """Load saved state into a new optimizer, by weight and slot: one array for each shard of the weight."""
    state = {
        f"{shard.name}_{_PADDLE_NAMES[slot]}_0": np.atleast_1d(array)
        for (name, slot), arrays in saved.items()
        for shard, array in zip(weights[name], arrays, strict=True)
    }
    if state:
        optimizer.set_state_dict(state)


Parts = Sequence[Sequence[paddle.Tensor]]
"""The parts of a gradient, without copies: parts of parts, the inner ones added first."""


def clip_factor(limit: float, dtype: str, gradients: Mapping[str, Parts], num_shards: int = 1) -> npt.NDArray[Any]:
    """The factor of every gradient, a scalar of ``dtype``. ``gradients`` are in the order of the model.

    Each part is flattened and split into ``num_shards``.
    """
    limit_value = np.dtype(dtype).type(limit)
    whole = [[[_squared(part, num_shards) for part in inner] for inner in parts] for parts in gradients.values()]
    total = add([add([add(inner) for inner in parts]) for parts in whole])
    return np.asarray(limit_value / np.maximum(np.sqrt(total), limit_value))


def _squared(part: paddle.Tensor, num_shards: int) -> np.floating[Any]:
    if num_shards == 1:
        number: np.floating[Any] = (part * part).sum().numpy()[()]
        return number
    flat = part.flatten()
    ranges = [shard_range(part.size, num_shards, shard) for shard in range(num_shards)]
    return add([_squared(flat[start:stop], 1) for start, stop in ranges if stop > start])
