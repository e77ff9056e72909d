"""Gradients by central differences, which know nothing of backwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
import pytest

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import initial_weight, loss_scale, micro_batch
from pipeproof.stages.reference.ordered import OrderedModel
from tests.stages.adjoints.world import STEP


def big_weights(plan: PlanSpec) -> dict[str, np.ndarray]:
    """The weights that a run of the plan begins with, whole."""
    parameters = [parameter for layer in describe_gpt(plan) for parameter in layer.parameters]
    return {parameter.name: initial_weight(parameter, plan.run.seed, plan.run.dtype) for parameter in parameters}


def assert_slopes(plan: PlanSpec, *, shift: float = 0.0) -> None:
    """The unpartitioned model's gradients are slopes: of each weight where it is largest, and in some other place.

    The plan is of float64. Weights are enlarged and moved by about ``shift``: all matter, and no two are equal.
    """
    generator = np.random.default_rng(2)
    weights = {
        name: whole * (1.0 + 0.3 * generator.standard_normal(whole.shape)) * (1.0 if whole.ndim == 1 else 10.0)
        + shift * generator.standard_normal(whole.shape)
        for name, whole in big_weights(plan).items()
    }
    model = whole_model(plan, weights)
    _loss(model).backward()
    gradients = whole_gradients(model)
    for name, grad in gradients.items():
        for flat in (int(np.abs(grad).argmax()), int(generator.integers(grad.size))):
            place = np.unravel_index(flat, grad.shape)
            slope = _slope(plan, weights, name, place)
            assert grad[place] == pytest.approx(slope, rel=1e-6, abs=1e-9), f"{name}{place}"


def _slope(plan: PlanSpec, weights: Mapping[str, np.ndarray], name: str, place: tuple[Any, ...]) -> float:
    sides = []
    for sign in (1.0, -1.0):
        moved = weights[name].copy()
        moved[place] += sign * STEP
        sides.append(float(_loss(whole_model(plan, {**weights, name: moved}))))
    return (sides[0] - sides[1]) / (2 * STEP)


def whole_model(plan: PlanSpec, weights: Mapping[str, np.ndarray]) -> OrderedModel:
    """The unpartitioned model, with gradients of zero."""
    model = OrderedModel(plan, None, weights, is_whole=True)
    model.zero_gradients()
    return model


def whole_gradients(model: OrderedModel) -> dict[str, np.ndarray]:
    """The gradients of an unpartitioned model by parameter; a shared weight's gradient sums all its uses."""
    sums = {name: grad.numpy() for name, (grad,) in model.gradients().items()}
    return {
        name: sum((sums[f"{layer}.weight"] for layer in model.borrowers_of(name)), start=sums[name])
        for name in model.weights
    }


def _loss(model: OrderedModel) -> paddle.Tensor:
    """The main loss of the first micro-batch."""
    ((losses,),) = model.losses([micro_batch(model.plan, 0, 0)])
    return losses.reshape([-1])[0] * loss_scale(model.plan, 0, 0)
