"""References for custom layers: all layers in one process, plain autograd, micro-batch by micro-batch.

The layers are built from the user's file, as on the ranks. The code here that scales, adds and applies micro-batches
shares nothing with the code that it checks.

The ordered reference adds in the order of a parallel run:

- The gradient of each weight adds its micro-batches in the order of the plan's schedule, from +0.0 on. Copies of a
  stage each add their own, and their sums are added in the order of the copies.
- A layer that borrows a weight has its own sum for it. The sums are added as on the ranks that hold the weight.
- The sums of data-parallel ranks are added after that, in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.custom.built_layers import BuiltModel
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.stage_memory import num_shards
from pipeproof.stages.reference.optimizer import clip_factor, optimizer_of, restore_optimizer
from pipeproof.stages.reference.ordered_sums import Orders, SumByCopy
from pipeproof.stages.reference.reference_state import InitialState, StepResult
from pipeproof.stages.reference.sharded_tensors import add

Tensor: TypeAlias = paddle.Tensor


def run_custom_unpartitioned(
    plan: PlanSpec, watch: LayerWatch | None = None, start: InitialState | None = None
) -> Iterator[StepResult]:
    """Counterpart of ``run_unpartitioned`` for custom layers. ``start`` is the state of one data-parallel replica."""
    model = build_model(plan)
    optimizer = make_optimizer(plan, model, start)
    if start is not None:
        restore_buffers(model, start.weights)
    for step in range(0 if start is None else start.step, plan.run.steps):
        result = _gradients(plan, model, step, watch)
        optimizer.step()
        yield result


def custom_unpartitioned_step(plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]], step: int) -> StepResult:
    """Counterpart of ``unpartitioned_step`` for custom layers. ``weights`` may have buffers (see ``InitialState``)."""
    model = build_model(plan)
    for name, weight in model.weights().items():
        weight.set_value(weights[name])
    return _gradients(plan, model, step, None, weights)


def build_model(plan: PlanSpec) -> BuiltModel:
    """Build the whole model. Layers that borrow a weight compute with the weight itself."""
    model = BuiltModel(plan, [layer.name for layer in plan.custom.layers])
    weights = model.weights()
    for layer in model.layers:
        for name in layer.borrowed:
            layer.use(name, weights[name])
    return model


def make_optimizer(plan: PlanSpec, model: BuiltModel, start: InitialState | None) -> paddle.optimizer.Optimizer:
    """Make the optimizer of a model, and load weights and optimizer state of ``start``. Buffers stay as built."""
    weights = model.weights()
    optimizer = optimizer_of(plan.run, list(weights.values()))
    if start is not None:
        for name, weight in weights.items():
            weight.set_value(start.weights[name])
        restore_optimizer(
            optimizer,
            {name: [weight] for name, weight in weights.items()},
            {key: [array] for key, array in start.optimizer_state.items()},
        )
    return optimizer


def restore_buffers(model: BuiltModel, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Set the layers' buffers that are in ``values``."""
    for name, tensor in model.untrained().items():
        if name in values:
            tensor.set_value(values[name])


def buffers_of(plan: PlanSpec, values: Mapping[str, npt.NDArray[Any]], replica: int) -> dict[str, npt.NDArray[Any]]:
    """The declared buffers in ``values`` for one replica. Several replicas are stacked along dim 0."""
    names = (f"{layer.name}.{buffer.name}" for layer in plan.custom.layers for buffer in layer.buffers)
    buffers = {name: values[name] for name in names if name in values}
    return {name: np.asarray(x[replica]) for name, x in buffers.items()} if plan.topology.dp > 1 else buffers


def scaled_loss(model: BuiltModel, plan: PlanSpec, step: int, index: int, watch: LayerWatch | None) -> Tensor:
    """The scaled loss of a micro-batch: its share of the mean over all micro-batches of the step."""
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
    model: BuiltModel,
    step: int,
    watch: LayerWatch | None,
    buffers: Mapping[str, npt.NDArray[Any]] | None = None,
) -> StepResult:
    """Loss and gradients of one step. ``buffers`` are the initial ones of each replica, if the model is not trained."""
    weights, num_micro_batches = model.weights(), plan.schedule.num_micro_batches
    received: set[str] = set()
    hooks = [weight.register_hook(partial(_note_gradient, received, name)) for name, weight in weights.items()]
    for weight in weights.values():
        weight.grad = paddle.zeros_like(weight)
    losses: list[np.floating[Any]] = []
    for index in range(plan.topology.dp * num_micro_batches):
        if buffers is not None and index % num_micro_batches == 0:
            restore_buffers(model, buffers_of(plan, buffers, index // num_micro_batches))
        loss = scaled_loss(model, plan, step, index, watch)
        loss.backward()
        losses.append(loss.numpy()[()])
    for hook in hooks:
        hook.remove()
    total = losses[0]
    for later in losses[1:]:
        total = total + later
    if plan.run.clip_norm is not None:
        parts = {name: [[weight.grad]] for name, weight in weights.items()}
        factor = paddle.to_tensor(clip_factor(plan.run.clip_norm, plan.run.dtype, parts))
        for weight in weights.values():
            weight.grad = weight.grad * factor
    gradients = {name: weight.grad.numpy().copy() for name, weight in weights.items()}
    copies = {name: weight.numpy().copy() for name, weight in weights.items()}
    missing = tuple(name for name in weights if name not in received)
    return StepResult(step, total, gradients, copies, without_gradient=missing)


def _note_gradient(received: set[str], name: str, gradient: Tensor | None) -> None:
    """Note that a backward has a gradient for a weight; a ``PyLayer`` may give None."""
    if gradient is not None:
        received.add(name)


_WeightUse: TypeAlias = tuple[str, str]
"""One use of a weight: the user (the weight's own name, or ``LAYER.weight`` for a borrower) and the weight's name."""


def run_custom_ordered(
    plan: PlanSpec, orders: Orders, watch: LayerWatch | None, start: InitialState | None
) -> Iterator[StepResult]:
    """Counterpart of ``run_ordered`` for custom layers."""
    model = build_model(plan)
    weights = model.weights()
    optimizer, buffers = make_optimizer(plan, model, start), _initial_buffers(plan, model, start)
    for step in range(0 if start is None else start.step, plan.run.steps):
        before = {name: weight.numpy().copy() for name, weight in weights.items()}
        stacked = {name: np.stack([replica[name] for replica in buffers]) for name in buffers[0]}
        before |= stacked if len(buffers) > 1 else buffers[0]
        ranks = []
        for dp in range(plan.topology.dp):
            restore_buffers(model, buffers[dp])
            ranks.append(_rank_step(plan, model, orders, step, dp, watch))
            current = model.untrained()
            buffers[dp] = {name: current[name].numpy().copy() for name in buffers[dp]}
        gradients = {name: add([rank[name] for _, rank in ranks]) for name in weights}
        if plan.run.clip_norm is not None:
            parts = {name: [[gradient]] for name, gradient in gradients.items()}
            factor = paddle.to_tensor(clip_factor(plan.run.clip_norm, plan.run.dtype, parts, num_shards(plan)))
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        for name, weight in weights.items():
            weight.grad = gradients[name]
        whole = {name: gradient.numpy().copy() for name, gradient in gradients.items()}
        optimizer.step()
        yield StepResult(step, add([loss for loss, _ in ranks]), whole, before)


def _initial_buffers(
    plan: PlanSpec, model: BuiltModel, start: InitialState | None
) -> list[dict[str, npt.NDArray[Any]]]:
    """The initial values of the declared buffers, for each data-parallel replica."""
    current, saved = model.untrained(), {} if start is None else start.weights
    names = [f"{layer.name}.{buffer.name}" for layer in plan.custom.layers for buffer in layer.buffers]
    as_built = {name: current[name].numpy().copy() for name in names}
    return [as_built | buffers_of(plan, saved, dp) for dp in range(plan.topology.dp)]


def _rank_step(
    plan: PlanSpec, model: BuiltModel, orders: Orders, step: int, dp: int, watch: LayerWatch | None
) -> tuple[np.floating[Any], dict[str, Tensor]]:
    """The loss of one data-parallel rank's micro-batches, and its addend of each gradient."""
    uses = _weight_uses(model)
    losses = SumByCopy[np.floating[Any]](orders.loss)
    sums = {use: SumByCopy[Tensor](orders.gradients[use[0]]) for use in uses}
    num_micro_batches = plan.schedule.num_micro_batches
    for micro_batch in range(num_micro_batches):
        for weight in uses.values():
            weight.grad = paddle.zeros_like(weight)
        loss = scaled_loss(model, plan, step, dp * num_micro_batches + micro_batch, watch)
        loss.backward()
        losses.put(micro_batch, [loss.numpy()[()]])
        for use, weight in uses.items():
            sums[use].put(micro_batch, [weight.grad.clone()])
    return losses.total()[0], {name: _total(name, sums, orders) for name in model.weights()}


def _weight_uses(model: BuiltModel) -> dict[_WeightUse, Tensor]:
    """A leaf for each use of a weight: the weight itself, and for each borrower a leaf with the same memory."""
    weights = model.weights()
    uses: dict[_WeightUse, Tensor] = {(name, name): weight for name, weight in weights.items()}
    for layer in model.layers:
        for name in layer.borrowed:
            leaf = weights[name].detach()
            leaf.stop_gradient = False
            layer.use(name, leaf)
            uses[f"{layer.name}.weight", name] = leaf
    return uses


def _total(name: str, sums: dict[_WeightUse, SumByCopy[Tensor]], orders: Orders) -> Tensor:
    if name not in orders.tied:
        return sums[name, name].total()[0]
    holders = [add([sums[use, name].totals()[copy][0] for use, copy in uses]) for uses in orders.tied[name]]
    return add(holders)
