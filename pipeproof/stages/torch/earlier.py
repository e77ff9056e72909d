"""Attention of a piece of a sequence: it also sees the keys and values of the pieces before it.

Forwards take the pieces of a sequence from the first to the last, backwards
from the last to the first (Seq1F1B, arXiv:2406.03488). A later piece reads
copies of a piece's keys and values that begin a graph of their own; its
backward leaves their gradients there, and the piece's own backward takes them
along. What is computed again on the way back reads, and is read by, the same
copies as the first time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor

_Earlier: TypeAlias = tuple[list[Tensor], list[Tensor]]
"""Keys and values that the pieces so far have left to be read."""

_SEQUENCE = 2
"""Of keys and values [B, K, S, D]: B rows, K heads of keys and values of this rank, S positions, D head size."""


class EarlierPieces:
    """What one stage keeps of the pieces of each sequence until the last of them has been forward.

    With ``comes_again`` every piece is joined once forward and once more on its way back: what the first time read and
    left for later pieces is kept for the second.
    """

    def __init__(self, num_pieces: int, *, comes_again: bool = False) -> None:
        self._num_pieces, self._comes_again = num_pieces, comes_again
        self._kept: dict[tuple[int, str], _Earlier] = {}
        self._joined: dict[tuple[int, str, int], tuple[_Earlier, tuple[_Gradients, _Gradients]]] = {}

    def join(self, key: Tensor, value: Tensor, *, micro_batch: int, layer: str, piece: int) -> list[Tensor]:
        """Keys, and values, of all pieces up to this one: two of [B, K, S of a piece, D] to two of [B, K, S, D]."""
        if self._num_pieces == 1:
            return [key, value]
        sequence, place = (micro_batch, layer), (micro_batch, layer, piece)
        is_again = place in self._joined
        if is_again:
            earlier, left = self._joined.pop(place)
        else:
            earlier, left = self._kept.pop(sequence, ([], [])), (_Gradients(), _Gradients())
            if self._comes_again:
                self._joined[place] = earlier, left
        if piece < self._num_pieces - 1:
            key, value = _read_later(key, left[0]), _read_later(value, left[1])
            if not is_again:
                self._kept[sequence] = [*earlier[0], left[0].read], [*earlier[1], left[1].read]
        return [torch.cat([*before, own], dim=_SEQUENCE) for before, own in zip(earlier, (key, value), strict=True)]


def _read_later(own: Tensor, gradients: _Gradients) -> Tensor:
    """A tensor for its own piece; ``gradients`` gets the one that later pieces read, unless it has it already."""
    seen = _ReadLater.apply(own, gradients)
    if gradients.read is None:
        gradients.read = seen.detach()
        gradients.read.requires_grad_()
    return seen


@dataclass(slots=True)
class _Gradients:
    """Where the backwards of later pieces leave the gradient of what they read."""

    read: Tensor | None = None


class _ReadLater(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """The tensor itself; its gradient is what later pieces left, and what comes back here, in this order."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, gradients: _Gradients) -> Tensor:
        ctx.gradients = gradients
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        read = ctx.gradients.read
        return gradient if read.grad is None else read.grad + gradient, None
