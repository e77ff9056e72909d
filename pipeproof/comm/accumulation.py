"""In which order each stage adds the weight gradients of its micro-batches (DESIGN, invariant 11).

Sums of rounded numbers depend on their order. A plan whose stages all add in
the order of micro-batches has the bits of a model that runs them one by one;
any other has those of a reference that adds in the plan's own order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pipeproof.comm.lower import LoweredPlan
from pipeproof.schedule.ops import OpKind

_ADDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})


class Accumulation(StrEnum):
    """How a plan's sums compare with those of micro-batches one by one."""

    IN_ORDER = "in_order"
    REORDERED = "reordered"
    TWO_COPIES = "two_copies"


@dataclass(frozen=True)
class SumOrders:
    """Micro-batches in the order in which the loss is added, and each stage's weight gradients."""

    loss: tuple[int, ...]
    by_stage: Mapping[int, tuple[int, ...]]

    def by_parameter(self, plan: LoweredPlan) -> dict[str, tuple[int, ...]]:
        """The order of each parameter's gradients, by its name."""
        return {
            parameter.name: order
            for stage, order in self.by_stage.items()
            for layer in plan.layers_of(stage)
            for parameter in layer.parameters
        }


def accumulation_of(plan: LoweredPlan) -> Accumulation:
    """Which of the three a plan is; one with cut sequences adds more often than micro-batches one by one."""
    if plan.has_copies:
        return Accumulation.TWO_COPIES
    orders = sum_orders(plan)
    rising = all(list(order) == sorted(order) for order in (orders.loss, *orders.by_stage.values()))
    return Accumulation.IN_ORDER if rising and not plan.num_splits else Accumulation.REORDERED


def sum_orders(plan: LoweredPlan) -> SumOrders:
    """The orders of a plan whose stages have one copy each and whose sequences are whole."""
    last = len(plan.stages) - 1
    loss: list[int] = []
    by_stage: dict[int, list[int]] = {}
    for op in (op for program in plan.programs for op in program):
        assert op.micro_batch is not None, "a computation is of a micro-batch"
        if op.kind in _ADDS:
            by_stage.setdefault(op.stage, []).append(op.micro_batch)
        elif op.kind is OpKind.FORWARD and op.stage == last:
            loss.append(op.micro_batch)
    return SumOrders(tuple(loss), {stage: tuple(order) for stage, order in by_stage.items()})
