"""The two ends of the model, where the vocabulary is cut over the tensor-parallel ranks.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F

from pipeproof.stages.describe.synthetic import IGNORED
from pipeproof.stages.torch.collectives import TensorParallelRegion
from pipeproof.stages.torch.functional import wide_type
from pipeproof.stages.torch.lanes import join_lanes, split_lanes
from pipeproof.stages.torch.weights import SplitWeights, Weight

Tensor: TypeAlias = torch.Tensor


def embed_tokens(tokens: Tensor, weight: Weight, weights: SplitWeights, region: TensorParallelRegion) -> Tensor:
    """Rows of the embedding, [.., H]: this rank's addend, zero for tokens of other ranks' rows.

    ``weight`` is this rank's [V / T, H].
    """
    if region.num_ranks == 1:
        return weights.rows(tokens, weight)
    row, is_mine = _own(tokens, weight.value.shape[0], region)
    return weights.rows(row, weight) * is_mine.unsqueeze(-1)


def summed_cross_entropies(
    logits: Tensor, labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
) -> list[Tensor]:
    """Each lane's cross-entropy summed over its counted tokens, a scalar.

    ``logits`` are this rank's [.., V / T] of all lanes, joined along ``rows_dim``, and ``labels`` are by lane. Logits
    of 16 bits are taken to float32 before.
    """
    logits = logits.to(wide_type(logits.dtype))
    if region.num_ranks > 1:
        losses = token_losses(logits, join_lanes(labels, rows_dim), region)
        return [of_lane.sum() for of_lane in split_lanes(losses, len(labels), rows_dim)]
    return [
        F.cross_entropy(x.flatten(0, -2), words.flatten(), ignore_index=IGNORED, reduction="sum")
        for x, words in zip(split_lanes(logits, len(labels), rows_dim), labels, strict=True)
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
