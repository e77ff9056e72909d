"""The reference of own layers: all of them in one process, plain autograd, micro-batch by micro-batch.

The layers are built from the person's file as the ranks build them; what they
compute is theirs. How micro-batches are scaled, added and applied is written
here once more, and shared with nothing that is judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.stages.own.model import OwnModel
from pipeproof.stages.reference.clip import clip_factor
from pipeproof.stages.reference.optimizer import optimizer_of
from pipeproof.stages.reference.result import StepResult

Tensor: TypeAlias = paddle.Tensor


def run_own_uncut(plan: PlanSpec, watch: LayerWatch | None = None) -> Iterator[StepResult]:
    """As ``run_uncut``, for own layers."""
    model = built(plan)
    optimizer = optimizer_of(plan.run, list(model.weights().values()))
    for step in range(plan.run.steps):
        result = _gradients(plan, model, step, watch)
        optimizer.step()
        yield result


def own_uncut_step(plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]], step: int) -> StepResult:
    """As ``uncut_step``, for own layers, which are built for it."""
    model = built(plan)
    for name, weight in model.weights().items():
        weight.set_value(weights[name])
    return _gradients(plan, model, step, None)


def built(plan: PlanSpec) -> OwnModel:
    """The whole model; layers that borrow a weight compute with the weight itself."""
    assert plan.own_layers is not None
    model = OwnModel(plan, [layer.name for layer in plan.own_layers.layers])
    weights = model.weights()
    for layer in model.layers:
        for name in layer.borrowed:
            layer.use(name, weights[name])
    return model


def scaled_loss(model: OwnModel, plan: PlanSpec, step: int, index: int, watch: LayerWatch | None) -> Tensor:
    """What a micro-batch adds to the step's loss: its share of the mean over all micro-batches."""
    value = model.inputs(step, index)
    last = model.layers[-1]
    for number, layer in enumerate(model.layers):
        if watch is not None and number:
            watch.see(layer.name, "input", index, 0, value[:1])
        value = model.run(layer, value, step=step, index=index)
        if watch is not None and layer is not last:
            watch.see(layer.name, "output", index, 0, value[:1])
    loss = model.loss(value, step, index) * (1.0 / (plan.topology.dp * plan.schedule.num_micro_batches))
    if watch is not None:
        watch.see_loss(last.name, index, 0, loss)
    return loss


def _gradients(plan: PlanSpec, model: OwnModel, step: int, watch: LayerWatch | None) -> StepResult:
    weights = model.weights()
    for weight in weights.values():
        weight.grad = paddle.zeros_like(weight)
    losses: list[np.floating[Any]] = []
    for index in range(plan.topology.dp * plan.schedule.num_micro_batches):
        loss = scaled_loss(model, plan, step, index, watch)
        loss.backward()
        losses.append(loss.numpy()[()])
    total = losses[0]
    for later in losses[1:]:
        total = total + later
    if plan.run.clip_norm is not None:
        parts = {name: [[weight.grad]] for name, weight in weights.items()}
        factor = paddle.to_tensor(clip_factor(plan.run.clip_norm, plan.run.dtype, parts))
        for weight in weights.values():
            weight.grad = weight.grad * factor
    gradients = {name: weight.grad.numpy().copy() for name, weight in weights.items()}
    return StepResult(step, total, gradients, {name: weight.numpy().copy() for name, weight in weights.items()})
