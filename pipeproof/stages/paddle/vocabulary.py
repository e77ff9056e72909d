"""Embedding and head, with the vocabulary sharded over the tensor-parallel ranks.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import paddle
import paddle.nn.functional as F

from pipeproof.stages.common.gathered_input import mark, source_of
from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.common.work_items import join_mtp_streams, split_mtp_streams
from pipeproof.stages.describe.synthetic import IGNORED
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.recompute import PaddleGatheredInput, PartOfGathered
from pipeproof.stages.paddle.weights import SplitWeights

Tensor: TypeAlias = paddle.Tensor


class PaddleVocabulary:
    """A ``Vocabulary`` whose weights are tensors. ``tied`` is true if the head uses the embedding's weight.

    Lookups and products run per MTP stream, so the bits of a stream do not depend on the others.
    """

    def __init__(self, weights: SplitWeights, *, tied: bool) -> None:
        self._weights, self._tied = weights, tied

    def rows(self, tokens: Sequence[Tensor], weight: Tensor, region: TensorParallelRegion, rows_dim: int) -> Tensor:
        """Implement ``Vocabulary.rows``: zero for tokens whose rows are on other ranks."""
        if region.num_ranks == 1:
            return self._weights.rows(tokens, weight, rows_dim)
        local = [_local_ids(ids, weight.shape[0], region) for ids in tokens]
        rows = self._weights.rows([row for row, _ in local], weight, rows_dim)
        is_local = join_mtp_streams(OPS, [is_local for _, is_local in local], rows_dim)
        return rows * is_local.astype(rows.dtype).unsqueeze(-1)

    def losses(
        self, entered: Tensor, weight: Tensor, labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
    ) -> list[Tensor]:
        """Implement ``Vocabulary.losses``. If W gathers the input again, the streams share one gather."""
        streams, source = split_mtp_streams(OPS, entered, len(labels), rows_dim), source_of(entered)
        if len(streams) > 1 and isinstance(source, PaddleGatheredInput):
            for number, stream in enumerate(streams):
                part = partial(_stream, number=number, num_streams=len(streams), rows_dim=rows_dim)
                mark(PartOfGathered(source, part), stream)
        logits = self._weights.product_each(streams, weight, transposed=self._tied)
        return summed_cross_entropies(logits, labels, region, rows_dim)


def _stream(entered: Tensor, number: int, num_streams: int, rows_dim: int) -> Tensor:
    return split_mtp_streams(OPS, entered, num_streams, rows_dim)[number]


def summed_cross_entropies(
    logits: Sequence[Tensor], labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
) -> list[Tensor]:
    """Each stream's cross-entropy, a scalar summed over its counted tokens; ``logits`` are this rank's [.., V / T]."""
    if region.num_ranks > 1:
        return [paddle.sum(losses) for losses in token_losses(logits, labels, region, rows_dim)]
    num_ids = logits[0].shape[-1]
    return [
        paddle.sum(F.cross_entropy(x.reshape([-1, num_ids]), ids.reshape([-1]), ignore_index=IGNORED, reduction="none"))
        for x, ids in zip(logits, labels, strict=True)
    ]


def token_losses(
    logits: Sequence[Tensor], labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int
) -> list[Tensor]:
    """Loss per token, ``log(sum_v exp(x_v - max)) - (x_label - max)``: three collectives of one number per token.

    The maximum is a constant for autograd: it cancels.
    """
    num_streams = len(logits)
    highest = region.max(join_mtp_streams(OPS, [paddle.max(x, axis=-1) for x in logits], rows_dim), "head.loss.max")
    each = zip(logits, split_mtp_streams(OPS, highest, num_streams, rows_dim), strict=True)
    shifted = [x - most.unsqueeze(-1) for x, most in each]
    sum_exp = join_mtp_streams(OPS, [paddle.sum(paddle.exp(x), axis=-1) for x in shifted], rows_dim)
    sum_exp = region.sum(sum_exp, "head.loss.sum_exp")
    targets = []
    for x, ids in zip(shifted, labels, strict=True):
        column, is_local = _local_ids(ids, x.shape[-1], region)
        target = paddle.take_along_axis(x, column.unsqueeze(-1), axis=-1).squeeze(-1)
        targets.append(target * is_local.astype(x.dtype))
    target = region.sum(join_mtp_streams(OPS, targets, rows_dim), "head.loss.target")
    per_stream = zip(
        *(split_mtp_streams(OPS, x, num_streams, rows_dim) for x in (sum_exp, target)), labels, strict=True
    )
    return [(paddle.log(whole) - own) * (ids != IGNORED).astype(own.dtype) for whole, own, ids in per_stream]


def _local_ids(ids: Tensor, num_local: int, region: TensorParallelRegion) -> tuple[Tensor, Tensor]:
    """Index of each id in this rank's ``num_local`` entries, 0 for other ranks' ids; and a mask of this rank's ids."""
    index = ids - region.rank * num_local
    is_local = paddle.logical_and(index >= 0, index < num_local)
    return paddle.where(is_local, index, paddle.zeros_like(index)), is_local
