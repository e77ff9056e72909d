"""A pipeline stage on Paddle: the framework's own part of ``stages.common.stage``.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.experts import ExpertCollectives, expert_region
from pipeproof.stages.common.sequence_splits import ContextCollectives
from pipeproof.stages.common.stage import LayerOps, Stage
from pipeproof.stages.common.tensor_parallel import TensorParallelCollectives, TensorParallelRegion
from pipeproof.stages.common.weights import WeightMaker, mark, source_of
from pipeproof.stages.common.work_items import MtpStream, WorkItem, join_mtp_streams, mtp_batches, split_mtp_streams
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.describe.synthetic import IGNORED, Batch, loss_scale
from pipeproof.stages.paddle.backend_ops import OPS, PaddleGatheredInput, PartOfGathered
from pipeproof.stages.paddle.experts import PaddleBalance, PaddleExperts
from pipeproof.stages.paddle.functional import mlp_activation, rotary_tables
from pipeproof.stages.paddle.weights import BorrowedWeight, SplitWeights

Tensor: TypeAlias = paddle.Tensor


class PaddleStage(Stage[Batch]):
    """A ``Stage`` on tensor-parallel rank ``tp_rank`` and expert-parallel rank ``ep_rank``; its weights are tensors.

    ``forward`` takes the whole micro-batch. ``exchanges`` may be None if ``topology.ep`` is 1.

    Raises:
        ValueError: as ``Stage``; or ``ep_rank`` and ``topology.ep`` do not fit.
    """

    def __init__(
        self,
        plan: PlanSpec,
        layers: Sequence[Layer],
        tp_rank: int = 0,
        collectives: TensorParallelCollectives | None = None,
        ep_rank: int = 0,
        exchanges: ExpertCollectives | None = None,
        lent: Mapping[str, Tensor] | None = None,
        context: ContextCollectives | None = None,
    ) -> None:
        run, model = plan.run, plan.gpt
        self._split_weights = SplitWeights(None if run.weight_dtype == run.dtype else run.dtype)
        experts = expert_region(OPS, plan, tp_rank, ep_rank, exchanges)
        self._num_splits = plan.schedule.num_sequence_splits * plan.topology.cp  # one of the two is 1

        def weight(value: npt.NDArray[Any]) -> Tensor:
            return paddle.to_tensor(np.ascontiguousarray(value.astype(run.weight_dtype)), stop_gradient=False)

        layer_ops = LayerOps(
            ops=OPS,
            weights=self._split_weights,
            vocabulary=PaddleVocabulary(self._split_weights, tied=model.tied_embedding),
            mlp_activation=mlp_activation(model),
            tables=rotary_tables(model.seq_length, model.rotary_size, run.dtype),
            maker=WeightMaker(draw_dtype=run.dtype, make=weight, borrow=BorrowedWeight),
            balance=PaddleBalance(plan, layers, adds_losses=tp_rank == 0),
            experts=PaddleExperts,
        )
        super().__init__(layer_ops, plan, layers, tp_rank, collectives, experts, lent, context)

    def _work_item(self, batch: Batch, step: int, index: int, split: int) -> WorkItem:
        streams = (
            MtpStream(self._in_order(stream.tokens, split), self._in_order(stream.labels, split))
            for stream in mtp_batches(self._plan, batch)
        )
        return WorkItem(tuple(streams), loss_scale(self._plan, step, index))

    def _in_order(self, token_ids: npt.NDArray[np.int64], split: int) -> Tensor:
        """A sequence split of tokens or labels [B, S], with the dims in the order of the plan's activations."""
        ids = np.split(token_ids, self._num_splits, axis=1)[split]
        return paddle.to_tensor(np.ascontiguousarray(ids if self._batch_first else ids.T))

    def _norm(self, activation: Tensor, name: str) -> Tensor:
        return self._normed([activation], name)[0]

    def _normed(self, streams: Sequence[Tensor], name: str = "norm") -> list[Tensor]:
        return self._split_weights.norm_each(streams, *self._held.of(name))

    def _reported_losses(self, losses: Tensor) -> npt.NDArray[Any]:
        return np.array(losses.numpy(), copy=True)


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
