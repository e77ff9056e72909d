"""The two ends of the model, where the vocabulary is cut over the tensor-parallel ranks.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from typing import TypeAlias

import paddle
import paddle.nn.functional as F

from pipeproof.stages.describe.synthetic import IGNORED
from pipeproof.stages.paddle.collectives import TensorParallelRegion
from pipeproof.stages.paddle.weights import SplitWeights

Tensor: TypeAlias = paddle.Tensor


def embed_tokens(tokens: Tensor, weight: Tensor, weights: SplitWeights, region: TensorParallelRegion) -> Tensor:
    """Rows of the embedding, [.., H]: this rank's addend, zero for tokens of other ranks' rows.

    ``weight`` is this rank's [V / T, H].
    """
    if region.num_ranks == 1:
        return weights.rows(tokens, weight)
    row, is_mine = _own(tokens, weight.shape[0], region)
    return weights.rows(row, weight) * is_mine.astype(weight.dtype).unsqueeze(-1)


def summed_cross_entropy(logits: Tensor, labels: Tensor, region: TensorParallelRegion) -> Tensor:
    """The cross-entropy summed over the counted tokens, a scalar; ``logits`` are this rank's [.., V / T]."""
    if region.num_ranks == 1:
        num_words = logits.shape[-1]
        losses = F.cross_entropy(
            logits.reshape([-1, num_words]), labels.reshape([-1]), ignore_index=IGNORED, reduction="none"
        )
        return paddle.sum(losses)
    return paddle.sum(token_losses(logits, labels, region))


def token_losses(logits: Tensor, labels: Tensor, region: TensorParallelRegion) -> Tensor:
    """Per token ``log(sum_v exp(x_v - max)) - (x_label - max)``; three collectives of one number a token.

    The maximum is a constant to autograd: it cancels.
    """
    highest = region.max(paddle.max(logits, axis=-1), "head.loss.max")
    shifted = logits - highest.unsqueeze(-1)
    sum_exp = region.sum(paddle.sum(paddle.exp(shifted), axis=-1), "head.loss.sum_exp")
    column, is_mine = _own(labels, logits.shape[-1], region)
    target = paddle.take_along_axis(shifted, column.unsqueeze(-1), axis=-1).squeeze(-1)
    target = region.sum(target * is_mine.astype(logits.dtype), "head.loss.target")
    is_counted = (labels != IGNORED).astype(logits.dtype)
    return (paddle.log(sum_exp) - target) * is_counted


def _own(words: Tensor, num_own: int, region: TensorParallelRegion) -> tuple[Tensor, Tensor]:
    """Each word's place among this rank's ``num_own`` words, 0 where it is another rank's; and whether it is here."""
    place = words - region.rank * num_own
    is_mine = paddle.logical_and(place >= 0, place < num_own)
    return paddle.where(is_mine, place, paddle.zeros_like(place)), is_mine
