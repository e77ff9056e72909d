"""Sums of how often experts were visited, which biases of routers move by: beside those of gradients.

A rank counts the visits of its own tokens, each once, whichever ranks they go
to. TP ranks route the same tokens and count alike; over axes whose ranks have
other tokens, and over copies of a stage, counts are summed. They are whole
numbers, so neither the order of sums nor the schedule matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.stages.describe.balance import bias_name, moves_biases, routers
from pipeproof.stages.describe.gradient_facts import TOKEN_AXES
from pipeproof.stages.describe.layers import COUNTS_DTYPE, Collective, CollectiveKind

if TYPE_CHECKING:
    from pipeproof.comm.lowered import LoweredPlan
    from pipeproof.specs.plan import PlanSpec


def num_loads(plan: PlanSpec) -> int:
    """How many numbers one router's sum has; 0 where there is none."""
    moe = plan.model.moe
    return moe.num_experts if moe is not None and moves_biases(plan) else 0


def load_sums(plan: LoweredPlan, stage: int, axis: str) -> tuple[Collective, ...]:
    """The sums over an axis below the ``REDUCE_GRAD`` of a stage, router by router, after those of its weights."""
    num = num_loads(plan.spec)
    is_owed = axis in TOKEN_AXES or (axis == "pp" and len(plan.holders[stage]) > 1)
    names = routers(plan.layers_of(stage)) if num and is_owed else ()
    kind = CollectiveKind.ALL_REDUCE
    return tuple(Collective(kind, axis, num, bias_name(one), dtype=COUNTS_DTYPE, per_token=False) for one in names)
