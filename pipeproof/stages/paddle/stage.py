"""A pipeline stage on Paddle: what of ``stages.common.stage`` is this framework's own.

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
from pipeproof.stages.common.collectives import TensorParallelCollectives
from pipeproof.stages.common.context import ContextCollectives
from pipeproof.stages.common.held import WeightMaker
from pipeproof.stages.common.lanes import lane_batches
from pipeproof.stages.common.stage import Means, Stage
from pipeproof.stages.common.units import Lane, Unit
from pipeproof.stages.describe.layers import Layer
from pipeproof.stages.describe.synthetic import Batch, loss_scale
from pipeproof.stages.paddle.balance import Balance
from pipeproof.stages.paddle.expert_exchange import ExpertCollectives, ExpertRegion
from pipeproof.stages.paddle.experts import Experts
from pipeproof.stages.paddle.functional import gated, rms_norm, rotary_tables, rotate
from pipeproof.stages.paddle.ops import OPS
from pipeproof.stages.paddle.vocabulary import PaddleVocabulary
from pipeproof.stages.paddle.weights import BorrowedWeight, SplitWeights

Tensor: TypeAlias = paddle.Tensor


class PaddleStage(Stage[Batch]):
    """A ``Stage`` on tensor-parallel rank ``tp_rank`` and expert-parallel rank ``ep_rank``; its weights are tensors.

    ``forward`` takes the micro-batch, all of its sequences. ``balance`` is what the routers of its experts have beside
    weights. ``exchanges`` may be None where ``topology.ep`` is 1.

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
        run, model = plan.run, plan.model
        self._split = SplitWeights(None if run.weight_dtype == run.dtype else run.dtype)
        self._experts = ExpertRegion(ep_rank, plan.topology.ep, exchanges)
        self._num_pieces = plan.schedule.num_sequence_splits * plan.topology.cp  # one of the two is 1

        def weight(value: npt.NDArray[Any]) -> Tensor:
            return paddle.to_tensor(np.ascontiguousarray(value.astype(run.weight_dtype)), stop_gradient=False)

        means = Means(
            ops=OPS,
            weights=self._split,
            vocabulary=PaddleVocabulary(self._split, tied=model.tied_embedding),
            gated=gated(model.swiglu_limit),
            tables=rotary_tables(model.seq_length, model.rotary_size, run.dtype),
            maker=WeightMaker(drawn_as=run.dtype, make=weight, borrow=BorrowedWeight),
        )
        super().__init__(means, plan, layers, tp_rank, collectives, self._experts, lent, context)
        self.balance = Balance(plan, layers, puts_in_losses=tp_rank == 0)

    def backward(self, output: Tensor, gradient: Tensor | None) -> None:
        """The whole backward of one micro-batch: ``backward_input``, and the weight gradients right after it."""
        self.backward_input(output, gradient).accumulate()

    def _unit(self, words: Batch, step: int, index: int, piece: int) -> Unit:
        lanes = lane_batches(self._plan, words)
        of_piece = (Lane(*(self._in_order(part, piece) for part in (lane.tokens, lane.labels))) for lane in lanes)
        return Unit(tuple(of_piece), loss_scale(self._plan, step, index))

    def _in_order(self, words: npt.NDArray[np.int64], piece: int) -> Tensor:
        """A piece of tokens or labels [B, S] in the order of the plan's activations."""
        own = np.split(words, self._num_pieces, axis=1)[piece]
        return paddle.to_tensor(np.ascontiguousarray(own if self._batch_first else own.T))

    def _norm(self, activation: Tensor, name: str) -> Tensor:
        return self._split.scaled(rms_norm(activation), self.parameters[f"{name}.weight"])

    def _normed(self, lanes: Sequence[Tensor]) -> list[Tensor]:
        return self._split.scaled_each(list(map(rms_norm, lanes)), self.parameters["norm.weight"])

    def _grouped_heads(self, activation: Tensor, name: str, piece: int) -> tuple[Tensor, Tensor, Tensor]:
        entered = self._region.enter(activation, f"{name}.in")
        fused = self._product(entered, f"{name}.qkv.weight")  # [S, B, K * (G + 2) * D]
        group = self._plan.model.num_heads // self._plan.model.kv_heads
        heads = fused.reshape([*fused.shape[:2], -1, group + 2, self._plan.model.size_of_head])
        heads = heads.transpose([0, 2, 3, 1, 4] if self._batch_first else [1, 2, 3, 0, 4])  # [B, K, G + 2, S, D]
        query, key, value = paddle.split(heads, [group, 1, 1], axis=2)
        cos, sin = self._tables(piece, query.shape[3])
        return rotate(query, cos, sin), rotate(key.squeeze(2), cos, sin), value.squeeze(2)

    def _routed(self, entered: Tensor, name: str, unit: tuple[int, int]) -> Tensor:
        assert self._plan.model.moe is not None
        weight_of = self.parameters.__getitem__
        experts = Experts(self._plan.model.moe, name, self._split, weight_of, self._experts, self._gated)
        return experts.forward(entered, self.balance.of(name, *unit))

    def _shown(self, losses: Tensor) -> npt.NDArray[Any]:
        return np.array(losses.numpy(), copy=True)
