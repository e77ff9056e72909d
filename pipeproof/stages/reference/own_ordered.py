"""The reference of own layers that adds in a parallel run's order: one process, the same layers, no ranks.

- The gradient of each weight adds its micro-batches in the order in which the
  plan's schedule does, from +0.0 on; copies of a stage each add their own, and
  their sums are added in the order of the copies.
- A layer that borrows a weight has a sum of its own for it; the sums are added
  up as the ranks do that hold the weight.
- The sums of data-parallel ranks are added after that, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.shares import num_shares
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.stages.own.model import OwnModel
from pipeproof.stages.reference.clip import clip_factor
from pipeproof.stages.reference.orders import ByCopy, Orders
from pipeproof.stages.reference.own_uncut import begun, buffers_of, built, put_buffers, scaled_loss
from pipeproof.stages.reference.pieces import add
from pipeproof.stages.reference.result import StepResult
from pipeproof.stages.reference.start import Start

Tensor: TypeAlias = paddle.Tensor
_Use: TypeAlias = tuple[str, str]
"""Who computes with a weight (its own name, or ``LAYER.weight`` for a borrower), and the weight."""


def run_own_ordered(
    plan: PlanSpec, orders: Orders, watch: LayerWatch | None = None, start: Start | None = None
) -> Iterator[StepResult]:
    """As ``run_ordered``, for own layers."""
    model = built(plan)
    weights = model.weights()
    optimizer, buffers = begun(plan, model, start), _buffers(plan, model, start)
    for step in range(0 if start is None else start.step, plan.run.steps):
        before = {name: weight.numpy().copy() for name, weight in weights.items()}
        stacked = {name: np.stack([of_one[name] for of_one in buffers]) for name in buffers[0]}
        before |= stacked if len(buffers) > 1 else buffers[0]
        ranks = []
        for dp in range(plan.topology.dp):
            put_buffers(model, buffers[dp])
            ranks.append(_of_rank(plan, model, orders, step, dp, watch))
            now = model.untrained()
            buffers[dp] = {name: now[name].numpy().copy() for name in buffers[dp]}
        gradients = {name: add([of_rank[name] for _, of_rank in ranks]) for name in weights}
        if plan.run.clip_norm is not None:
            parts = {name: [[gradient]] for name, gradient in gradients.items()}
            factor = paddle.to_tensor(clip_factor(plan.run.clip_norm, plan.run.dtype, parts, num_shares(plan)))
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        for name, weight in weights.items():
            weight.grad = gradients[name]
        whole = {name: gradient.numpy().copy() for name, gradient in gradients.items()}
        optimizer.step()
        yield StepResult(step, add([loss for loss, _ in ranks]), whole, before)


def _buffers(plan: PlanSpec, model: OwnModel, start: Start | None) -> list[dict[str, npt.NDArray[Any]]]:
    """What each data-parallel replica begins with, of the buffers that the plan declares."""
    assert plan.own_layers is not None
    there, given = model.untrained(), {} if start is None else start.weights
    names = [f"{layer.name}.{buffer.name}" for layer in plan.own_layers.layers for buffer in layer.buffers]
    as_built = {name: there[name].numpy().copy() for name in names}
    return [as_built | buffers_of(plan, given, dp) for dp in range(plan.topology.dp)]


def _of_rank(
    plan: PlanSpec, model: OwnModel, orders: Orders, step: int, dp: int, watch: LayerWatch | None
) -> tuple[np.floating[Any], dict[str, Tensor]]:
    """The loss of one data-parallel rank's micro-batches, and what it has of each gradient."""
    used = _used(model)
    losses = ByCopy[np.floating[Any]](orders.loss)
    sums = {use: ByCopy[Tensor](orders.gradients[use[0]]) for use in used}
    num_micro_batches = plan.schedule.num_micro_batches
    for unit in range(num_micro_batches):
        for weight in used.values():
            weight.grad = paddle.zeros_like(weight)
        loss = scaled_loss(model, plan, step, dp * num_micro_batches + unit, watch)
        loss.backward()
        losses.put(unit, [loss.numpy()[()]])
        for use, weight in used.items():
            sums[use].put(unit, [weight.grad.clone()])
    return losses.total()[0], {name: _total(name, sums, orders) for name in model.weights()}


def _used(model: OwnModel) -> dict[_Use, Tensor]:
    """Every use of a weight as a leaf of its own: the weight itself, and for borrowers the same memory once more."""
    weights = model.weights()
    used: dict[_Use, Tensor] = {(name, name): weight for name, weight in weights.items()}
    for layer in model.layers:
        for name in layer.borrowed:
            again = weights[name].detach()
            again.stop_gradient = False
            layer.use(name, again)
            used[f"{layer.name}.weight", name] = again
    return used


def _total(name: str, sums: dict[_Use, ByCopy[Tensor]], orders: Orders) -> Tensor:
    if name not in orders.tied:
        return sums[name, name].total()[0]
    holders = [add([sums[use, name].totals()[copy][0] for use, copy in uses]) for uses in orders.tied[name]]
    return add(holders)
