"""Sharded tensors of the ordered reference, as on tensor-parallel ranks, rounded weights, and sums in a fixed order."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import paddle
from paddle.autograd import PyLayer

from pipeproof.specs.plan_sections import RunSpec

Tensor: TypeAlias = paddle.Tensor
_Addend = TypeVar("_Addend")
Shards = list[Tensor]
"""T shards of a tensor, or T copies of it, in rank order; one entry if it is whole."""


def is_expert_weight(name: str) -> bool:
    """True for weights of routed experts, which see the tokens of all expert-parallel ranks."""
    return ".experts." in name


def leaf(weight: Tensor) -> Tensor:
    """Return a separate leaf with the same values."""
    copy = weight.detach()
    copy.stop_gradient = False
    return copy


def add(addends: Sequence[_Addend]) -> _Addend:
    """((a0 + a1) + a2) + .."""
    return functools.reduce(operator.add, addends)


def add_shards(sums: Sequence[Shards]) -> Shards:
    """``add``, shard by shard."""
    return [add(shards) for shards in zip(*sums, strict=True)]


def products(inputs: Shards, weights: Shards, *, transposed: bool = False) -> Shards:
    """Matrix products, shard by shard, with the weights or their transposes."""
    return [paddle.matmul(x, weight, transpose_y=transposed) for x, weight in zip(inputs, weights, strict=True)]


class Copies(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """Copies of a tensor for several readers. Their gradients are added in the order of the copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_copies: int) -> tuple[Tensor, ...]:
        """``num_copies`` tensors of x's shape."""
        return tuple(x.clone() for _ in range(num_copies))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The sum of the copies' gradients."""
        return add(grads)


class RoundedShards(Mapping[str, Shards]):
    """Sharded weights, rounded at each access, so each use has its own gradient."""

    def __init__(self, weights: Mapping[str, Shards], run: RunSpec) -> None:
        self._weights, self._run = weights, run

    def __getitem__(self, name: str) -> Shards:
        """The shards, rounded to the type of the run."""
        if self._run.weight_dtype == self._run.dtype:
            return self._weights[name]
        return [shard.astype(self._run.dtype) for shard in self._weights[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
