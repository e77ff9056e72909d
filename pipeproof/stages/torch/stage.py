"""A pipeline stage on PyTorch: what of ``stages.common.stage`` is this framework's own.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values of this rank, G query heads of each, D head
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt
import torch

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.collectives import TensorParallelCollectives
from pipeproof.stages.common.context import ContextCollectives
from pipeproof.stages.common.held import WeightMaker
from pipeproof.stages.common.lanes import join_lanes, split_lanes
from pipeproof.stages.common.stage import Means, Stage
from pipeproof.stages.common.units import Unit
from pipeproof.stages.describe.layers import Layer
from pipeproof.stages.torch.balance import Balance
from pipeproof.stages.torch.expert_exchange import ExpertCollectives, ExpertRegion
from pipeproof.stages.torch.experts import Experts
from pipeproof.stages.torch.functional import RMS_NORM_EPSILON, gated, rotary_tables
from pipeproof.stages.torch.ops import OPS
from pipeproof.stages.torch.rotary import turned_heads
from pipeproof.stages.torch.vocabulary import TorchVocabulary
from pipeproof.stages.torch.weights import SplitWeights, Weight

Tensor: TypeAlias = torch.Tensor


class BorrowedWeight:
    """A weight as a layer uses it that it is lent to: the same value, with a gradient of its own."""

    def __init__(self, weight: Weight) -> None:
        self._weight, self.used = weight, weight.lent()

    def give_back(self) -> None:
        """Add the gradient to the weight's own, and begin the next one as +0.0."""
        self._weight.add(self.used.gradient)
        self.used.zero_gradient()


class TorchStage(Stage[Unit]):
    """A ``Stage`` on tensor-parallel rank ``tp_rank`` and expert-parallel rank ``ep_rank``; its weights are ``Weight``.

    ``forward`` takes the unit of work, which is on the device. ``balance`` is what the routers of its experts have
    beside weights. ``exchanges`` may be None where ``topology.ep`` is 1.

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
    ) -> None:
        run, model = plan.run, plan.model
        dtype: torch.dtype = getattr(torch, run.dtype)
        self._split = SplitWeights(device)
        self._experts = ExpertRegion(ep_rank, plan.topology.ep, exchanges)

        def weight(value: npt.NDArray[Any]) -> Weight:
            """Rounded to the run's type before anything else."""
            rounded = torch.tensor(value, dtype=dtype, device=device)
            return Weight(rounded.to(getattr(torch, run.weight_dtype)), dtype)

        means = Means(
            ops=OPS,
            weights=self._split,
            vocabulary=TorchVocabulary(self._split, tied=model.tied_embedding),
            gated=gated(model.swiglu_limit),
            tables=rotary_tables(model.seq_length, model.rotary_size, dtype, device),
            maker=WeightMaker(drawn_as="float64", make=weight, borrow=BorrowedWeight),
        )
        super().__init__(means, plan, layers, tp_rank, collectives, self._experts, lent, context)
        self.balance = Balance(plan, layers, device, puts_in_losses=tp_rank == 0)

    def _unit(self, words: Unit, step: int, index: int, piece: int) -> Unit:
        return words

    def _norm(self, activation: Tensor, name: str) -> Tensor:
        return self._split.norm(activation, self.parameters[f"{name}.weight"], RMS_NORM_EPSILON)

    def _normed(self, lanes: Sequence[Tensor]) -> list[Tensor]:
        normed = self._norm(join_lanes(OPS, lanes, self._rows_dim), "norm")
        return split_lanes(OPS, normed, len(lanes), self._rows_dim)

    def _grouped_heads(self, activation: Tensor, name: str, piece: int) -> tuple[Tensor, Tensor, Tensor]:
        entered = self._region.enter(activation, f"{name}.in")
        fused = self._product(entered, f"{name}.qkv.weight")  # [S, B, K * (G + 2) * D]
        group = self._plan.model.num_heads // self._plan.model.kv_heads
        heads = fused.unflatten(-1, (-1, group + 2, self._plan.model.size_of_head))
        heads = heads.permute([0, 2, 3, 1, 4] if self._batch_first else [1, 2, 3, 0, 4])  # [B, K, G + 2, S, D]
        return turned_heads(heads, *self._tables(piece, heads.shape[3]))

    def _routed(self, entered: Tensor, name: str, unit: tuple[int, int]) -> Tensor:
        assert self._plan.model.moe is not None
        weight_of = self.parameters.__getitem__
        experts = Experts(self._plan.model.moe, name, self._split, weight_of, self._experts, self._gated)
        return experts.forward(entered, self.balance.of(name, *unit))

    def _shown(self, losses: Tensor) -> Tensor:
        return losses
