"""Attention where context-parallel ranks share each sequence: all get all ranks' keys and values.

Rank k has the k-th part of every sequence, and its queries see the keys of
their own positions and of those before (arXiv:2407.21783, section 3.3.2).
Parts are contiguous and equally long, so the last rank has about twice the
mean work of causal attention: this is the plain cut, which balances nothing.

Shape letters: B rows, K heads of keys and values of this rank, n positions of a part, S of all parts, D head size.
"""

from __future__ import annotations

from typing import Protocol

from pipeproof.stages.common.ops import Ops, Tensor

_SEQUENCE = 3
"""Of keys and values in one tensor, [2, B, K, n, D]."""


class ContextCollectives(Protocol):
    """Collectives over the context-parallel ranks of one stage, outside autograd.

    With Paddle they block, and sums add in rank order.
    """

    def all_gather(self, tensor: Tensor, dim: int, *, label: str, axis: str = ...) -> Tensor:
        """All ranks' tensors joined along ``dim`` in rank order."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int, *, label: str, axis: str = ...) -> Tensor:
        """This rank's part along ``dim`` of the sum over all ranks."""
        ...


class SharedKeys:
    """What takes the place of ``EarlierPieces`` where the pieces of a sequence are on different ranks."""

    def __init__(self, ops: Ops, num_ranks: int, collectives: ContextCollectives) -> None:
        self._ops, self._num_ranks, self._collectives = ops, num_ranks, collectives

    def join(self, key: Tensor, value: Tensor, *, micro_batch: int, layer: str, piece: int) -> list[Tensor]:
        """Keys, and values, of all ranks up to this one, the ``piece``-th: two of [B, K, n, D] to [B, K, .., D].

        One collective each way, in which keys and values travel together; backward sums what all ranks' queries made
        of this rank's.
        """
        label = f"{layer}.kv"

        def forward(*own: Tensor) -> tuple[Tensor, ...]:
            whole = self._collectives.all_gather(self._ops.stack(own, 0), _SEQUENCE, label=label, axis="cp")
            seen = whole[:, :, :, : own[0].shape[_SEQUENCE - 1] * (piece + 1)]
            return seen[0].contiguous(), seen[1].contiguous()

        def backward(*gradients: Tensor) -> tuple[Tensor, ...]:
            seen = self._ops.stack(gradients, 0)
            num_unseen = self._num_ranks - piece - 1
            if num_unseen:
                part = self._ops.zeros_like(seen[:, :, :, : seen.shape[_SEQUENCE] // (piece + 1)])
                seen = self._ops.concat([seen, *[part] * num_unseen], _SEQUENCE)
            own = self._collectives.reduce_scatter(seen, _SEQUENCE, label=f"{label}.grad", axis="cp")
            return own[0], own[1]

        return list(self._ops.passed(forward, backward, key, value))
