"""What a stage has from step to step, in bytes on one rank: weights, their gradients, the optimizer's states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, prod

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layers import Layer, Parameter
from pipeproof.stages.describe.shares import num_shares, share_numel

FLOAT32 = 4
"""Bytes of an element that is float32 in any plan."""


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of what a stage has from step to step, on one rank."""

    parameters: int
    gradients: int
    optimizer: int


def memory_dtype(plan: PlanSpec) -> str:
    """The type of weights and activations: of ``memory``, else of ``cost.analytic``, else of ``run``."""
    analytic = plan.cost.analytic
    return plan.memory.dtype or (analytic.dtype if analytic is not None else None) or plan.run.dtype


def optimizer_bytes(plan: PlanSpec) -> float:
    """What the optimizer keeps for one parameter, before it is shared out over ranks."""
    if plan.memory.optimizer_bytes is not None:
        return plan.memory.optimizer_bytes
    item, main = dtype_bytes(memory_dtype(plan)), plan.run.main_grad_dtype
    own = max(item, FLOAT32 if main is None else dtype_bytes(main))
    copy = own if item < own else 0
    return copy + (2 * own if plan.run.optimizer == "adamw" else 0)


def state_of(plan: PlanSpec, layers: Iterable[Layer]) -> State:
    """What one rank has of the layers' own weights."""
    return state_of_weights(plan, (weight for layer in layers for weight in layer.parameters))


def state_of_weights(plan: PlanSpec, weights: Iterable[Parameter]) -> State:
    """What one rank has of some weights."""
    axes = {"tp": plan.topology.tp, "ep": plan.topology.ep}
    sizes = [prod(weight.local_shape(axes)) for weight in weights]
    numel, shares = sum(sizes), num_shares(plan)
    return State(
        numel * dtype_bytes(memory_dtype(plan)),
        numel * dtype_bytes(plan.gradient_dtype),
        ceil(sum(share_numel(size, shares) for size in sizes) * Fraction(optimizer_bytes(plan))),
    )


def moved_by_update(plan: PlanSpec, state: State) -> Fraction:
    """Bytes that an optimizer's step reads and writes: gradients are read, weights and its own states both.

    Where the states are shared out, each rank updates its share of the weights.
    """
    return Fraction(2 * state.parameters + state.gradients, num_shares(plan)) + 2 * state.optimizer
