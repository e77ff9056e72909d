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
from pipeproof.stages.reference.optimizer import go_on, optimizer_of
from pipeproof.stages.reference.result import StepResult
from pipeproof.stages.reference.start import Start

Tensor: TypeAlias = paddle.Tensor


def run_own_uncut(plan: PlanSpec, watch: LayerWatch | None = None, start: Start | None = None) -> Iterator[StepResult]:
    """As ``run_uncut``, for own layers. ``start`` is of one data-parallel replica."""
    model = built(plan)
    optimizer = begun(plan, model, start)
    if start is not None:
        put_buffers(model, start.weights)
    for step in range(0 if start is None else start.step, plan.run.steps):
        result = _gradients(plan, model, step, watch)
        optimizer.step()
        yield result


def own_uncut_step(plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]], step: int) -> StepResult:
    """As ``uncut_step``, for own layers, which are built for it; ``weights`` may have buffers, too, as in ``Start``."""
    model = built(plan)
    for name, weight in model.weights().items():
        weight.set_value(weights[name])
    return _gradients(plan, model, step, None, weights)


def built(plan: PlanSpec) -> OwnModel:
    """The whole model; layers that borrow a weight compute with the weight itself."""
    assert plan.own_layers is not None
    model = OwnModel(plan, [layer.name for layer in plan.own_layers.layers])
    weights = model.weights()
    for layer in model.layers:
        for name in layer.borrowed:
            layer.use(name, weights[name])
    return model


def begun(plan: PlanSpec, model: OwnModel, start: Start | None) -> paddle.optimizer.Optimizer:
    """The optimizer of a model, both with the weights of ``start`` and what was kept of them; buffers are as built."""
    weights = model.weights()
    optimizer = optimizer_of(plan.run, list(weights.values()))
    if start is not None:
        for name, weight in weights.items():
            weight.set_value(start.weights[name])
        go_on(
            optimizer,
            {name: [weight] for name, weight in weights.items()},
            {key: [array] for key, array in start.kept.items()},
        )
    return optimizer


def put_buffers(model: OwnModel, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Let the layers have those of their buffers that are among ``values``."""
    for name, tensor in model.untrained().items():
        if name in values:
            tensor.set_value(values[name])


def buffers_of(plan: PlanSpec, values: Mapping[str, npt.NDArray[Any]], replica: int) -> dict[str, npt.NDArray[Any]]:
    """The declared buffers that are among ``values``, for one of the replicas, which stand along dim 0 if several."""
    assert plan.own_layers is not None
    names = (f"{layer.name}.{buffer.name}" for layer in plan.own_layers.layers for buffer in layer.buffers)
    there = {name: values[name] for name in names if name in values}
    return {name: np.asarray(one[replica]) for name, one in there.items()} if plan.topology.dp > 1 else there


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


def _gradients(
    plan: PlanSpec,
    model: OwnModel,
    step: int,
    watch: LayerWatch | None,
    buffers: Mapping[str, npt.NDArray[Any]] | None = None,
) -> StepResult:
    """One step's; ``buffers`` are what each replica begins it with, where the model has not been trained up to it."""
    weights, num_micro_batches = model.weights(), plan.schedule.num_micro_batches
    for weight in weights.values():
        weight.grad = paddle.zeros_like(weight)
    losses: list[np.floating[Any]] = []
    for index in range(plan.topology.dp * num_micro_batches):
        if buffers is not None and index % num_micro_batches == 0:
            put_buffers(model, buffers_of(plan, buffers, index // num_micro_batches))
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
