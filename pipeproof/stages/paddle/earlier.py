"""Attention of a piece of a sequence: it also sees the keys and values of the pieces before it.

Forwards take the pieces of a sequence from the first to the last, backwards
from the last to the first (Seq1F1B, arXiv:2406.03488). A later piece reads
copies of a piece's keys and values that begin a graph of their own; its
backward leaves their gradients there, and the piece's own backward takes them
along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import paddle
from paddle.autograd import PyLayer

Tensor: TypeAlias = paddle.Tensor

_SEQUENCE = 2
"""Of keys and values [B, K, S, D]: B rows, K heads of keys and values of this rank, S positions, D head size."""


class EarlierPieces:
    """What one stage keeps of the pieces of each sequence until the last of them has been forward."""

    def __init__(self, num_pieces: int) -> None:
        self._num_pieces = num_pieces
        self._kept: dict[tuple[int, str], tuple[list[Tensor], list[Tensor]]] = {}

    def join(self, key: Tensor, value: Tensor, *, micro_batch: int, layer: str, piece: int) -> list[Tensor]:
        """Keys, and values, of all pieces up to this one: two of [B, K, S of a piece, D] to two of [B, K, S, D]."""
        if self._num_pieces == 1:
            return [key, value]
        earlier = self._kept.pop((micro_batch, layer), ([], []))
        if piece < self._num_pieces - 1:
            (key, later_key), (value, later_value) = map(_read_later, (key, value))
            self._kept[micro_batch, layer] = [*earlier[0], later_key], [*earlier[1], later_value]
        return [
            paddle.concat([*before, own], axis=_SEQUENCE) for before, own in zip(earlier, (key, value), strict=True)
        ]


def _read_later(own: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor for its own piece, and the one that later pieces read."""
    gradients = _Gradients()
    seen = _ReadLater.apply(own, gradients)
    gradients.read = seen.detach()
    gradients.read.stop_gradient = False
    return seen, gradients.read


@dataclass(slots=True)
class _Gradients:
    """Where the backwards of later pieces leave the gradient of what they read."""

    read: Tensor | None = None


class _ReadLater(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """The tensor itself; its gradient is what later pieces left, and what comes back here, in this order."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, gradients: _Gradients) -> Tensor:
        ctx.gradients = gradients
        return own.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        read = ctx.gradients.read
        return gradient.clone() if read.grad is None else read.grad + gradient
