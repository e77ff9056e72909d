"""A pipeline stage on Paddle: the framework's own part of ``stages.common.stage``.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values of this rank, G query heads of each, D head
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.experts import ExpertCollectives, ExpertRegion
from pipeproof.stages.common.sequence_splits import ContextCollectives
from pipeproof.stages.common.stage import LayerOps, Stage
from pipeproof.stages.common.tensor_parallel import TensorParallelCollectives
from pipeproof.stages.common.weights import WeightMaker
from pipeproof.stages.common.work_items import MtpStream, WorkItem, mtp_batches
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.describe.synthetic import Batch, loss_scale
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.balance import PaddleBalance
from pipeproof.stages.paddle.experts import PaddleExperts
from pipeproof.stages.paddle.functional import mlp_activation, rotary_tables
from pipeproof.stages.paddle.vocabulary import PaddleVocabulary
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
        experts = ExpertRegion(OPS, ep_rank, plan.topology.ep, exchanges)
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

    def backward(self, output: Tensor, gradient: Tensor | None) -> None:
        """The whole backward of one work item: ``backward_input``, then the weight gradients."""
        self.backward_input(output, gradient).accumulate()

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
