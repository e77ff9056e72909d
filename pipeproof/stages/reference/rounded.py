"""Weights that are kept in a wider type than the model computes in, as the references compute with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import paddle

from pipeproof.specs.plan import RunSpec
from pipeproof.stages.reference.pieces import Pieces

Tensor: TypeAlias = paddle.Tensor


def rounded(weights: dict[str, Tensor], run: RunSpec) -> dict[str, Tensor]:
    """Each weight in the type of the run, a node of autograd; the same weights where they have that type."""
    if run.weight_dtype == run.dtype:
        return weights
    return {name: weight.astype(run.dtype) for name, weight in weights.items()}


class RoundedPieces(Mapping[str, Pieces]):
    """Weights in pieces, rounded each time that they are read: each use has a gradient of its own."""

    def __init__(self, weights: Mapping[str, Pieces], run: RunSpec) -> None:
        self._weights, self._run = weights, run

    def __getitem__(self, name: str) -> Pieces:
        """The pieces as they are, where they have the type of the run."""
        if self._run.weight_dtype == self._run.dtype:
            return self._weights[name]
        return [piece.astype(self._run.dtype) for piece in self._weights[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
