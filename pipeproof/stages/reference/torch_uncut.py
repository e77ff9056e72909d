"""The single-process reference on PyTorch: one uncut model, plain autograd, micro-batch by micro-batch.

It knows nothing of stages, ranks or communication and shares no code with what
it judges; from the description it takes the parameters' names and shapes.
Gradients of products and lookups are added inside them (``torch_weights``), as
they are where stages run, so that pipeline parallelism alone has its bits.

Values of bfloat16 and float16 leave it as float32, which holds them all.
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
from pipeproof.stages.describe.ahead import module_weight
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import initial_weight, loss_scale, micro_batch
from pipeproof.stages.describe.watch import LayerWatch, Side
from pipeproof.stages.reference.result import StepResult
from pipeproof.stages.reference.start import Start
from pipeproof.stages.reference.torch_model import TorchUncutModel, look_away

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = npt.NDArray[Any]

_THEIRS = MappingProxyType({"moment1": "exp_avg", "moment2": "exp_avg_sq", "step": "step"})
"""What AdamW keeps of each weight: by slot, what PyTorch calls it."""


def run_uncut(plan: PlanSpec, watch: LayerWatch | None = None, start: Start | None = None) -> Iterator[StepResult]:
    """Train the whole model for the plan's steps, from ``start`` on where it is given, yielding after each; lazy.

    All micro-batches of all data-parallel ranks run one after another in their
    order. Gradient buffers begin as +0.0; the loss adds up in the run's dtype, for 16 bits in float32.
    ``watch`` is shown what crosses the borders between layers.
    """
    start = start or Start(0, _initial_weights(plan))
    model = TorchUncutModel(plan, start.weights)
    optimizer = _optimizer(plan, list(model.weights.main.values()))
    _go_on(optimizer, model.weights.main, start.kept)
    for step in range(start.step, plan.run.steps):
        result = _gradients(model, step, watch)
        optimizer.step()
        yield result


def uncut_step(plan: PlanSpec, weights: Mapping[str, Array], step: int) -> StepResult:
    """One step's loss and gradients from given whole weights, without an update."""
    return _gradients(TorchUncutModel(plan, weights), step, None)


def _gradients(model: TorchUncutModel, step: int, watch: LayerWatch | None) -> StepResult:
    plan, topology = model.plan, model.plan.topology
    model.weights.begin_step()
    before, biases = _arrays(model.weights.main), model.routers.begin_step()
    total = None
    for index in range(topology.dp * topology.ep * plan.schedule.num_micro_batches):
        batch = micro_batch(plan, step, index)
        model.chance.turn_to(step, index)
        model.routers.turn_to(index)
        look = look_away if watch is None else partial(_show, watch, index)
        scale = torch.tensor(loss_scale(plan, step, index), dtype=model.loss_dtype, device=model.device)
        losses = [loss * scale for loss in model.losses(batch, look)]
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
    """Times limit / max(norm, limit), with the norm of all together; their squares are added weight by weight first."""
    squares = torch.stack([gradient.square().sum() for gradient in gradients.values()])
    factor = limit / torch.clamp(squares.sum().sqrt(), min=limit)
    for gradient in gradients.values():
        gradient *= factor


def _trained_on(plan: PlanSpec, losses: Sequence[Tensor]) -> Tensor:
    """The one number whose gradients are taken: the main loss, and those of modules with their weight."""
    total = losses[0]
    for loss in losses[1:]:
        assert plan.model.mtp is not None
        total = total + loss * module_weight(plan.model.mtp)
    return total


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """Copies, on the host."""
    found = {}
    for name, tensor in tensors.items():
        there = tensor.detach().cpu()
        found[name] = np.array((there if there.dtype in (torch.float32, torch.float64) else there.float()).numpy())
    return found


def _show(watch: LayerWatch, index: int, layer: str, side: Side, tensor: Tensor) -> None:
    watch.see(layer, side, index, 0, [tensor])


def _initial_weights(plan: PlanSpec) -> dict[str, Array]:
    """In the type of the run: what is drawn is rounded to it before anything else."""
    parameters = [p for layer in describe_gpt(plan) for p in layer.parameters]
    dtype: torch.dtype = getattr(torch, plan.run.dtype)
    drawn = {p.name: torch.from_numpy(initial_weight(p, plan.run.seed, "float64")) for p in parameters}
    return _arrays({name: weight.to(dtype) for name, weight in drawn.items()})


def _optimizer(plan: PlanSpec, weights: list[Tensor]) -> torch.optim.Optimizer:
    """PyTorch's SGD, or its AdamW with betas 0.9 and 0.999, epsilon 1e-8 and decay 0.01 of every weight."""
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


def _go_on(optimizer: torch.optim.Optimizer, names: Iterable[str], kept: Mapping[tuple[str, str], Array]) -> None:
    """Let an optimizer of the named weights that has made no step go on with what is ``kept`` by weight and slot."""
    places = {name: place for place, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for (name, slot), array in kept.items():
        state.setdefault(places[name], {})[_THEIRS[slot]] = torch.tensor(array)
    if state:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
