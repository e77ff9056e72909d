"""Table rows: operators into and out of the tensor-parallel region, and operations inside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle

from pipeproof.specs.model import MlaSpec
from pipeproof.stages.common.stage import latent_heads
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.functional import rms_norm
from pipeproof.stages.paddle.stage import PaddleVocabulary, summed_cross_entropies, token_losses
from tests.stages.adjoints.rows import per_layout
from tests.stages.adjoints.world import Case, Rank

MLA = MlaSpec(q_rank=6, kv_rank=4, nope_head_size=2, rope_head_size=4, value_head_size=3)
LABELS = np.array([[0, 11], [5, -100], [6, 7], [-100, 2]])
"""Words of a vocabulary of 12, on every rank, and two places that are not counted."""


def regions() -> list[Case]:
    """The ways into and out of what tensor-parallel ranks compute, and what they compute of compressed vectors."""
    cases = [
        *per_layout("enter", "TensorParallelRegion.enter", lambda r, x: r.region.enter(x, "in"),
                    ((4, 2, 3), "between"), output="own"),
        *per_layout("enter each", "TensorParallelRegion.enter_each",
                    lambda r, *x: r.region.enter_each(x, [str(i) for i in range(3)]),
                    *[((4, 2, size), "between") for size in (3, 4, 5)], output="own"),
        *per_layout("leave", "TensorParallelRegion.leave", lambda r, x: r.region.leave(x, "out"),
                    ((4, 2, 3), "own"), output="between"),
        *per_layout("sum", "TensorParallelRegion.sum", lambda r, x: r.region.sum(x, "sum"),
                    ((4, 2), "own"), output="alike")[1:],
        *per_layout("embedding", "PaddleVocabulary.rows SplitWeights.rows", _embedded, ((6, 3), "own"), output="own"),
        *per_layout("token losses", "token_losses", _losses(token_losses),
                    *[((4, 2, 6), "own")] * 2, output="alike")[1:],
        *per_layout("sums of losses", "summed_cross_entropies", _losses(summed_cross_entropies),
                    *[((4, 2, 12), "own")] * 2, output="alike"),
    ]  # fmt: skip
    for q_rank in (6, None):
        mla = MLA.model_copy(update={"q_rank": q_rank})
        query = {"q": ((7, 12), "own")} if q_rank is None else {"q_down": ((7, 6), "between"), "q_up": ((6, 12), "own")}
        used = {**query, "kv_down": ((7, 8), "between"), "kv_up": ((4, 10), "own")}
        name = f"latent heads of {'compressed' if q_rank else 'plain'} queries"
        inputs = [((4, 2, 7), "between"), *used.values()]
        cases += per_layout(name, "latent_heads", _latent(mla, list(used)), *inputs, output="own")
    return cases


def _latent(mla: MlaSpec, names: Sequence[str]) -> Callable[..., Any]:
    def function(rank: Rank, x: paddle.Tensor, *tensors: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        weights = dict(zip(names, tensors, strict=True))
        return latent_heads(
            OPS,
            x,
            mla,
            lambda y, part: rank.weights.product(y, weights[part]),
            lambda y, _: rms_norm(y),
            rank.region,
            "x",
        )

    return function


def _embedded(rank: Rank, weight: paddle.Tensor) -> paddle.Tensor:
    """Two streams of tokens."""
    words = np.random.default_rng(3).integers(0, weight.shape[0] * rank.region.num_ranks, (2, 5, 2))
    vocabulary = PaddleVocabulary(rank.weights, tied=False)
    return vocabulary.rows([paddle.to_tensor(stream) for stream in words], weight, rank.region, 1)


def _losses(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of two streams of logits, each rank with its part of the vocabulary."""

    def losses(rank: Rank, *logits: paddle.Tensor) -> list[paddle.Tensor]:
        labels = [paddle.to_tensor(LABELS), paddle.to_tensor(LABELS[::-1].copy())]
        made: list[paddle.Tensor] = function(list(logits), labels, rank.region, 1)
        return made

    return losses
