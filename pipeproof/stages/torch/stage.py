"""A pipeline stage on PyTorch: the framework's own part of ``stages.common.stage``.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.experts import ExpertCollectives, expert_region
from pipeproof.stages.common.sequence_splits import ContextCollectives
from pipeproof.stages.common.stage import LayerOps, Stage
from pipeproof.stages.common.tensor_parallel import TensorParallelCollectives, TensorParallelRegion
from pipeproof.stages.common.weights import WeightMaker
from pipeproof.stages.common.work_items import MtpStream, WorkItem, join_mtp_streams, mtp_batches, split_mtp_streams
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.describe.synthetic import IGNORED, loss_scale, micro_batch
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.experts import FixedTorchExperts, TorchBalance, TorchExperts
from pipeproof.stages.torch.functional import mlp_activation, rotary_tables, wide_type
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
        run, model = plan.run, plan.gpt
        dtype: torch.dtype = getattr(torch, run.dtype)
        self._split_weights = SplitWeights(device)
        self._tables = rotary_tables(model.seq_length, model.rotary_size, dtype, device)
        experts = expert_region(OPS, plan, tp_rank, ep_rank, exchanges)

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

    def _work_item(self, batch: WorkItem, step: int, index: int, split: int) -> WorkItem:
        return batch

    def _norm(self, activation: Tensor, name: str) -> Tensor:
        return self._split_weights.norm(activation, *self._held.of(name))

    def _normed(self, streams: Sequence[Tensor]) -> list[Tensor]:
        normed = self._norm(join_mtp_streams(OPS, streams, self._rows_dim), "norm")
        return split_mtp_streams(OPS, normed, len(streams), self._rows_dim)

    def _reported_losses(self, losses: Tensor) -> Tensor:
        return losses


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


class StepBatches:
    """The work items of one data-parallel rank. ``load`` puts each step's in the same memory of the device.

    They are loaded before the step begins: no kernel waits for the host. Sequences may be split, over time or over
    context-parallel ranks. A plan may declare that ``tokens``, ``labels`` or ``mask`` (the positions that count in the
    loss) cross a boundary in addition to the activation. They have no gradient. A stage that receives one uses it in
    place of its own, on its device. Only the main stream changes.
    """

    def __init__(self, plan: PlanSpec, first: int, device: torch.device) -> None:
        self._plan, self._first, self._device = plan, first, device
        self._scale_type = wide_type(getattr(torch, plan.run.dtype))
        self._work_items: dict[tuple[int, int], WorkItem] = {}

    def load(self, step: int) -> None:
        """Draw the rank's micro-batches of a step, from number ``first`` on over all data ranks."""
        for index in range(self._first, self._first + self._plan.schedule.num_micro_batches):
            scale = torch.tensor(loss_scale(self._plan, step, index), dtype=self._scale_type)
            for split, streams in enumerate(self._splits(step, index)):
                self._put(index, split, streams, scale)

    def work_item(self, index: int, split: int = 0) -> WorkItem:
        """The work item of a micro-batch, counted over all data ranks, and a split of its sequences."""
        return self._work_items[index, split]

    def _splits(self, step: int, index: int) -> Iterator[list[MtpStream]]:
        """The streams of each split, on the host."""
        num_splits = self._plan.schedule.num_sequence_splits * self._plan.topology.cp
        batches = mtp_batches(self._plan, micro_batch(self._plan, step, index))
        parts = [[np.split(ids, num_splits, axis=1) for ids in (batch.tokens, batch.labels)] for batch in batches]
        for split in range(num_splits):
            yield [MtpStream(self._in_order(tokens[split]), self._in_order(labels[split])) for tokens, labels in parts]

    def _in_order(self, token_ids: npt.NDArray[np.int64]) -> Tensor:
        batch_first = self._plan.gpt.activation_order == "bsh"
        return torch.from_numpy(np.ascontiguousarray(token_ids if batch_first else token_ids.T))

    def _put(self, index: int, split: int, streams: Sequence[MtpStream], scale: Tensor) -> None:
        loaded = self._work_items.get((index, split))
        if loaded is None:
            copies = tuple(MtpStream(x.tokens.to(self._device), x.labels.to(self._device)) for x in streams)
            self._work_items[index, split] = WorkItem(copies, scale.to(self._device))
            return
        loaded.scale.copy_(scale)
        for target, stream in zip(loaded.streams, streams, strict=True):
            target.tokens.copy_(stream.tokens)
            target.labels.copy_(stream.labels)


def member_values(work_item: WorkItem, member: Boundary, *, batch_first: bool) -> Tensor:
    """The values of a boundary member for a work item, over all TP ranks, in the member's order of dims and type."""
    values = {"tokens": work_item.tokens, "labels": work_item.labels, "mask": work_item.labels != IGNORED}
    return (
        _in_order(values[member.member], member, batch_first=batch_first).to(getattr(torch, member.dtype)).contiguous()
    )


def with_member(work_item: WorkItem, member: Boundary, received: Tensor, *, batch_first: bool) -> WorkItem:
    """The work item with the received values, whole, in place of its own.

    Tokens also determine the labels: the label of a position is the next token, except for the last position.
    """
    values = _in_order(received, member, batch_first=batch_first)
    tokens, labels = work_item.tokens, work_item.labels
    if member.member == "labels":
        labels = values.to(torch.int64)
    elif member.member == "mask":
        labels = torch.where(values.bool(), labels, IGNORED)
    else:
        tokens, dim = values.to(torch.int64), 1 if batch_first else 0
        length = tokens.shape[dim]
        leading_labels, last = labels.split([length - 1, 1], dim)
        next_tokens = tokens.narrow(dim, 1, length - 1)
        labels = torch.cat([torch.where(leading_labels == IGNORED, IGNORED, next_tokens), last], dim)
    return replace(work_item, streams=(MtpStream(tokens, labels), *work_item.streams[1:]))


def _in_order(values: Tensor, member: Boundary, *, batch_first: bool) -> Tensor:
    """Convert between the member's order of dims and the order of work items."""
    return values if (member.dims == "bs") == batch_first else values.t()
