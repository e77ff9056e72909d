"""The single-process reference: one unpartitioned model, plain autograd, micro-batch by micro-batch.

It has no stages, ranks or communication and shares no code with the stages that it checks. It takes the names and
shapes of parameters from the description.

It uses the layers of the ordered reference, with one shard of everything. A run's sums over shards, splits and ranks
are thereby compared with layers that have none of these sums. PyTorch's reference is another writing of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.synthetic import loss_scale, micro_batch
from pipeproof.stages.reference.optimizer import clip_factor, optimizer_of, restore_optimizer
from pipeproof.stages.reference.ordered import OrderedModel
from pipeproof.stages.reference.reference_state import InitialState, StepResult, initial_state
from pipeproof.stages.reference.sharded_tensors import add
from pipeproof.stages.reference.streams import training_loss


def run_unpartitioned(
    plan: PlanSpec, watch: LayerWatch | None = None, start: InitialState | None = None
) -> Iterator[StepResult]:
    """Train the whole model for the plan's steps, from ``start`` if given, and yield the result of each step.

    All micro-batches of all data-parallel ranks run one after another in their order. Gradient buffers begin as +0.0.
    The loss is added in the run's dtype. ``watch`` records the tensors between layers.
    """
    start = start or initial_state(plan)
    model = OrderedModel(plan, watch, start.weights, is_whole=True)
    optimizer = optimizer_of(plan.run, [weight for (weight,) in model.weights.values()])
    restore_optimizer(optimizer, model.weights, {key: [array] for key, array in start.optimizer_state.items()})
    for step in range(start.step, plan.run.steps):
        result = _gradients(model, step)
        optimizer.step()
        yield result


def unpartitioned_step(plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]], step: int) -> StepResult:
    """Loss and gradients of one step from given whole weights, without an update.

    With the weights of a run with another order of sums, this shows the effect of the order on one step. The effect on
    several steps also depends on the optimizer.
    """
    return _gradients(OrderedModel(plan, None, weights, is_whole=True), step)


def _gradients(model: OrderedModel, step: int) -> StepResult:
    plan, run = model.plan, model.plan.run
    model.zero_gradients()
    model.step = step
    losses, biases = [], model.routers.begin_step()
    for index in range(plan.topology.dp * plan.topology.ep * plan.schedule.num_micro_batches):
        ((loss,),) = model.losses([micro_batch(plan, step, index)], [index])
        loss = loss * loss_scale(plan, step, index)
        if model.watch is not None:
            model.watch.see_loss("head", index, 0, loss)
        paddle.autograd.backward([training_loss(plan, loss), *model.routers.take_roots()])
        losses.append(loss.numpy()[()])
    sums = model.gradients()
    for name, (weight,) in model.weights.items():
        weight.grad = add([sums[name][0], *(sums[f"{layer}.weight"][0] for layer in model.borrowers_of(name))])
    if run.clip_norm is not None:
        parts = {name: [[weight.grad]] for name, (weight,) in model.weights.items()}
        factor = paddle.to_tensor(clip_factor(run.clip_norm, run.weight_dtype, parts))
        for (weight,) in model.weights.values():
            weight.grad = weight.grad * factor
    gradients = {name: weight.grad.numpy().copy() for name, (weight,) in model.weights.items()}
    weights = {name: weight.numpy().copy() for name, (weight,) in model.weights.items()}
    return StepResult(step, add(losses), gradients, weights | biases, model.routers.end_step())
