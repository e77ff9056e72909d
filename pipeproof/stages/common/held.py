"""This rank's shards of the weights of one stage: what its layers have, and what they are lent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pipeproof.stages.common.ops import Weight
from pipeproof.stages.common.weights import BorrowedWeight
from pipeproof.stages.describe.layers import Layer, Parameter
from pipeproof.stages.describe.synthetic import initial_weight


class Place(Protocol):
    """Where a rank is among those that hold parts of a weight."""

    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class WeightMaker:
    """How a framework makes weights."""

    drawn_as: str
    """The type in which initial values are drawn, before they are rounded to the run's."""
    make: Callable[[npt.NDArray[Any]], Weight]
    """A weight of these values."""
    borrow: Callable[[Weight], BorrowedWeight]
    """A weight for a layer that it is lent to."""


class HeldWeights:
    """The weights by the names of the description, drawn from ``seed``, cut over ``tp`` and ``ep``.

    Of weights that layers borrow, too, unless they are in ``lent``: those of the rank's other stages.
    """

    def __init__(
        self, layers: Sequence[Layer], maker: WeightMaker, seed: int, lent: Mapping[str, Weight], tp: Place, ep: Place
    ) -> None:
        self._maker, self._seed, self._tp, self._ep = maker, seed, tp, ep
        self.parameters: dict[str, Weight] = {
            parameter.name: self._load(parameter) for layer in layers for parameter in layer.parameters
        }
        self._borrowed: dict[tuple[str, str], BorrowedWeight] = {}
        there = {**lent, **self.parameters}
        for layer in layers:
            for one in layer.borrowed:
                if one.name in there:
                    self._borrowed[layer.name, one.name] = maker.borrow(there[one.name])
                else:
                    there[one.name] = self.parameters[one.name] = self._load(one)

    def used_by(self, layer: str, name: str) -> Weight:
        """A weight as ``layer`` uses it, which may be another layer's."""
        borrowed = self._borrowed.get((layer, name))
        return self.parameters[name] if borrowed is None else borrowed.used

    def give_back(self) -> None:
        """Add what layers made of weights that were lent to them to those weights' own gradients."""
        for borrowed in self._borrowed.values():
            borrowed.give_back()

    def _load(self, parameter: Parameter) -> Weight:
        """This rank's shard of the initial weight."""
        weight = initial_weight(parameter, self._seed, self._maker.drawn_as)
        for placed, place in ((parameter.tp, self._tp), (parameter.ep, self._ep)):
            if placed.dim is not None:
                weight = np.split(weight, place.num_ranks, axis=placed.dim)[place.rank]
        return self._maker.make(weight)
