"""Sums whose addends are added in a given order, whenever they come."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pipeproof.stages.reference.pieces import add

_Addend = TypeVar("_Addend")


@dataclass(frozen=True)
class Orders:
    """Units of work of a data-parallel rank in the order in which losses, and gradients by parameter, are added.

    A unit is a micro-batch or, where sequences are cut, a piece of one: piece p
    of n of micro-batch k is unit k n + p. There is one order for each copy,
    most often one.

    ``tied`` says, by the name of a weight that several layers use, how their
    sums are added up: for each rank that holds it those that it has itself, as
    (name in ``gradients``, copy), and then the ranks' sums, all in order.
    """

    loss: Sequence[Sequence[int]]
    gradients: Mapping[str, Sequence[Sequence[int]]]
    tied: Mapping[str, Sequence[Sequence[tuple[str, int]]]] = field(default_factory=dict)


class InTurn(Generic[_Addend]):
    """Adds lists of one length, which may come in any order, in a given order; holds back no more than it must."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(reversed(order))
        self._held: dict[int, list[_Addend]] = {}
        self.total: list[_Addend] = []

    def put(self, index: int, addends: list[_Addend]) -> None:
        """The addends of one unit of work."""
        self._held[index] = addends
        while self._order and self._order[-1] in self._held:
            mine = self._held.pop(self._order.pop())
            self.total = [operator.add(*pair) for pair in zip(self.total, mine, strict=True)] if self.total else mine


class ByCopy(Generic[_Addend]):
    """Sums of several copies, each in an order of its own, and their sum in the order of the copies."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        self._copies = [InTurn[_Addend](order) for order in orders]
        self._copy_of = {index: copy for copy, order in zip(self._copies, orders, strict=True) for index in order}

    def put(self, index: int, addends: list[_Addend]) -> None:
        """The addends of one unit of work."""
        self._copy_of[index].put(index, addends)

    def totals(self) -> list[list[_Addend]]:
        """The sum of each copy, once every unit of work is there."""
        return [copy.total for copy in self._copies]

    def total(self) -> list[_Addend]:
        """The sum over all copies, once every unit of work is there."""
        return [add(of_copies) for of_copies in zip(*self.totals(), strict=True)]
