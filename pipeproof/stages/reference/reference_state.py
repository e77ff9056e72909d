"""Initial state of a reference, and the result of each of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import initial_weight

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class InitialState:
    """The training state before ``step``: whole arrays, independent of the topology.

    ``weights`` has the weights that the optimizer updates, by name. It may also have router biases, under the names of
    ``describe.balance.bias_key`` (missing biases are zero), and the buffers of custom layers (several data-parallel
    replicas are stacked along dim 0). ``optimizer_state`` is by weight and slot: ``moment1`` and ``moment2`` of the
    weight's shape, and scalars that count steps (``beta1_power``, ``beta2_power``; PyTorch's ``step``). It is empty
    for a new optimizer.

    16-bit arrays may be stored as float32, which represents them exactly.
    """

    step: int
    weights: Mapping[str, Array]
    optimizer_state: Mapping[tuple[str, str], Array] = field(default_factory=dict)


def initial_state(plan: PlanSpec) -> InitialState:
    """The state before step 0. The drawn weights are rounded to the type of the run first."""
    run = plan.run
    parameters = [p for layer in describe_gpt(plan) for p in layer.parameters]
    return InitialState(
        0, {p.name: initial_weight(p, run.seed, run.dtype).astype(run.weight_dtype) for p in parameters}
    )


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss and gradients of one step, and the weights at its beginning.

    ``loss`` is a scalar of the run's dtype. The arrays are whole, by parameter name, of the same dtype. ``weights``
    also has router biases, as in ``InitialState``. ``routers`` has the losses of
    routers by work item, and their biases after the step, under the names of ``describe.balance``.
    """

    step: int
    loss: np.floating[Any]
    gradients: Mapping[str, npt.NDArray[Any]]
    weights: Mapping[str, npt.NDArray[Any]]
    routers: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
