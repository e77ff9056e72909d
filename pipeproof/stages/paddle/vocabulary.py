"""The two ends of the model, where the vocabulary is cut over the tensor-parallel ranks.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import paddle
import paddle.nn.functional as F

from pipeproof.stages.describe.synthetic import IGNORED
from pipeproof.stages.paddle.collectives import TensorParallelRegion
from pipeproof.stages.paddle.lanes import join_lanes, split_lanes
from pipeproof.stages.paddle.weights import SplitWeights

Tensor: TypeAlias = paddle.Tensor


def embed_tokens(
    tokens: Sequence[Tensor], weight: Tensor, weights: SplitWeights, region: TensorParallelRegion, rows_dim: int
) -> Tensor:
    """Rows of the embedding, [.., H]: this rank's addend, zero for tokens of other ranks' rows.

    ``weight`` is this rank's [V / T, H]; ``tokens`` are those of each lane, [..], joined along ``rows_dim``.
    """
    if region.num_ranks == 1:
        return weights.rows(tokens, weight, rows_dim)
    own = [_own(words, weight.shape[0], region) for words in tokens]
    rows = weights.rows([row for row, _ in own], weight, rows_dim)
    is_mine = join_lanes([is_mine for _, is_mine in own], rows_dim)
    return rows * is_mine.astype(rows.dtype).unsqueeze(-1)


def summed_cross_entropies(
    logits: Sequence[Tensor], labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
) -> list[Tensor]:
    """Each lane's cross-entropy summed over its counted tokens, a scalar; ``logits`` are this rank's [.., V / T]."""
    if region.num_ranks > 1:
        return [paddle.sum(losses) for losses in token_losses(logits, labels, region, rows_dim)]
    num_words = logits[0].shape[-1]
    return [
        paddle.sum(
            F.cross_entropy(x.reshape([-1, num_words]), words.reshape([-1]), ignore_index=IGNORED, reduction="none")
        )
        for x, words in zip(logits, labels, strict=True)
    ]


def token_losses(
    logits: Sequence[Tensor], labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
) -> list[Tensor]:
    """Per token ``log(sum_v exp(x_v - max)) - (x_label - max)``; three collectives of one number a token of all lanes.

    The maximum is a constant to autograd: it cancels.
    """
    num_lanes = len(logits)
    highest = region.max(join_lanes([paddle.max(x, axis=-1) for x in logits], rows_dim), "head.loss.max")
    each = zip(logits, split_lanes(highest, num_lanes, rows_dim), strict=True)
    shifted = [x - most.unsqueeze(-1) for x, most in each]
    sum_exp = join_lanes([paddle.sum(paddle.exp(x), axis=-1) for x in shifted], rows_dim)
    sum_exp = region.sum(sum_exp, "head.loss.sum_exp")
    targets = []
    for x, words in zip(shifted, labels, strict=True):
        column, is_mine = _own(words, x.shape[-1], region)
        target = paddle.take_along_axis(x, column.unsqueeze(-1), axis=-1).squeeze(-1)
        targets.append(target * is_mine.astype(x.dtype))
    target = region.sum(join_lanes(targets, rows_dim), "head.loss.target")
    of_lanes = zip(*(split_lanes(x, num_lanes, rows_dim) for x in (sum_exp, target)), labels, strict=True)
    return [(paddle.log(whole) - own) * (words != IGNORED).astype(own.dtype) for whole, own, words in of_lanes]


def _own(words: Tensor, num_own: int, region: TensorParallelRegion) -> tuple[Tensor, Tensor]:
    """Each word's place among this rank's ``num_own`` words, 0 where it is another rank's; and whether it is here."""
    place = words - region.rank * num_own
    is_mine = paddle.logical_and(place >= 0, place < num_own)
    return paddle.where(is_mine, place, paddle.zeros_like(place)), is_mine
