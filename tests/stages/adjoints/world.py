"""``<J x, y> == <x, J^T y>`` in float64, over all ranks together: J by central differences, J^T by autograd.

Each rank has its own part of a tensor that is cut, or that is an addend; a replicated tensor is one tensor and counts
once. This is the meaning of a layout, and the reason why the backward of a copy onto several ranks is a sum over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pipeproof.stages.common.backend_ops import BackendOps
from pipeproof.stages.common.experts import ExpertRegion
from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.common.weights import SplitWeights
from tests.stages.torch.features import make_plan as plan_of_feature
from tests.stages.world import World

make_plan = partial(plan_of_feature, "plain")
"""A small plan of float64, with these sections."""
STEP = 1e-5
"""Step of central differences in float64: their error is about 1e-10 of the third derivative, their rounding 1e-11."""


@dataclass(frozen=True)
class Backend:
    """A framework, as the rows use it."""

    library: Any
    ops: BackendOps
    functional: Any
    """The module ``stages.<framework>.functional``."""
    tensor: Callable[[Any], Any]
    """A constant."""
    leaf: Callable[[Any], Any]
    weight: Callable[[Any], Any]
    """A weight as layers use it."""
    gradient: Callable[[Any], np.ndarray]
    """The gradient of a leaf or a weight, zeros if nothing depended on it."""
    numpy: Callable[[Any], np.ndarray]
    split_weights: Callable[[], Any]
    clip: Callable[..., Any]
    rotary_tables: Callable[[int, int], tuple[Any, Any]]
    vocabulary: Callable[..., Any]
    token_losses: Callable[..., Any]
    """A function of the logits of each stream, their labels and the region."""
    sums_of_losses: Callable[..., Any]
    experts: Any
    """The module ``stages.<framework>.experts``."""
    make_experts: Callable[..., Any]
    make_balance: Callable[..., Any]

    def fixed(self, *shape: int) -> Any:
        """Generic values. In tables the halves of sines differ, unlike in real tables."""
        return self.tensor(np.random.default_rng(shape).standard_normal(shape))


@dataclass(frozen=True)
class Held:
    """A tensor of each rank, of this shape: its own one, or with ``is_replicated`` one for all ranks; or a weight."""

    shape: tuple[int, ...]
    is_replicated: bool = False
    is_weight: bool = False


@dataclass(frozen=True)
class Rank:
    """The parts of a rank that an operation may use."""

    number: int
    region: TensorParallelRegion
    experts: ExpertRegion
    weights: SplitWeights


@dataclass(frozen=True)
class Case:
    """An operation: ``function(rank, *tensors)`` makes one tensor or several.

    ``covers`` are the public names that it goes through. With ``in_turn`` each
    output has a backward of its own, from the last to the first; otherwise
    there is one for all. The ranks are along ``axis``. ``regathers`` is of the
    tensor-parallel region.
    """

    name: str
    covers: tuple[str, ...]
    function: Callable[..., Any]
    inputs: tuple[Held, ...]
    num_ranks: int = 1
    sequence_dim: int | None = None
    outputs_replicated: bool = False
    in_turn: bool = False
    regathers: bool = False
    axis: str = "tp"


def on_ranks(fw: Backend, case: Case, values: Sequence[Sequence[np.ndarray]], work: Callable[..., Any]) -> list[Any]:
    """``work(rank, leaves, outputs)`` of each rank, whose inputs are ``values`` of it."""
    world = World(fw.library, **{case.axis: case.num_ranks})

    def on_rank(number: int) -> Any:
        collectives = world.ranks[number]
        rank = Rank(
            number,
            TensorParallelRegion(
                fw.ops, number, case.num_ranks, case.sequence_dim, collectives, regathers=case.regathers
            ),
            ExpertRegion(fw.ops, number, case.num_ranks, collectives),
            fw.split_weights(),
        )
        pairs = zip(case.inputs, values[number], strict=True)
        leaves = [fw.weight(value) if held.is_weight else fw.leaf(value) for held, value in pairs]
        made = case.function(rank, *leaves)
        return work(rank, leaves, [made] if isinstance(made, fw.library.Tensor) else list(made))

    return world.run(on_rank)


def sides(fw: Backend, case: Case, seed: int = 5) -> tuple[float, float]:
    """``<J x, y>`` and ``<x, J^T y>``, of generic values in which no symmetry could hide a mistake."""
    generator = np.random.default_rng(seed)

    def drawn(shape: Sequence[int], *, replicated: bool) -> list[np.ndarray]:
        arrays = [generator.standard_normal(shape) for _ in range(case.num_ranks)]
        return [arrays[0]] * case.num_ranks if replicated else arrays

    def of_ranks() -> list[tuple[np.ndarray, ...]]:
        return list(zip(*(drawn(held.shape, replicated=held.is_replicated) for held in case.inputs), strict=True))

    points, directions = of_ranks(), of_ranks()
    shapes = on_ranks(fw, case, points, lambda rank, leaves, made: [tuple(one.shape) for one in made])
    weights = [[generator.standard_normal(shape) for shape in of_rank] for of_rank in shapes]
    if case.outputs_replicated:
        weights = [weights[0]] * case.num_ranks

    def moved(sign: float) -> list[list[np.ndarray]]:
        pairs = zip(points, directions, strict=True)
        return [[a + sign * STEP * x for a, x in zip(at, along, strict=True)] for at, along in pairs]

    def values(rank: Rank, leaves: Sequence[Any], made: Sequence[Any]) -> list[np.ndarray]:
        return [fw.numpy(one) for one in made]

    ahead, behind = (on_ranks(fw, case, moved(sign), values) for sign in (1.0, -1.0))
    pushed = sum(
        float((((a - b) / (2 * STEP)) * y).sum())
        for number in range(1 if case.outputs_replicated else case.num_ranks)
        for a, b, y in zip(ahead[number], behind[number], weights[number], strict=True)
    )

    def pull(rank: Rank, leaves: Sequence[Any], made: Sequence[Any]) -> list[np.ndarray]:
        products = [(one * fw.tensor(y)).sum() for one, y in zip(made, weights[rank.number], strict=True)]
        for output in reversed(products) if case.in_turn else [sum(products[1:], products[0])]:
            rank.weights.backward(output, None).accumulate()
        return [fw.gradient(leaf) for leaf in leaves]

    gradients = on_ranks(fw, case, points, pull)
    for held, of_rank in zip(case.inputs, zip(*gradients, strict=True), strict=True):
        if held.is_replicated:
            for other in of_rank[1:]:
                np.testing.assert_allclose(other, of_rank[0], rtol=1e-10, err_msg="ranks disagree about a gradient")
    pulled = sum(
        float((gradient * x).sum())
        for number in range(case.num_ranks)
        for held, gradient, x in zip(case.inputs, gradients[number], directions[number], strict=True)
        if number == 0 or not held.is_replicated
    )
    return pushed, pulled


def agrees(fw: Backend, case: Case) -> bool:
    """True if the two sides are equal up to the error of central differences."""
    pushed, pulled = sides(fw, case)
    assert abs(pushed) > 1e-3, f"{case.name}: the test would not see a gradient of zero"
    return abs(pulled - pushed) <= 1e-7 * abs(pushed) + 1e-9
