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
from typing import TypeAlias

from pipeproof.stages.common.ops import Ops, Tensor

_Earlier: TypeAlias = tuple[list[Tensor], list[Tensor]]
"""Keys and values that the pieces so far have left to be read."""

_SEQUENCE = 2
"""Of keys and values [B, K, S, D]: B rows, K heads of keys and values of this rank, S positions, D head size."""


class EarlierPieces:
    """What one stage keeps of the pieces of each sequence until the last of them has been forward.

    With ``comes_again`` every piece is joined once forward and once more on its way back: what the first time read and
    left for later pieces is kept for the second.
    """

    def __init__(self, ops: Ops, num_pieces: int, *, comes_again: bool = False) -> None:
        self._ops, self._num_pieces, self._comes_again = ops, num_pieces, comes_again
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
            key, value = self._read_later(key, left[0]), self._read_later(value, left[1])
            if not is_again:
                self._kept[sequence] = [*earlier[0], left[0].read], [*earlier[1], left[1].read]
        each = zip(earlier, (key, value), strict=True)
        return [self._ops.concat([*before, own], _SEQUENCE) for before, own in each]

    def _read_later(self, own: Tensor, gradients: _Gradients) -> Tensor:
        """A tensor for its own piece; ``gradients`` gets the one that later pieces read, unless it has it already.

        Its gradient is what later pieces left, and what comes back here, in this order.
        """

        def backward(gradient: Tensor) -> tuple[Tensor]:
            left = gradients.read.grad
            return (self._ops.alias(gradient) if left is None else left + gradient,)

        (seen,) = self._ops.passed(lambda x: (self._ops.alias(x),), backward, own)
        if gradients.read is None:
            gradients.read = self._ops.leaf(seen)
        return seen


@dataclass(slots=True)
class _Gradients:
    """Where the backwards of later pieces leave the gradient of what they read."""

    read: Tensor = None
    """The leaf that they read; None until there is one."""
