"""Paddle, and the rows that it has alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import paddle

from pipeproof.stages.common.weights import mark, source_of
from pipeproof.stages.paddle import experts, functional
from pipeproof.stages.paddle.backend_ops import OPS, PaddleGatheredInput, PartOfGathered
from pipeproof.stages.paddle.stage import PaddleVocabulary, summed_cross_entropies, token_losses
from pipeproof.stages.paddle.weights import SplitWeights, layer_norm
from tests.stages.adjoints.rows import plain
from tests.stages.adjoints.table import shared_cases
from tests.stages.adjoints.weights import used
from tests.stages.adjoints.world import Backend, Case, Rank

_leaf = partial(paddle.to_tensor, stop_gradient=False)
PADDLE = Backend(
    paddle, OPS, functional, paddle.to_tensor, _leaf, _leaf,
    lambda leaf: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy(),
    lambda tensor: tensor.numpy(), SplitWeights, paddle.clip, partial(functional.rotary_tables, dtype="float64"),
    PaddleVocabulary, partial(token_losses, rows_dim=1), partial(summed_cross_entropies, rows_dim=1),
    experts, experts.PaddleExperts, lambda plan, **options: experts.PaddleBalance(plan, (), **options),
)  # fmt: skip


def all_cases() -> list[Case]:
    """Every row."""
    order = np.array([3, 0, 5, 1, 7, 2, 6, 4])
    gathered = {"num_ranks": 2, "sequence_dim": 0, "regathers": True}
    return [
        *shared_cases(PADDLE),
        plain("LayerNorm", "layer_norm", layer_norm, (3, 4, 8)),
        plain("reorder", "reorder", lambda x: experts.reorder(x, order), (8, 3)),
        plain("visits", "visits", lambda x: experts.visits(x, order, 2), (4, 3)),
        used("added to each", "SplitWeights.added_each used_on_each copies",
             lambda r, x, y, w: [z.tanh() for z in r.weights.added_each([x, y], w)], [(2, 3, 4), (3, 4)], [(4,)]),
        used("grouped", "SplitWeights.grouped",  # no row is of the second group
             lambda r, x, w: r.weights.grouped(x, w, [2, 0, 3]), [(5, 4)], [(3, 4, 6)]),
        used("product of each", "SplitWeights.product_each used_on_each copies",
             lambda r, x, y, w: r.weights.product_each([x, y], w), [(2, 3, 4), (3, 4)], [(4, 5)]),
        used("scaled of each", "SplitWeights.scaled_each used_on_each copies",
             lambda r, x, y, w: r.weights.scaled_each([x, y], w), [(2, 3, 4), (3, 4)], [(4,)]),
        used("RMSNorm of each", "SplitWeights.norm_each",
             lambda r, x, y, w: r.weights.norm_each([x, y], w), [(2, 3, 4), (3, 4)], [(4,)]),
        used("LayerNorm of each", "SplitWeights.norm_each",
             lambda r, x, y, w, b: r.weights.norm_each([x, y], w, b), [(2, 3, 4), (3, 4)], [(4,), (4,)]),
        used("products of parts, gathered again", "PartOfGathered.without_keeping PaddleGatheredInput.without_keeping",
             _gathered_parts, [(2, 2, 4)], [(4, 5)], **gathered),
    ]  # fmt: skip


def _gathered_parts(rank: Rank, x: Any, weight: Any) -> list[Any]:
    """Each row of the micro-batch by itself."""
    entered = rank.region.enter(x, "in")
    source = source_of(entered)
    assert isinstance(source, PaddleGatheredInput)
    parts = paddle.split(entered, 2, axis=1)
    for number, part in enumerate(parts):
        mark(PartOfGathered(source, lambda whole, number=number: paddle.split(whole, 2, axis=1)[number]), part)
    return [rank.weights.product(part, weight) for part in parts]
