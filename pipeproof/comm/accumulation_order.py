"""Order in which each stage adds the weight gradients of its micro-batches.

Sums of rounded numbers depend on their order. A plan whose stages all add in
the order of micro-batches has the bits of a model that runs them one by one.
Any other plan has the bits of a reference that adds in the plan's order. If a
stage has copies, each copy adds its own micro-batches. Then the sums are added
in the order of the copies' pipeline ranks. For the weight of the embedding, the
embedding, each MTP module with its own lookup and a tied head each add a
separate sum. A rank that holds several of them adds the later sums to the
first, before copies are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.schedule.columns import work_item_of
from pipeproof.schedule.ops import OpKind

_ADDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})


class Accumulation(StrEnum):
    """Comparison of a plan's sums with the sums of micro-batches one by one."""

    IN_ORDER = "in_order"
    REORDERED = "reordered"
    TWO_COPIES = "two_copies"


@dataclass(frozen=True)
class SumOrders:
    """Work items in the order in which each copy adds the loss, and its stages' weight gradients."""

    loss: tuple[tuple[int, ...], ...]
    by_stage: Mapping[int, tuple[tuple[int, ...], ...]]

    def by_parameter(self, plan: LoweredPlan) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The orders of each parameter's gradients, by its name; for a layer that borrows one, by ``LAYER.weight``."""
        return {
            name: order
            for stage, order in self.by_stage.items()
            for layer in plan.layers_of(stage)
            for name in (
                *(parameter.name for parameter in layer.parameters),
                *(f"{layer.name}.weight" for _ in layer.borrowed),
            )
        }


Uses: TypeAlias = tuple[tuple[str, int], ...]
"""(name in ``by_parameter``, copy) of each sum that one pipeline rank adds up, in order."""


def tied_sums(plan: LoweredPlan) -> dict[str, tuple[Uses, ...]]:
    """Return by borrowed weight the order in which its gradient sums are added, for each rank that holds it."""
    shared = plan.shared_weights
    return {
        name: tuple(
            tuple(
                (use, plan.holders[stage].index(pp))
                for stage in stages
                if pp in plan.holders[stage]
                for use in _uses(plan, stage, name)
            )
            for pp in shared.places(stages[0], name)
        )
        for name, stages in shared.users.items()
    }


def _uses(plan: LoweredPlan, stage: int, name: str) -> list[str]:
    """The layers of a stage that compute with a weight, by the names of their sums."""
    layers = plan.layers_of(stage)
    owners = [name for layer in layers if name in {weight.name for weight in layer.parameters}]
    borrowers = [layer.name for layer in layers if name in {weight.name for weight in layer.borrowed}]
    return [*owners, *(f"{layer}.weight" for layer in borrowers)]


def accumulation_of(plan: LoweredPlan) -> Accumulation:
    """Return the accumulation of a plan; with sequence splits it adds more often than micro-batches one by one."""
    if plan.has_copies or plan.shared_weights.users:
        return Accumulation.TWO_COPIES
    orders = sum_orders(plan)
    all_orders = [order for copies in (orders.loss, *orders.by_stage.values()) for order in copies]
    rising = all(list(order) == sorted(order) for order in all_orders)
    return Accumulation.IN_ORDER if rising and not plan.num_splits else Accumulation.REORDERED


def sum_orders(plan: LoweredPlan) -> SumOrders:
    """The orders of a plan's work items; copies come in the order of their pipeline ranks."""
    last = len(plan.stages) - 1
    loss: list[tuple[int, ...]] = []
    by_stage: dict[int, list[tuple[int, ...]]] = {}
    for program in plan.programs:
        own_loss: list[int] = []
        own: dict[int, list[int]] = {}
        for op in program:
            work_item = work_item_of(op, plan.num_splits)
            if op.kind in _ADDS:
                own.setdefault(op.stage, []).append(work_item)
            elif op.kind is OpKind.FORWARD and op.stage == last:
                own_loss.append(work_item)
        if own_loss:
            loss.append(tuple(own_loss))
        for stage, order in own.items():
            by_stage.setdefault(stage, []).append(tuple(order))
    return SumOrders(tuple(loss), {stage: tuple(copies) for stage, copies in by_stage.items()})
