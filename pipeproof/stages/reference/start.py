"""What a reference begins with: weights as they are drawn, or all that training has before a later step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import initial_weight

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Start:
    """The state before ``step``: whole arrays, which say nothing of a topology.

    ``weights`` are those that the optimizer updates, by name, and the biases of routers, where they move, under the
    names of ``describe.balance.bias_key``; without these they are zero. Buffers of own layers stand beside: of several
    data-parallel replicas each has its own, along dim 0. ``kept`` is what the optimizer keeps of each
    weight, by weight and slot: ``moment1`` and ``moment2`` of its shape, and numbers that count its steps
    (``beta1_power``, ``beta2_power``; PyTorch's ``step``). It is empty where the optimizer begins.

    Arrays of 16 bits may be float32 here, which holds them all.
    """

    step: int
    weights: Mapping[str, Array]
    kept: Mapping[tuple[str, str], Array] = field(default_factory=dict)


def beginning(plan: PlanSpec) -> Start:
    """Before step 0: what is drawn for each weight is rounded to the type of the run before anything else."""
    run = plan.run
    parameters = [p for layer in describe_gpt(plan) for p in layer.parameters]
    return Start(0, {p.name: initial_weight(p, run.seed, run.dtype).astype(run.weight_dtype) for p in parameters})
