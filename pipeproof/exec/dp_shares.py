"""Gradients of a run whose optimizer is sharded, put together from the shares that dp ranks have of their sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.compare import Gradients
from pipeproof.exec.jobs import Loss
from pipeproof.stages.describe.shares import num_shares


def with_whole_gradients(
    plan: LoweredPlan, ranks: Sequence[tuple[Loss | None, Gradients]]
) -> list[tuple[Loss | None, Gradients]]:
    """The results of all ranks, each with the gradients that its dp group has together, in their weights' form.

    Raises:
        ValueError: the shares of a gradient have not as many elements as the weight.
    """
    if num_shares(plan.spec) == 1:
        return list(ranks)
    axes = {axis: plan.mesh.size(axis) for axis in ("tp", "ep")}
    shapes = {weight.name: weight.local_shape(axes) for layer in plan.layers for weight in layer.parameters}
    return [
        (loss, {name: _joined(name, shapes[name], [ranks[one][1][name] for one in _line(plan, rank)]) for name in own})
        for rank, (loss, own) in enumerate(ranks)
    ]


def _line(plan: LoweredPlan, rank: int) -> list[int]:
    """The dp group of a rank."""
    coords = plan.mesh.coords(rank)
    return [plan.mesh.rank({**coords, "dp": dp}) for dp in range(plan.mesh.size("dp"))]


def _joined(name: str, shape: tuple[int, ...], shares: Sequence[np.ndarray]) -> np.ndarray:
    whole = np.concatenate(shares)
    if whole.size != np.prod(shape, dtype=np.int64):
        sizes = [share.size for share in shares]
        raise ValueError(f"gradient of {name}: shares of {sizes} elements, expected {list(shape)} in all")
    return whole.reshape(shape)
