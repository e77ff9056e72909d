"""Query, key and value of a block from one product, with positions: one function for autograd, few passes over memory.

Its bits are those of ``rotate`` on slices under plain autograd, which also rolls, joins three gradients and lays them
out anew. What is saved is traffic: on a GPU all of this is limited by memory.

Shape letters: B rows, K heads of keys and values, G query heads of each, S sequence, D head size.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor

_OF_GROUP = 2
"""Of heads [B, K, G + 2, S, D], the dim of queries, then the key, then the value."""


def turned_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, K, G + 2, S, D] to query [B, K, G, S, D], key and value [B, K, S, D]; tables [S, D] as of ``rotary_tables``.

    Values are copied. Gradients come back as ``heads`` lies in memory.
    """
    query, key, value = _Turned.apply(heads, cos, sin)
    return query, key, value


class _Turned(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.like = torch.empty_like(heads, device="meta")
        num_turned = heads.shape[_OF_GROUP] - 1
        turned = heads.narrow(_OF_GROUP, 0, num_turned)
        made = turned * cos
        half = cos.shape[-1] // 2
        swapped = torch.empty_like(made)
        torch.mul(turned[..., half:], sin[:, :half], out=swapped[..., :half])
        torch.mul(turned[..., :half], sin[:, half:], out=swapped[..., half:])
        made.add_(swapped)
        query, key = made.split([num_turned - 1, 1], dim=_OF_GROUP)
        # Copied: a part of ``heads`` would keep all of it for backward.
        value = heads.select(_OF_GROUP, num_turned).clone(memory_format=torch.contiguous_format)
        return query, key.squeeze(_OF_GROUP), value

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor, of_value: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        given = torch.cat([of_query, of_key.unsqueeze(_OF_GROUP)], dim=_OF_GROUP)
        made = torch.empty_like(ctx.like, device=given.device)
        turned = made.narrow(_OF_GROUP, 0, given.shape[_OF_GROUP])
        torch.mul(given, cos, out=turned)
        half = cos.shape[-1] // 2
        swapped = torch.empty_like(given)
        torch.mul(given[..., half:], sin[:, half:], out=swapped[..., :half])
        torch.mul(given[..., :half], sin[:, :half], out=swapped[..., half:])
        turned.add_(swapped)
        made.select(_OF_GROUP, given.shape[_OF_GROUP]).copy_(of_value)
        return made, None, None
