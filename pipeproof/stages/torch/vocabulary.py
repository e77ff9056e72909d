"""The two ends of the model, where the vocabulary is cut over the tensor-parallel ranks.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F

from pipeproof.stages.common.collectives import TensorParallelRegion
from pipeproof.stages.common.lanes import join_lanes, split_lanes
from pipeproof.stages.describe.synthetic import IGNORED
from pipeproof.stages.torch.functional import wide_type
from pipeproof.stages.torch.ops import OPS
from pipeproof.stages.torch.weights import SplitWeights, Weight

Tensor: TypeAlias = torch.Tensor


class TorchVocabulary:
    """A ``Vocabulary`` whose weights are ``Weight``; ``tied`` where the head's is the embedding's.

    Lanes are more rows of one lookup, and of one product.
    """

    def __init__(self, weights: SplitWeights, *, tied: bool) -> None:
        self._weights, self._tied = weights, tied

    def rows(self, tokens: Sequence[Tensor], weight: Weight, region: TensorParallelRegion, rows_dim: int) -> Tensor:
        """As ``Vocabulary.rows``: zero for tokens of other ranks' rows."""
        words = join_lanes(OPS, tokens, rows_dim)
        if region.num_ranks == 1:
            return self._weights.rows(words, weight)
        row, is_mine = _own(words, weight.value.shape[0], region)
        return self._weights.rows(row, weight) * is_mine.unsqueeze(-1)

    def losses(
        self, entered: Tensor, weight: Weight, labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
    ) -> list[Tensor]:
        """As ``Vocabulary.losses``."""
        logits = self._weights.product(entered, weight, transposed=self._tied)
        return summed_cross_entropies(logits, labels, region, rows_dim)


def summed_cross_entropies(
    logits: Tensor, labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
) -> list[Tensor]:
    """Each lane's cross-entropy summed over its counted tokens, a scalar.

    ``logits`` are this rank's [.., V / T] of all lanes, joined along ``rows_dim``, and ``labels`` are by lane. Logits
    of 16 bits are taken to float32 before.
    """
    logits = logits.to(wide_type(logits.dtype))
    if region.num_ranks > 1:
        losses = token_losses(logits, join_lanes(OPS, labels, rows_dim), region)
        return [of_lane.sum() for of_lane in split_lanes(OPS, losses, len(labels), rows_dim)]
    return [
        F.cross_entropy(x.flatten(0, -2), words.flatten(), ignore_index=IGNORED, reduction="sum")
        for x, words in zip(split_lanes(OPS, logits, len(labels), rows_dim), labels, strict=True)
    ]


def token_losses(logits: Tensor, labels: Tensor, region: TensorParallelRegion) -> Tensor:
    """Per token ``log(sum_v exp(x_v - max)) - (x_label - max)``; three collectives of one number a token.

    The maximum is a constant to autograd: it cancels.
    """
    highest = region.max(logits.amax(-1), "head.loss.max")
    shifted = logits - highest.unsqueeze(-1)
    sum_exp = region.sum(shifted.exp().sum(-1), "head.loss.sum_exp")
    column, is_mine = _own(labels, logits.shape[-1], region)
    target = region.sum(shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1) * is_mine, "head.loss.target")
    return (sum_exp.log() - target) * (labels != IGNORED)


def _own(words: Tensor, num_own: int, region: TensorParallelRegion) -> tuple[Tensor, Tensor]:
    """Each word's place among this rank's ``num_own`` words, 0 where it is another rank's; and whether it is here."""
    place = words - region.rank * num_own
    is_mine = (place >= 0) & (place < num_own)
    return torch.where(is_mine, place, 0), is_mine
