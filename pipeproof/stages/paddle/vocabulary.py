"""The two ends of the model, where the vocabulary is cut over the tensor-parallel ranks.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import paddle
import paddle.nn.functional as F

from pipeproof.stages.common.collectives import TensorParallelRegion
from pipeproof.stages.common.lanes import join_lanes, split_lanes
from pipeproof.stages.describe.synthetic import IGNORED
from pipeproof.stages.paddle.gathered import GatheredInput, source_of
from pipeproof.stages.paddle.ops import OPS
from pipeproof.stages.paddle.weights import SplitWeights

Tensor: TypeAlias = paddle.Tensor


class PaddleVocabulary:
    """A ``Vocabulary`` whose weights are tensors; ``tied`` where the head's is the embedding's.

    Each lane is looked up, and multiplied, by itself: so a lane's bits are its own.
    """

    def __init__(self, weights: SplitWeights, *, tied: bool) -> None:
        self._weights, self._tied = weights, tied

    def rows(self, tokens: Sequence[Tensor], weight: Tensor, region: TensorParallelRegion, rows_dim: int) -> Tensor:
        """As ``Vocabulary.rows``: zero for tokens of other ranks' rows."""
        if region.num_ranks == 1:
            return self._weights.rows(tokens, weight, rows_dim)
        own = [_own(words, weight.shape[0], region) for words in tokens]
        rows = self._weights.rows([row for row, _ in own], weight, rows_dim)
        is_mine = join_lanes(OPS, [is_mine for _, is_mine in own], rows_dim)
        return rows * is_mine.astype(rows.dtype).unsqueeze(-1)

    def losses(
        self, entered: Tensor, weight: Tensor, labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
    ) -> list[Tensor]:
        """As ``Vocabulary.losses``; lanes of what is gathered again in W share one gather."""
        lanes, source = split_lanes(OPS, entered, len(labels), rows_dim), source_of(entered)
        if len(lanes) > 1 and isinstance(source, GatheredInput):
            for number, lane in enumerate(lanes):
                source.mark_part(lane, partial(_lane, number=number, num_lanes=len(lanes), rows_dim=rows_dim))
        logits = self._weights.product_each(lanes, weight, transposed=self._tied)
        return summed_cross_entropies(logits, labels, region, rows_dim)


def _lane(entered: Tensor, number: int, num_lanes: int, rows_dim: int) -> Tensor:
    return split_lanes(OPS, entered, num_lanes, rows_dim)[number]


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
    highest = region.max(join_lanes(OPS, [paddle.max(x, axis=-1) for x in logits], rows_dim), "head.loss.max")
    each = zip(logits, split_lanes(OPS, highest, num_lanes, rows_dim), strict=True)
    shifted = [x - most.unsqueeze(-1) for x, most in each]
    sum_exp = join_lanes(OPS, [paddle.sum(paddle.exp(x), axis=-1) for x in shifted], rows_dim)
    sum_exp = region.sum(sum_exp, "head.loss.sum_exp")
    targets = []
    for x, words in zip(shifted, labels, strict=True):
        column, is_mine = _own(words, x.shape[-1], region)
        target = paddle.take_along_axis(x, column.unsqueeze(-1), axis=-1).squeeze(-1)
        targets.append(target * is_mine.astype(x.dtype))
    target = region.sum(join_lanes(OPS, targets, rows_dim), "head.loss.target")
    of_lanes = zip(*(split_lanes(OPS, x, num_lanes, rows_dim) for x in (sum_exp, target)), labels, strict=True)
    return [(paddle.log(whole) - own) * (words != IGNORED).astype(own.dtype) for whole, own, words in of_lanes]


def _own(words: Tensor, num_own: int, region: TensorParallelRegion) -> tuple[Tensor, Tensor]:
    """Each word's place among this rank's ``num_own`` words, 0 where it is another rank's; and whether it is here."""
    place = words - region.rank * num_own
    is_mine = paddle.logical_and(place >= 0, place < num_own)
    return paddle.where(is_mine, place, paddle.zeros_like(place)), is_mine
