"""In which order each stage adds the weight gradients of its micro-batches (DESIGN, invariant 11).

Sums of rounded numbers depend on their order. A plan whose stages all add in
the order of micro-batches has the bits of a model that runs them one by one;
any other has those of a reference that adds in the plan's own order. Where a
stage has copies, each adds its own micro-batches, and the sums are added after
that in the order of the copies' pipeline ranks. Of the embedding's weight the
embedding, each module that looks tokens up itself and a tied head add a sum of
their own; a rank that holds several adds the later ones' to the first, before
copies are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.schedule.columns import unit_of
from pipeproof.schedule.ops import OpKind

_ADDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})


class Accumulation(StrEnum):
    """How a plan's sums compare with those of micro-batches one by one."""

    IN_ORDER = "in_order"
    REORDERED = "reordered"
    TWO_COPIES = "two_copies"


@dataclass(frozen=True)
class SumOrders:
    """Units of work in the order in which each copy adds the loss, and its stages' weight gradients."""

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
    """How the sums of a borrowed weight's gradient are added up, by its name: for each rank that holds it, in order."""
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
    own = [name for layer in layers if name in {weight.name for weight in layer.parameters}]
    borrowers = [layer.name for layer in layers if name in {weight.name for weight in layer.borrowed}]
    return [*own, *(f"{layer}.weight" for layer in borrowers)]


def accumulation_of(plan: LoweredPlan) -> Accumulation:
    """Which of the three a plan is; one with cut sequences adds more often than micro-batches one by one."""
    if plan.has_copies or plan.shared_weights.users:
        return Accumulation.TWO_COPIES
    orders = sum_orders(plan)
    of_all = [order for copies in (orders.loss, *orders.by_stage.values()) for order in copies]
    rising = all(list(order) == sorted(order) for order in of_all)
    return Accumulation.IN_ORDER if rising and not plan.num_splits else Accumulation.REORDERED


def sum_orders(plan: LoweredPlan) -> SumOrders:
    """The orders of a plan's units of work; copies come in the order of their pipeline ranks."""
    last = len(plan.stages) - 1
    loss: list[tuple[int, ...]] = []
    by_stage: dict[int, list[tuple[int, ...]]] = {}
    for program in plan.programs:
        own_loss: list[int] = []
        own: dict[int, list[int]] = {}
        for op in program:
            unit = unit_of(op, plan.num_splits)
            if op.kind in _ADDS:
                own.setdefault(op.stage, []).append(unit)
            elif op.kind is OpKind.FORWARD and op.stage == last:
                own_loss.append(unit)
        if own_loss:
            loss.append(tuple(own_loss))
        for stage, order in own.items():
            by_stage.setdefault(stage, []).append(tuple(order))
    return SumOrders(tuple(loss), {stage: tuple(copies) for stage, copies in by_stage.items()})
