"""A pipeline stage on PyTorch: the framework's own part of ``stages.common.stage``.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values of this rank, G query heads of each, D head
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.experts import ExpertCollectives, ExpertRegion
from pipeproof.stages.common.sequence_splits import ContextCollectives
from pipeproof.stages.common.stage import LayerOps, Stage
from pipeproof.stages.common.tensor_parallel import TensorParallelCollectives
from pipeproof.stages.common.weights import WeightMaker
from pipeproof.stages.common.work_items import WorkItem, join_mtp_streams, split_mtp_streams
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.describe.synthetic import DropoutKeys
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.balance import TorchBalance
from pipeproof.stages.torch.device_masks import DeviceMasks, MaskStates
from pipeproof.stages.torch.experts import FixedTorchExperts, TorchExperts
from pipeproof.stages.torch.functional import mlp_activation, rotary_tables
from pipeproof.stages.torch.vocabulary import TorchVocabulary
from pipeproof.stages.torch.weights import SplitWeights, Weight

Tensor: TypeAlias = torch.Tensor


class BorrowedWeight:
    """Another layer's weight as the borrowing layer uses it: the same value, with its own gradient."""

    def __init__(self, weight: Weight) -> None:
        self._weight, self.used = weight, weight.lent()

    def return_gradients(self) -> None:
        """Add the borrower's gradient to the weight's gradient, then reset it to +0.0."""
        self._weight.add(self.used.gradient)
        self.used.zero_gradient()


class TorchStage(Stage[WorkItem]):
    """A ``Stage`` on tensor-parallel rank ``tp_rank`` and expert-parallel rank ``ep_rank``; its weights are ``Weight``.

    ``forward`` takes the work item, which is on the device. ``exchanges`` may be None if ``topology.ep`` is 1.
    ``weights`` are the operations with weights, by default on a new ``SplitWeights``.

    Raises:
        ValueError: as ``Stage``; or ``ep_rank`` and ``topology.ep`` do not fit.
    """

    def __init__(
        self,
        plan: PlanSpec,
        layers: Sequence[Layer],
        device: torch.device,
        tp_rank: int = 0,
        collectives: TensorParallelCollectives | None = None,
        ep_rank: int = 0,
        exchanges: ExpertCollectives | None = None,
        lent: Mapping[str, Weight] | None = None,
        context: ContextCollectives | None = None,
        weights: SplitWeights | None = None,
    ) -> None:
        run, model = plan.run, plan.gpt
        dtype: torch.dtype = getattr(torch, run.dtype)
        self._split_weights = SplitWeights(device) if weights is None else weights
        self._mask_states = MaskStates(plan, layers, device)
        self._draws_on_device = model.dropout is not None and (run.device == "gpu" or run.compiler is not None)
        self._tables = rotary_tables(model.seq_length, model.rotary_size, dtype, device)
        experts = ExpertRegion(OPS, ep_rank, plan.topology.ep, exchanges)

        def weight(value: npt.NDArray[Any]) -> Weight:
            """Round to the type of the run first."""
            rounded = torch.tensor(value, dtype=dtype, device=device)
            return Weight(rounded.to(getattr(torch, run.weight_dtype)), dtype)

        layer_ops = LayerOps(
            ops=OPS,
            weights=self._split_weights,
            vocabulary=TorchVocabulary(self._split_weights, tied=model.tied_embedding),
            mlp_activation=mlp_activation(model),
            tables=self._tables,
            maker=WeightMaker(draw_dtype="float64", make=weight, borrow=BorrowedWeight),
            balance=TorchBalance(plan, layers, device, adds_losses=tp_rank == 0),
            experts=FixedTorchExperts if run.replay else TorchExperts,
        )
        super().__init__(layer_ops, plan, layers, tp_rank, collectives, experts, lent, context)

    def load_masks(self, step: int, first: int) -> None:
        """Put the states of a step's dropout masks on the device, of the micro-batches from ``first`` on."""
        if self._draws_on_device:
            self._mask_states.load(step, first)

    def accumulate_deferred(self) -> None:
        """Add the weight gradients that the running backward has deferred so far."""
        self._split_weights.accumulate_deferred()

    def _dropout_keys(self, step: int, index: int) -> DropoutKeys:
        if not self._draws_on_device:
            return super()._dropout_keys(step, index)
        return DeviceMasks(self._plan, step, index, self._mask_states.of(index), self._mask_states.positions)

    def _work_item(self, batch: WorkItem, step: int, index: int, split: int) -> WorkItem:
        return batch

    def _norm(self, activation: Tensor, name: str) -> Tensor:
        return self._split_weights.norm(activation, *self._held.of(name))

    def _normed(self, streams: Sequence[Tensor]) -> list[Tensor]:
        normed = self._norm(join_mtp_streams(OPS, streams, self._rows_dim), "norm")
        return split_mtp_streams(OPS, normed, len(streams), self._rows_dim)

    def _reported_losses(self, losses: Tensor) -> Tensor:
        return losses
