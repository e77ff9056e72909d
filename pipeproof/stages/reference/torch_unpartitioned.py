"""The single-process reference on PyTorch: one unpartitioned model, plain autograd, micro-batch by micro-batch.

It has no stages, ranks or communication and shares no code with the stages that it checks. It takes the names and
shapes of parameters from the description. Gradients of products and lookups are added inside the operation
(``torch_reference_weights``), as on the stages: a run with only pipeline parallelism then has the same bits.

Results of bfloat16 and float16 are returned as float32, which represents them exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer_records import LayerWatch, Side
from pipeproof.stages.describe.mtp_streams import module_weight
from pipeproof.stages.describe.synthetic import initial_weight, loss_scale, micro_batch
from pipeproof.stages.reference.reference_state import InitialState, StepResult
from pipeproof.stages.reference.torch_model import TorchUnpartitionedModel, no_hook

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = npt.NDArray[Any]

_TORCH_NAMES = MappingProxyType({"moment1": "exp_avg", "moment2": "exp_avg_sq", "step": "step"})
"""AdamW's state of each weight: PyTorch's name of each slot."""


def run_unpartitioned(
    plan: PlanSpec, watch: LayerWatch | None = None, start: InitialState | None = None
) -> Iterator[StepResult]:
    """Train the whole model for the plan's steps, from ``start`` if given, and yield the result of each step.

    All micro-batches of all data-parallel ranks run one after another in their order. Gradient buffers begin as +0.0.
    The loss is added in the run's dtype, for 16-bit types in float32. ``watch`` records the tensors between layers.
    """
    start = start or InitialState(0, _initial_weights(plan))
    model = TorchUnpartitionedModel(plan, start.weights)
    optimizer = _optimizer(plan, list(model.weights.main.values()))
    _restore_optimizer(optimizer, model.weights.main, start.optimizer_state)
    for step in range(start.step, plan.run.steps):
        result = _gradients(model, step, watch)
        optimizer.step()
        yield result


def unpartitioned_step(plan: PlanSpec, weights: Mapping[str, Array], step: int) -> StepResult:
    """Loss and gradients of one step from given whole weights, without an update."""
    return _gradients(TorchUnpartitionedModel(plan, weights), step, None)


def _gradients(model: TorchUnpartitionedModel, step: int, watch: LayerWatch | None) -> StepResult:
    plan, topology = model.plan, model.plan.topology
    model.weights.begin_step()
    before, biases = _arrays(model.weights.main), model.routers.begin_step()
    total = None
    for index in range(topology.dp * topology.ep * plan.schedule.num_micro_batches):
        batch = micro_batch(plan, step, index)
        model.dropout_rng.select(step, index)
        model.routers.select(index)
        hook = no_hook if watch is None else partial(_show, watch, index)
        scale = torch.tensor(loss_scale(plan, step, index), dtype=model.loss_dtype, device=model.device)
        losses = [loss * scale for loss in model.losses(batch, hook)]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses)
        if watch is not None:
            watch.see_loss("head", index, 0, loss)
        torch.autograd.backward([_trained_on(plan, losses), *model.routers.take_roots()])
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    model.weights.end_backward()
    gradients = {name: weight.grad for name, weight in model.weights.main.items()}
    if plan.run.clip_norm is not None:
        _clip(gradients, plan.run.clip_norm)
    return StepResult(step, total.cpu().numpy()[()], _arrays(gradients), before | biases, model.routers.end_step())


def _clip(gradients: Mapping[str, Tensor], limit: float) -> None:
    """Multiply gradients by limit / max(norm, limit), with the norm of all; squares are added per weight first."""
    squares = torch.stack([gradient.square().sum() for gradient in gradients.values()])
    factor = limit / torch.clamp(squares.sum().sqrt(), min=limit)
    for gradient in gradients.values():
        gradient *= factor


def _trained_on(plan: PlanSpec, losses: Sequence[Tensor]) -> Tensor:
    """The loss that is trained on, a scalar: the main loss plus the weighted losses of modules."""
    total = losses[0]
    for loss in losses[1:]:
        assert plan.gpt.mtp is not None
        total = total + loss * module_weight(plan.gpt.mtp)
    return total


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Copies on the host."""
    arrays = {}
    for name, tensor in tensors.items():
        on_host = tensor.detach().cpu()
        wide = on_host if on_host.dtype in (torch.float32, torch.float64) else on_host.float()
        arrays[name] = np.array(wide.numpy())
    return arrays


def _show(watch: LayerWatch, index: int, layer: str, side: Side, tensor: Tensor) -> None:
    watch.see(layer, side, index, 0, [tensor])


def _initial_weights(plan: PlanSpec) -> dict[str, Array]:
    """Initial weights, rounded to the type of the run first."""
    parameters = [p for layer in describe_gpt(plan) for p in layer.parameters]
    dtype: torch.dtype = getattr(torch, plan.run.dtype)
    drawn = {p.name: torch.from_numpy(initial_weight(p, plan.run.seed, "float64")) for p in parameters}
    return _arrays({name: weight.to(dtype) for name, weight in drawn.items()})


def _optimizer(plan: PlanSpec, weights: list[Tensor]) -> torch.optim.Optimizer:
    """PyTorch's SGD, or its AdamW with betas 0.9 and 0.999, epsilon 1e-8 and weight decay 0.01."""
    fused = any(weight.is_cuda for weight in weights)
    if plan.run.optimizer == "sgd":
        return torch.optim.SGD(weights, lr=plan.run.learning_rate, fused=fused)
    return torch.optim.AdamW(
        weights,
        lr=plan.run.learning_rate,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        fused=fused,
        foreach=None if fused else False,
        capturable=fused,
    )


def _restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Iterable[str], saved: Mapping[tuple[str, str], Array]
) -> None:
    """Load saved state, by weight and slot, into a new optimizer of the named weights."""
    indices = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for (name, slot), array in saved.items():
        state.setdefault(indices[name], {})[_TORCH_NAMES[slot]] = torch.tensor(array)
    if state:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
