"""The ordered reference: one process, one model, no ranks, but sums in the order of a parallel run.

Addition of rounded numbers is not associative, so a tensor- or data-parallel run cannot have the bits of the
unpartitioned model. It can have the bits of a model whose sums have the run's order. This is that model. Shard k is
the part of tensor-parallel rank k.

- A column-parallel product is one product per shard of the weight's columns. A row-parallel product is one product per
  shard of its rows, added in shard order.
- The gradient of an input that all shards read is added in shard order.
- With sequence parallelism a norm is applied to each sequence shard with a copy of its weight. The copies' gradients
  are added in shard order after the last micro-batch.
- The embedding, the softmax's denominator and the target logit are added over vocabulary shards in shard order. The
  maximum does not round.
- The gradient of each parameter adds its micro-batches in the order of the plan's schedule, from +0.0 on. If a stage
  has copies with different micro-batches, each copy adds its own, and the copies' sums are added in their order.
- A tied head has its own sum for the embedding's weight. It is added to the embedding's sum, for each copy, and then
  over copies.
- Each shard routes tokens with a copy of the router. The copies' gradients are added in shard order after the last
  micro-batch. An expert's tokens are those of all expert-parallel ranks, in one product in rank order.
- The gradient sums and losses of expert-parallel ranks are added in rank order after that, except those of experts,
  and then those of data-parallel ranks.
- Each context-parallel rank's part of a sequence is computed separately. The gradient of keys and values adds those of
  each rank's queries. Weight gradients and losses are added over these ranks, in rank order, before expert-parallel
  ranks.
- If sequences are split over time, each split is computed separately and its gradients are separate addends. The
  gradient of keys and values adds those of later splits, from the last one back, and then the split's own.

With one shard this is the arithmetic of the unpartitioned model. It shares no code with the stages that it checks.

The model is in ``ordered_model``, its layers in ``ordered_layers``, their weights in ``ordered_weights``. This file
adds micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.stage_memory import num_shards
from pipeproof.stages.describe.synthetic import loss_scale, micro_batch
from pipeproof.stages.reference.mtp_streams import training_loss
from pipeproof.stages.reference.optimizer import clip_factor, optimizer_of, restore_optimizer
from pipeproof.stages.reference.ordered_model import OrderedModel
from pipeproof.stages.reference.ordered_sums import Orders, SumByCopy
from pipeproof.stages.reference.reference_state import InitialState, StepResult, initial_state
from pipeproof.stages.reference.sharded_tensors import Shards, add, add_shards, is_expert_weight

Tensor: TypeAlias = paddle.Tensor


def run_ordered(
    plan: PlanSpec, orders: Orders, watch: LayerWatch | None = None, start: InitialState | None = None
) -> Iterator[StepResult]:
    """Train for the plan's steps with the sums of its parallel run, and yield the result of each step.

    Training begins with ``start``, if given. ``watch`` records the tensors between layers and joins sequence shards.
    """
    start = start or initial_state(plan)
    model = OrderedModel(plan, watch, start.weights)
    optimizer = optimizer_of(plan.run, [shard for shards in model.weights.values() for shard in shards])
    restore_optimizer(
        optimizer,
        model.weights,
        {key: model.shard_array(key[0], array) for key, array in start.optimizer_state.items()},
    )
    num_dp, num_ep, num_cp = plan.topology.dp, plan.topology.ep, plan.topology.cp
    num_micro_batches = plan.schedule.num_micro_batches
    for step in range(start.step, plan.run.steps):
        weights = {name: model.joined(name, shards) for name, shards in model.weights.items()}
        losses, sums, biases = [], [], model.routers.begin_step()
        for dp in range(num_dp):
            ep_ranks = [[_RankSums(orders) for _ in range(num_cp)] for _ in range(num_ep)]
            for index in range(num_micro_batches):
                data = [(dp * num_ep + ep) * num_micro_batches + index for ep in range(num_ep)]
                work_items = _micro_batches(model, step, data)
                for number, addends in enumerate(work_items):
                    cp, split = divmod(number, len(work_items) // num_cp)
                    work_item = index * (len(work_items) // num_cp) + split
                    for ranks, (loss, addend) in zip(ep_ranks, addends, strict=True):
                        ranks[cp].put(work_item, loss, addend)
            losses.append(add([add([rank.loss.total()[0] for rank in ranks]) for ranks in ep_ranks]))
            sums.append({name: _over_experts(model, name, ep_ranks) for name in model.weights})
        gradients = {name: add_shards([rank_sums[name] for rank_sums in sums]) for name in model.weights}
        if plan.run.clip_norm is not None:
            parts = {name: model.distinct(name, shards) for name, shards in gradients.items()}
            limit, shares = plan.run.clip_norm, num_shards(plan)
            factor = paddle.to_tensor(clip_factor(limit, plan.run.weight_dtype, parts, shares))
            gradients = {name: [shard * factor for shard in shards] for name, shards in gradients.items()}
        for name, shards in model.weights.items():
            for shard, grad in zip(shards, gradients[name], strict=True):
                shard.grad = grad
        whole = {name: model.joined(name, shards) for name, shards in gradients.items()}
        optimizer.step()
        yield StepResult(step, add(losses), whole, weights | biases, model.routers.end_step())


class _RankSums:
    """The sums of one context-parallel rank of an expert-parallel rank over its micro-batches."""

    def __init__(self, orders: Orders) -> None:
        self.loss = SumByCopy[np.floating[Any]](orders.loss)
        self.gradients = {name: SumByCopy[Tensor](copies) for name, copies in orders.gradients.items()}
        self.tied = orders.tied

    def put(self, work_item: int, loss: np.floating[Any], gradients: Mapping[str, Shards]) -> None:
        """Add one work item."""
        self.loss.put(work_item, [loss])
        for name, shards in gradients.items():
            self.gradients[name].put(work_item, shards)

    def total(self, name: str) -> Shards:
        """The sum of a weight's gradients over all micro-batches, in the given order."""
        if name not in self.tied:
            return self.gradients[name].total()
        holders = [[self.gradients[use].totals()[copy] for use, copy in uses] for uses in self.tied[name]]
        return add_shards([add_shards(sums) for sums in holders])


def _over_experts(model: OrderedModel, name: str, ranks: Sequence[Sequence[_RankSums]]) -> Shards:
    """The sum over context-parallel, then expert-parallel ranks. Experts already have the tokens of all these ranks."""
    holders = ranks[:1] if is_expert_weight(name) else ranks
    return add_shards([add_shards([model.summed(name, rank.total(name)) for rank in parts]) for parts in holders])


def _micro_batches(
    model: OrderedModel, step: int, indices: Sequence[int]
) -> list[list[tuple[np.floating[Any], dict[str, Shards]]]]:
    """Run one micro-batch of each expert-parallel rank together.

    The result has, for each sequence split and rank, the scaled loss and the sharded gradients. The gradients of
    experts are rank 0's.
    """
    model.zero_gradients()
    model.step = step
    scales = [loss_scale(model.plan, step, index) for index in indices]
    losses = [
        [loss * scale for loss, scale in zip(of_split, scales, strict=True)]
        for of_split in model.losses([micro_batch(model.plan, step, index) for index in indices], indices)
    ]
    if model.watch is not None:
        for split, of_split in enumerate(losses):
            for index, loss in zip(indices, of_split, strict=True):
                model.watch.see_loss("head", index, split, loss)
    roots = [training_loss(model.plan, loss) for of_split in losses for loss in of_split]
    paddle.autograd.backward(roots + model.routers.take_roots())
    return [
        [(loss.numpy()[()], model.gradients(split, rank)) for rank, loss in enumerate(of_split)]
        for split, of_split in enumerate(losses)
    ]
