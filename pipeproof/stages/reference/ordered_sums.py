"""Sums with a fixed order of addends, which may arrive in any order."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pipeproof.stages.reference.sharded_tensors import add

_Addend = TypeVar("_Addend")


@dataclass(frozen=True)
class Orders:
    """Order in which the losses, and the gradients by parameter, of a data-parallel rank's work items are added.

    A work item is a micro-batch or a sequence split: split p of n of micro-batch k is work item k n + p. There is one
    order for each copy of a stage; most schedules have one copy.

    ``tied`` is the order for a weight that several layers use, by weight name. Each entry is a rank that holds the
    weight, with the sums that it adds, as (name in ``gradients``, copy). Then the ranks' sums are added in order.
    """

    loss: Sequence[Sequence[int]]
    gradients: Mapping[str, Sequence[Sequence[int]]]
    tied: Mapping[str, Sequence[Sequence[tuple[str, int]]]] = field(default_factory=dict)


class OrderedSum(Generic[_Addend]):
    """Sum of lists of equal length in a fixed order. The lists may arrive in any order and are stored until needed."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(reversed(order))
        self._held: dict[int, list[_Addend]] = {}
        self.total: list[_Addend] = []

    def put(self, index: int, addends: list[_Addend]) -> None:
        """Add the addends of one work item."""
        self._held[index] = addends
        while self._order and self._order[-1] in self._held:
            following = self._held.pop(self._order.pop())
            pairs = zip(self.total, following, strict=True) if self.total else ()
            self.total = [operator.add(*pair) for pair in pairs] if self.total else following


class SumByCopy(Generic[_Addend]):
    """Sums of several copies, each in its own order, and their sum in the order of the copies."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self._copies = [OrderedSum[_Addend](order) for order in orders]
        self._copy_of = {index: copy for copy, order in zip(self._copies, orders, strict=True) for index in order}

    def put(self, index: int, addends: list[_Addend]) -> None:
        """Add the addends of one work item."""
        self._copy_of[index].put(index, addends)

    def totals(self) -> list[list[_Addend]]:
        """The sum of each copy, after all work items have been added."""
        return [copy.total for copy in self._copies]

    def total(self) -> list[_Addend]:
        """The sum over all copies, after all work items have been added."""
        return [add(sums) for sums in zip(*self.totals(), strict=True)]
