"""Deterministic weights and tokens: all initial data of a run, computed with numpy alone.

The key of every draw is its purpose (seed, parameter name; seed, step, micro-batch), not the rank or the order of
draws. So all ranks and the reference get the same values for any topology.

Shape letters: S sequence, B micro-batch rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize, micro_batch_size
from pipeproof.stages.describe.layer import Parameter

IGNORED = -100
"""The label of a position whose token is not counted in the loss."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: ``tokens`` and ``labels`` are int64 [B, S]; label ``IGNORED`` is not counted."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    @property
    def num_counted(self) -> int:
        """The number of positions that count in the loss, at least one."""
        return int(np.count_nonzero(self.labels != IGNORED))


def initial_weight(parameter: Parameter, seed: int, dtype: str) -> npt.NDArray[Any]:
    """The whole initial weight of a parameter.

    It is normal with ``init_std``, or ``init_value`` everywhere if that is None. It is drawn in float64, then rounded,
    so float32 and float64 runs start from the same numbers.
    """
    if parameter.init_std is None:
        return np.full(parameter.shape, parameter.init_value, dtype=dtype)
    draws = _generator("weight", seed, parameter.name).standard_normal(parameter.shape)
    return (draws * parameter.init_std).astype(dtype)


def micro_batch(plan: PlanSpec, step: int, index: int) -> Batch:
    """The ``index``-th micro-batch of a step, counted over all data ranks: rank d's k-th is d * m + k.

    Data ranks have different micro-batches, over ``dp`` and ``ep``; the data rank at (dp, ep) is dp * (number of ep
    ranks) + ep.

    Low token ids are more frequent, so that there is something to learn; none is in the vocabulary's padding. Each row
    counts a random number of leading positions: micro-batches differ in their number of counted tokens, as in practice.
    """
    size = _size(plan, index)
    length = size.seq_length
    draws = _generator("tokens", plan.run.seed, step, index).random((size.num_rows, length + 1))
    text = np.floor(plan.gpt.num_token_ids * draws**2).astype(np.int64)
    is_counted = np.arange(length) < _counted_lengths(plan, step, index)[:, None]
    return Batch(text[:, :-1].copy(), np.where(is_counted, text[:, 1:], IGNORED))


def loss_scale(plan: PlanSpec, step: int, index: int) -> float:
    """The factor of the summed token losses of one micro-batch, so that the losses of a step can be added.

    ``global_tokens``: one over the counted tokens of the whole step. ``mean_of_micro_batches``: one over (this
    micro-batch's counted tokens times the number of micro-batches of all data ranks).
    """
    num_global = plan.topology.dp * plan.topology.ep * plan.schedule.num_micro_batches
    if plan.loss.normalization == "global_tokens":
        return 1.0 / sum(int(_counted_lengths(plan, step, i).sum()) for i in range(num_global))
    return 1.0 / (int(_counted_lengths(plan, step, index).sum()) * num_global)


def _counted_lengths(plan: PlanSpec, step: int, index: int) -> npt.NDArray[np.int64]:
    """Counted leading positions per row, [B], 0 to S each; one row has at least one."""
    generator = _generator("lengths", plan.run.seed, step, index)
    size = _size(plan, index)
    lengths = generator.integers(0, size.seq_length + 1, size=size.num_rows)
    if not lengths.any():
        lengths[0] = 1
    return lengths


def _size(plan: PlanSpec, index: int) -> MicroBatchSize:
    """The size of a micro-batch; all data-parallel ranks have the same sizes."""
    return micro_batch_size(plan, index % plan.schedule.num_micro_batches)


def key_of(purpose: str, *key: int | str) -> int:
    """A 128-bit number that differs for every purpose and key."""
    return _digest(purpose, *key) >> 128


def _generator(purpose: str, *key: int | str) -> np.random.Generator:
    return np.random.default_rng(_digest(purpose, *key))


def _digest(purpose: str, *key: int | str) -> int:
    text = "/".join(["pipeproof", purpose, *map(str, key)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest())
