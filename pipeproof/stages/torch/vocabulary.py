"""Embedding and head, with the vocabulary sharded over the tensor-parallel ranks.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F

from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.common.work_items import join_mtp_streams, split_mtp_streams
from pipeproof.stages.describe.synthetic import IGNORED
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.functional import wide_type
from pipeproof.stages.torch.weights import SplitWeights, Weight

Tensor: TypeAlias = torch.Tensor


class TorchVocabulary:
    """A ``Vocabulary`` whose weights are ``Weight``. ``tied`` is true if the head uses the embedding's weight.

    MTP streams are more rows of one lookup and one product.
    """

    def __init__(self, weights: SplitWeights, *, tied: bool) -> None:
        self._weights, self._tied = weights, tied

    def rows(self, tokens: Sequence[Tensor], weight: Weight, region: TensorParallelRegion, rows_dim: int) -> Tensor:
        """Implement ``Vocabulary.rows``: zero for tokens whose rows are on other ranks."""
        ids = join_mtp_streams(OPS, tokens, rows_dim)
        if region.num_ranks == 1:
            return self._weights.rows(ids, weight)
        row, is_local = _local_ids(ids, weight.value.shape[0], region)
        return self._weights.rows(row, weight) * is_local.unsqueeze(-1)

    def losses(
        self, entered: Tensor, weight: Weight, labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
    ) -> list[Tensor]:
        """Implement ``Vocabulary.losses``."""
        logits = self._weights.product(entered, weight, transposed=self._tied)
        return summed_cross_entropies(logits, labels, region, rows_dim)


def summed_cross_entropies(
    logits: Tensor, labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
) -> list[Tensor]:
    """Each MTP stream's cross-entropy, a scalar summed over its counted tokens.

    ``logits`` are this rank's [.., V / T] of all streams, joined along ``rows_dim``; ``labels`` are per stream. 16-bit
    logits are converted to float32 first.
    """
    logits = logits.to(wide_type(logits.dtype))
    if region.num_ranks > 1:
        losses = token_losses(logits, join_mtp_streams(OPS, labels, rows_dim), region)
        return [stream.sum() for stream in split_mtp_streams(OPS, losses, len(labels), rows_dim)]
    return [
        F.cross_entropy(x.flatten(0, -2), ids.flatten(), ignore_index=IGNORED, reduction="sum")
        for x, ids in zip(split_mtp_streams(OPS, logits, len(labels), rows_dim), labels, strict=True)
    ]


def token_losses(logits: Tensor, labels: Tensor, region: TensorParallelRegion) -> Tensor:
    """Loss per token, ``log(sum_v exp(x_v - max)) - (x_label - max)``: three collectives of one number per token.

    The maximum is a constant for autograd: it cancels.
    """
    highest = region.max(logits.amax(-1), "head.loss.max")
    shifted = logits - highest.unsqueeze(-1)
    sum_exp = region.sum(shifted.exp().sum(-1), "head.loss.sum_exp")
    column, is_local = _local_ids(labels, logits.shape[-1], region)
    target = region.sum(shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1) * is_local, "head.loss.target")
    return (sum_exp.log() - target) * (labels != IGNORED)


def _local_ids(ids: Tensor, num_local: int, region: TensorParallelRegion) -> tuple[Tensor, Tensor]:
    """Index of each id in this rank's ``num_local`` entries, 0 for other ranks' ids; and a mask of this rank's ids."""
    index = ids - region.rank * num_local
    is_local = (index >= 0) & (index < num_local)
    return torch.where(is_local, index, 0), is_local
