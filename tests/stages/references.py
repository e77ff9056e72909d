"""Plans on one stage, the reference of their order, and comparisons of gradients by bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.reference.ordered import Orders, run_ordered
from tests.plans import plan_spec


def make_plan(**sections: Any) -> PlanSpec:
    """The tests' base plan with overrides, on one stage unless it says otherwise."""
    topology = {"pp": 1, **sections.pop("topology", {})}
    return plan_spec(topology=topology, **sections)


def same_bits(ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> list[str]:
    """Names whose bits differ; both sides must have the same names, shapes and dtypes."""
    assert set(ours) == set(reference)
    for name, array in ours.items():
        assert (array.shape, array.dtype) == (reference[name].shape, reference[name].dtype), name
    return [name for name in ours if ours[name].tobytes() != reference[name].tobytes()]


def run_in_order(plan):
    """The ordered reference, adding micro-batches in index order."""
    orders = (range(plan.schedule.num_micro_batches),)
    names = [parameter.name for layer in describe_gpt(plan) for parameter in layer.parameters]
    return run_ordered(plan, Orders(orders, dict.fromkeys(names, orders)))
