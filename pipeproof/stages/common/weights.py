"""Weights of one stage on one rank: this rank's shards, lent weights, the split backward, inputs that W gathers again.

Each framework has its own implementation of the uses of a weight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pipeproof.diagnostics.problems import grouped
from pipeproof.stages.common.backend_ops import Tensor, Weight
from pipeproof.stages.describe.layer import Layer, Parameter
from pipeproof.stages.describe.synthetic import initial_weight


class WeightGradients:
    """Deferred weight gradients of one work item."""

    def __init__(self) -> None:
        self._uses: deque[Callable[[], None]] = deque()

    def defer(self, add: Callable[[], None]) -> None:
        """Store the call that adds the gradient of one use of a weight, or of several uses with one graph."""
        self._uses.append(add)

    def accumulate(self) -> None:
        """Add the gradients to the weights' buffers in the order of the backward, and free their memory.

        A second call adds nothing.
        """
        while self._uses:
            self._uses.popleft()()


class SplitWeights(Protocol):
    """The weights of one stage as its layers use them. Their gradients are computed on request (W)."""

    def backward(self, output: Tensor, gradient: Tensor | None) -> WeightGradients:
        """Compute the gradients of all inputs of ``output``; return the deferred gradients of weights."""

    def accumulate_deferred(self) -> None:
        """Add the weight gradients that the running backward has deferred so far."""

    def product(
        self, activation: Tensor, weight: Weight, *, transposed: bool = False, dtype: str | None = None
    ) -> Tensor:
        """``activation @ weight``: [.., K] and [K, M] to [.., M]; transposed, the weight is [M, K].

        With a ``dtype`` it and its gradients are computed in the wider of that and the activation's. The gradients are
        rounded to the types of the activation and of the weight.
        """

    def grouped(self, activation: Tensor, weight: Weight, groups: Any, /) -> Tensor:
        """Multiply each group of rows by its matrix: [V, K] and [E, K, M] to [V, M]."""

    def grouped_evenly(self, activation: Tensor, weight: Weight, /) -> Tensor:
        """``grouped`` with as many rows in each group."""

    def deferred(self, weight: Weight, /) -> Tensor:
        """The weight as a tensor of autograd, for one use. W adds its gradient."""

    def fixed(self, weight: Weight, /) -> Tensor:
        """The weight as a constant."""

    def added(self, activation: Tensor, weight: Weight, view: Callable[[Tensor], Tensor] = ..., /) -> Tensor:
        """``activation + view(weight)``, by default of the whole weight. The view is broadcast."""

    def scaled_and_shifted(self, activation: Tensor, scale: Weight, shift: Weight, sizes: Sequence[int]) -> Tensor:
        """``activation * scale + shift`` with one ``scale`` for each group of columns: [.., K], [groups] and [K]."""


class DeferringWeights:
    """The backward of a ``SplitWeights``, which collects the gradients that its uses of weights defer.

    ``run_backward`` is autograd's, of roots and their gradients.
    """

    def __init__(
        self, run_backward: Callable[..., None], make_gradients: Callable[[], WeightGradients] = WeightGradients
    ) -> None:
        self._run_backward, self._make_gradients = run_backward, make_gradients
        self._collected = make_gradients()

    def backward(self, output: Tensor, gradient: Tensor | None) -> WeightGradients:
        """Compute the gradients of all inputs of ``output``; return the deferred gradients of weights.

        ``gradient`` is the gradient of ``output``, None for a scalar loss.
        """
        self._collected = self._make_gradients()
        self._run_backward([output], [gradient])
        collected, self._collected = self._collected, self._make_gradients()
        return collected

    def accumulate_deferred(self) -> None:
        """Implement ``SplitWeights.accumulate_deferred``."""
        self._collected.accumulate()

    def _defer(self, add: Callable[[], None]) -> None:
        self._collected.defer(add)


class BorrowedWeight(Protocol):
    """Another layer's weight as the borrowing layer uses it. Its own gradient is one addend of the total."""

    @property
    def used(self) -> Weight:
        """The weight that the borrower computes with."""

    def return_gradients(self) -> None:
        """Add the borrower's gradient to the weight's gradient, then reset it to +0.0."""


class ShardRank(Protocol):
    """The position of a rank among the ranks that hold shards of a weight."""

    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class WeightMaker:
    """Constructors of a framework's weights."""

    draw_dtype: str
    """The type in which initial values are drawn, before they are rounded to the type of the run."""
    make: Callable[[npt.NDArray[Any]], Weight]
    """Make a weight with these values."""
    borrow: Callable[[Weight], BorrowedWeight]
    """Wrap a weight for a layer that borrows it."""


class StageWeights:
    """This rank's shards by parameter name, drawn from ``seed`` and sharded over ``tp`` and ``ep``.

    Borrowed weights are included, unless they are in ``lent``, the weights of the rank's other stages.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        maker: WeightMaker,
        seed: int,
        lent: Mapping[str, Weight],
        tp: ShardRank,
        ep: ShardRank,
    ) -> None:
        self._maker, self._seed, self._tp, self._ep = maker, seed, tp, ep
        self.parameters: dict[str, Weight] = {
            parameter.name: self._load(parameter) for layer in layers for parameter in layer.parameters
        }
        self._names_of = grouped((name.rpartition(".")[0], name) for name in self.parameters)
        self._borrowed: dict[tuple[str, str], BorrowedWeight] = {}
        available = {**lent, **self.parameters}
        for layer in layers:
            for parameter in layer.borrowed:
                name = parameter.name
                if name in available:
                    self._borrowed[layer.name, name] = maker.borrow(available[name])
                else:
                    available[name] = self.parameters[name] = self._load(parameter)

    def of(self, operation: str) -> list[Weight]:
        """The weights of an operation, in the order of its description."""
        return [self.parameters[name] for name in self._names_of[operation]]

    def used_by(self, layer: str, name: str) -> Weight:
        """Return a weight as ``layer`` uses it. It may belong to another layer."""
        borrowed = self._borrowed.get((layer, name))
        return self.parameters[name] if borrowed is None else borrowed.used

    def used(self) -> list[Weight]:
        """All weights that the layers compute with, borrowed ones as their borrowers use them."""
        return [*self.parameters.values(), *(borrowed.used for borrowed in self._borrowed.values())]

    def return_gradients(self) -> None:
        """Add the gradients of borrowed weights to the gradients of the weights themselves."""
        for borrowed in self._borrowed.values():
            borrowed.return_gradients()

    def _load(self, parameter: Parameter) -> Weight:
        """This rank's shard of the initial weight."""
        weight = initial_weight(parameter, self._seed, self._maker.draw_dtype)
        for placement, axis in ((parameter.tp, self._tp), (parameter.ep, self._ep)):
            if placement.dim is not None:
                weight = np.split(weight, axis.num_ranks, axis=placement.dim)[axis.rank]
        return self._maker.make(weight)


_SOURCE = "pipeproof_gathered_input"


def mark(source: object, *tensors: Tensor) -> None:
    """Mark tensors that have the values of a source."""
    for tensor in tensors:
        setattr(tensor, _SOURCE, source)


def source_of(tensor: Tensor) -> Any:
    """The source of a tensor that must not be kept; None for any other tensor."""
    return getattr(tensor, _SOURCE, None)


class GatheredInput:
    """The source of a gathered tensor that products with weights read. ``gather`` returns it with the same bits.

    With sequence parallelism each rank has its own tokens between layers, and products with weights read all tokens. If
    the gathered tensor is kept for W, it takes T times the memory of the rank's own tokens. If it is not kept, W needs
    one more gather (arXiv:2205.05198, section 4.2.2).

    W gathers at the first use and frees the tensor after the last.
    """

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self._gather, self._num_uses = gather, 0
        self._tensor: Tensor | None = None

    def use(self) -> None:
        """Count a product that will call ``take`` once."""
        self._num_uses += 1

    def take(self) -> Tensor:
        """Return the gathered tensor for one use."""
        gathered = self._gather() if self._tensor is None else self._tensor
        self._num_uses -= 1
        self._tensor = gathered if self._num_uses else None
        return gathered
