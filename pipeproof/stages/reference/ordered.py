"""The reference that adds in a parallel run's order: one process, one model, no ranks.

Addition of rounded numbers is not associative, so a tensor- or data-parallel
run cannot have the bits of the uncut model. It can have the bits of a model
whose sums are written in the run's order, and this is that model:

- a column-parallel product is one product per piece of the weight's columns; a
  row-parallel one is one product per piece of its rows, added in piece order;
- the gradient of what all pieces read is added in piece order;
- with sequence parallelism a norm is applied to each piece of the sequence
  with a copy of its weight, and the copies' gradients are added in piece order
  after the last micro-batch;
- the embedding, the softmax's denominator and the target logit are added over
  pieces of the vocabulary in piece order; the maximum does not round;
- the gradient of each parameter adds its micro-batches in the order in which
  the plan's schedule does, from +0.0 on; where there are copies of a stage,
  which share out the micro-batches, each copy adds its own, and the copies'
  sums are added after that in their order;
- a tied head has a sum of its own for the embedding's weight, which is added
  to the embedding's, of each copy and then over copies;
- each piece routes tokens with a copy of the router, and the copies' gradients
  are added in piece order after the last micro-batch; an expert's tokens are
  those of all expert-parallel ranks, in one product in rank order;
- the gradient sums and losses of the expert-parallel ranks' micro-batches are
  added in rank order after that, but for those of experts, and then those of
  the data-parallel ranks;
- what context-parallel ranks have of a sequence is computed by itself; the
  gradient of keys and values adds what each rank's queries make of it, and
  weights' gradients and losses are added over these ranks, in rank order, the
  latter before expert-parallel ranks';
- where sequences are cut, every split is computed by itself and its gradients
  are addends of their own; that of keys and values adds what later splits make
  of it, from the last one back, and then the split's own.

Piece k is what tensor-parallel rank k holds. With one piece this is the uncut
model's arithmetic. It shares no code with what it judges.

The model is in ``ordered_model``, its layers in ``ordered_layers``, their weights are in ``ordered_weights``; here
micro-batches are added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.shares import num_shares
from pipeproof.stages.describe.synthetic import loss_scale, micro_batch
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.stages.reference.clip import clip_factor
from pipeproof.stages.reference.lanes import trained_on
from pipeproof.stages.reference.optimizer import go_on, optimizer_of
from pipeproof.stages.reference.ordered_model import OrderedModel
from pipeproof.stages.reference.orders import ByCopy, Orders
from pipeproof.stages.reference.own_ordered import run_own_ordered
from pipeproof.stages.reference.pieces import Pieces, add, add_pieces, is_of_experts
from pipeproof.stages.reference.result import StepResult
from pipeproof.stages.reference.start import Start, beginning

Tensor: TypeAlias = paddle.Tensor


def run_ordered(
    plan: PlanSpec, orders: Orders, watch: LayerWatch | None = None, start: Start | None = None
) -> Iterator[StepResult]:
    """Train for the plan's steps in the order of sums of its parallel run, yielding after each; lazy.

    Training begins with ``start`` where it is given, whatever the order in which that came about.
    ``watch`` is shown what crosses the borders between layers; it joins pieces of sequences along their dim.
    """
    if plan.own_layers is not None:
        yield from run_own_ordered(plan, orders, watch, start)
        return
    start = start or beginning(plan)
    model = OrderedModel(plan, watch, start.weights)
    optimizer = optimizer_of(plan.run, [piece for pieces in model.weights.values() for piece in pieces])
    go_on(optimizer, model.weights, {key: model.cut(key[0], array) for key, array in start.kept.items()})
    num_dp, num_ep, num_cp = plan.topology.dp, plan.topology.ep, plan.topology.cp
    num_micro_batches = plan.schedule.num_micro_batches
    for step in range(start.step, plan.run.steps):
        weights = {name: model.joined(name, pieces) for name, pieces in model.weights.items()}
        losses, sums, biases = [], [], model.routers.begin_step()
        for dp in range(num_dp):
            of_ranks = [[_RankSums(orders) for _ in range(num_cp)] for _ in range(num_ep)]
            for index in range(num_micro_batches):
                data = [(dp * num_ep + ep) * num_micro_batches + index for ep in range(num_ep)]
                units = _micro_batches(model, step, data)
                for place, addends in enumerate(units):
                    cp, split = divmod(place, len(units) // num_cp)
                    unit = index * (len(units) // num_cp) + split
                    for ranks, (of_one, gradients_of_one) in zip(of_ranks, addends, strict=True):
                        ranks[cp].put(unit, of_one, gradients_of_one)
            losses.append(add([add([rank.loss.total()[0] for rank in ranks]) for ranks in of_ranks]))
            sums.append({name: _over_experts(model, name, of_ranks) for name in model.weights})
        gradients = {name: add_pieces([of_rank[name] for of_rank in sums]) for name in model.weights}
        if plan.run.clip_norm is not None:
            parts = {name: model.distinct(name, pieces) for name, pieces in gradients.items()}
            limit, shares = plan.run.clip_norm, num_shares(plan)
            factor = paddle.to_tensor(clip_factor(limit, plan.run.weight_dtype, parts, shares))
            gradients = {name: [piece * factor for piece in pieces] for name, pieces in gradients.items()}
        for name, pieces in model.weights.items():
            for piece, grad in zip(pieces, gradients[name], strict=True):
                piece.grad = grad
        whole = {name: model.joined(name, pieces) for name, pieces in gradients.items()}
        optimizer.step()
        yield StepResult(step, add(losses), whole, weights | biases, model.routers.end_step())


class _RankSums:
    """What one context-parallel rank of an expert-parallel rank adds over its micro-batches."""

    def __init__(self, orders: Orders) -> None:
        self.loss = ByCopy[np.floating[Any]](orders.loss)
        self.gradients = {name: ByCopy[Tensor](copies) for name, copies in orders.gradients.items()}
        self.tied = orders.tied

    def put(self, unit: int, loss: np.floating[Any], gradients: Mapping[str, Pieces]) -> None:
        """One unit of work."""
        self.loss.put(unit, [loss])
        for name, pieces in gradients.items():
            self.gradients[name].put(unit, pieces)

    def total(self, name: str) -> Pieces:
        """The sum of a weight's gradients over all micro-batches, in the order that is given."""
        if name not in self.tied:
            return self.gradients[name].total()
        holders = [[self.gradients[use].totals()[copy] for use, copy in uses] for uses in self.tied[name]]
        return add_pieces([add_pieces(of_holder) for of_holder in holders])


def _over_experts(model: OrderedModel, name: str, ranks: Sequence[Sequence[_RankSums]]) -> Pieces:
    """The sum over context-parallel, then expert-parallel ranks; experts have the tokens of all of these already."""
    holders = ranks[:1] if is_of_experts(name) else ranks
    return add_pieces([add_pieces([model.summed(name, rank.total(name)) for rank in parts]) for parts in holders])


def _micro_batches(
    model: OrderedModel, step: int, indices: Sequence[int]
) -> list[list[tuple[np.floating[Any], dict[str, Pieces]]]]:
    """Run one micro-batch of each expert-parallel rank together.

    Of each split of the sequences, and of each rank, the scaled loss and the
    gradients in pieces; those of experts are all with the first rank.
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
    roots = [trained_on(model.plan, loss) for of_split in losses for loss in of_split]
    paddle.autograd.backward(roots + model.routers.take_roots())
    return [
        [(loss.numpy()[()], model.gradients(split, rank)) for rank, loss in enumerate(of_split)]
        for split, of_split in enumerate(losses)
    ]
