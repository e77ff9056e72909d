"""Tensors of the ordered reference in pieces, as tensor-parallel ranks hold them, and sums in a given order."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import paddle
from paddle.autograd import PyLayer

Tensor: TypeAlias = paddle.Tensor
_Addend = TypeVar("_Addend")
Pieces = list[Tensor]
"""A tensor cut in T, or copies of it, in piece order; one entry where it is whole."""

_CUT_DIM: Mapping[str, int | None] = {
    "q_down.weight": None,
    "kv_down.weight": None,
    "q_up.weight": 1,
    "kv_up.weight": 1,
    "attn.q.weight": 1,
    "embed.weight": 0,
    "qkv.weight": 1,
    "experts.gate.weight": 2,
    "experts.up.weight": 2,
    "experts.down.weight": 1,
    "out.weight": 0,
    "gate.weight": 1,
    "up.weight": 1,
    "down.weight": 0,
    "head.weight": 1,
}
"""By the end of a weight's name, the first that fits, the dim that its pieces cut; what fits none is not cut."""


def cut_dim(name: str) -> int | None:
    """The dim that the pieces of the named weight cut, None where they are copies."""
    return next((dim for ending, dim in _CUT_DIM.items() if name.endswith(ending)), None)


def is_of_experts(name: str) -> bool:
    """Whether the named weight is one of routed experts, which every expert-parallel rank's tokens reach."""
    return ".experts." in name


def leaf(weight: Tensor) -> Tensor:
    """The same values as a leaf of its own."""
    own = weight.detach()
    own.stop_gradient = False
    return own


def add(addends: Sequence[_Addend]) -> _Addend:
    """((a0 + a1) + a2) + .."""
    return functools.reduce(operator.add, addends)


def add_pieces(sums: Sequence[Pieces]) -> Pieces:
    """``add``, piece by piece."""
    return [add(pieces) for pieces in zip(*sums, strict=True)]


def products(inputs: Pieces, weights: Pieces, *, transposed: bool = False) -> Pieces:
    """Matrix products, piece by piece, with the weights or their transposes."""
    return [paddle.matmul(x, weight, transpose_y=transposed) for x, weight in zip(inputs, weights, strict=True)]


class Copies(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """Copies of a tensor for several readers; their gradients are added in the order of the copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_copies: int) -> tuple[Tensor, ...]:
        """``num_copies`` tensors of x's shape."""
        return tuple(x.clone() for _ in range(num_copies))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The sum of the copies' gradients."""
        return add(grads)
