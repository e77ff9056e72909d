"""Attention where context-parallel ranks share each sequence: all get all ranks' keys and values.

Rank k has the k-th part of every sequence, and its queries see the keys of
their own positions and of those before (arXiv:2407.21783, section 3.3.2).
Parts are contiguous and equally long, so the last rank has about twice the
mean work of causal attention: this is the plain cut, which balances nothing.

Shape letters: B rows, K heads of keys and values of this rank, n positions of a part, S of all parts, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor

_SEQUENCE = 3
"""Of keys and values in one tensor, [2, B, K, n, D]."""


class ContextCollectives(Protocol):
    """Collectives over the context-parallel ranks of one stage, outside autograd."""

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


class _Share(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, shared: SharedKeys, rank: int, label: str) -> tuple[Tensor, ...]:
        ctx.shared, ctx.rank, ctx.label = shared, rank, label
        whole = shared.collectives.all_gather(torch.stack([key, value]), _SEQUENCE, label=label, axis="cp")
        seen = whole.narrow(_SEQUENCE, 0, key.shape[_SEQUENCE - 1] * (rank + 1))
        return tuple(part.contiguous() for part in seen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        seen = torch.stack(gradients)
        part = list(seen.shape)
        part[_SEQUENCE] = part[_SEQUENCE] // (ctx.rank + 1) * (ctx.shared.num_ranks - ctx.rank - 1)
        whole = torch.cat([seen, seen.new_zeros(part)], dim=_SEQUENCE)
        own = ctx.shared.collectives.reduce_scatter(whole, _SEQUENCE, label=f"{ctx.label}.grad", axis="cp")
        return *own, None, None, None
