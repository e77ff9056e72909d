"""Attention where context-parallel ranks share each sequence: all get all ranks' keys and values.

Rank k has the k-th part of every sequence, and its queries see the keys of
their own positions and of those before (arXiv:2407.21783, section 3.3.2).
Parts are contiguous and equally long, so the last rank has about twice the
mean work of causal attention: this is the plain cut, which balances nothing.

Shape letters: B rows, K heads of keys and values of this rank, n positions of a part, S of all parts, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import paddle
from paddle.autograd import PyLayer

Tensor: TypeAlias = paddle.Tensor

_SEQUENCE = 3
"""Of keys and values in one tensor, [2, B, K, n, D]."""


class ContextCollectives(Protocol):
    """Collectives over the context-parallel ranks of one stage, blocking, outside autograd, sums in rank order."""

    def all_gather(self, tensor: Tensor, dim: int, *, label: str, axis: str = ...) -> Tensor:
        """All ranks' tensors joined along ``dim`` in rank order."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int, *, label: str, axis: str = ...) -> Tensor:
        """This rank's part along ``dim`` of the sum over all ranks."""
        ...


class SharedKeys:
    """What takes the place of ``EarlierPieces`` where the pieces of a sequence are on different ranks."""

    def __init__(self, num_ranks: int, collectives: ContextCollectives) -> None:
        self.num_ranks, self.collectives = num_ranks, collectives

    def join(self, key: Tensor, value: Tensor, *, micro_batch: int, layer: str, piece: int) -> list[Tensor]:
        """Keys, and values, of all ranks up to this one, the ``piece``-th: two of [B, K, n, D] to [B, K, .., D].

        One collective each way, in which keys and values travel together; backward sums what all ranks' queries made
        of this rank's.
        """
        return list(_Share.apply(key, value, self, piece, f"{layer}.kv"))


class _Share(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, shared: SharedKeys, rank: int, label: str) -> tuple[Tensor, ...]:
        ctx.shared, ctx.rank, ctx.label = shared, rank, label
        whole = shared.collectives.all_gather(paddle.stack([key, value]), _SEQUENCE, label=label, axis="cp")
        seen = paddle.split(whole, shared.num_ranks, axis=_SEQUENCE)[: rank + 1]
        return tuple(paddle.unbind(paddle.concat(seen, axis=_SEQUENCE)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        seen = paddle.stack(list(gradients))
        part = list(seen.shape)
        part[_SEQUENCE] //= ctx.rank + 1
        unseen = [paddle.zeros(part, dtype=seen.dtype)] * (ctx.shared.num_ranks - ctx.rank - 1)
        whole = paddle.concat([seen, *unseen], axis=_SEQUENCE)
        label = f"{ctx.label}.grad"
        return tuple(paddle.unbind(ctx.shared.collectives.reduce_scatter(whole, _SEQUENCE, label=label, axis="cp")))
