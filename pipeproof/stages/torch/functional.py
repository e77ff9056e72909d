"""The model's arithmetic without parameters or communication.

Shape letters: S sequence, B rows, K heads of keys and values of this rank, G query heads of each, D head size,
Z that of values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

Tensor: TypeAlias = torch.Tensor

RMS_NORM_EPSILON = 1e-6
ROTARY_BASE = 10000.0
CLAMPED_SWIGLU_ALPHA = 1.702


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type of losses, and of what is too fine for 16 bits: float32 in place of such types."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def rms_norm(activation: Tensor) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dim (arXiv:1910.07467), without a weight."""
    return F.rms_norm(activation, (activation.shape[-1],), None, RMS_NORM_EPSILON)


def rotary_tables(seq_length: int, head_size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (arXiv:2104.09864), [S, D] each.

    Position p turns the pair (i, i + D/2) by p * 10000^(-2i/D). Computed in
    float64 and then rounded; the sines are signed for ``rotate``.
    """
    frequencies = ROTARY_BASE ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.outer(np.arange(seq_length), frequencies)
    cos, sin = np.tile(np.cos(angles), 2), np.concatenate([-np.sin(angles), np.sin(angles)], axis=1)
    return torch.tensor(cos, dtype=dtype, device=device), torch.tensor(sin, dtype=dtype, device=device)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``(a cos - b sin, b cos + a sin)`` for the halves ``(a, b)`` of each head; heads are [.., S, D]."""
    return heads * cos + heads.roll(heads.shape[-1] // 2, -1) * sin


def causal_attention(query: Tensor, key: Tensor, value: Tensor, factors: Tensor | None = None) -> Tensor:
    """Softmax attention in which a position sees itself and what is before it: [B, K, G, S, Z].

    ``query`` is [B, K, G, S, D], ``key`` [B, K, S, D] and ``value`` [B, K, S, Z]. Where there are more keys than
    queries, the queries are the last positions. PyTorch chooses the kernel: flash attention (arXiv:2205.14135) on
    GPUs for 16-bit types. ``factors`` [B, K, G, S, keys], those of dropout, multiply the probabilities, which are
    then computed one by one.
    """
    rows, num_kv_heads, group, num_queries, head_size = query.shape
    num_keys = key.shape[-2]
    if factors is not None:
        return _dropped_attention(query, key, value, factors)
    heads = query.reshape(rows, num_kv_heads * group, num_queries, head_size)
    mask = None if num_keys == num_queries else _seen(num_queries, num_keys, query.device)
    mixed = F.scaled_dot_product_attention(
        heads, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=group > 1
    )
    return mixed.reshape(rows, num_kv_heads, group, num_queries, -1)


def _dropped_attention(query: Tensor, key: Tensor, value: Tensor, factors: Tensor) -> Tensor:
    scores = torch.matmul(query, key.unsqueeze(2).transpose(-2, -1)) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~_seen(query.shape[-2], key.shape[-2], query.device), -torch.inf)
    return torch.matmul(scores.softmax(-1) * factors, value.unsqueeze(2))


def _seen(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Which keys [num_queries, num_keys] each of the last positions sees."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (arXiv:2002.05202); backward keeps these two alone, and computes the rest once more."""
    return _SwiGlu.apply(gate, up)


class _SwiGlu(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """With the bits of plain autograd, which would keep ``silu(gate)``, too: a sixth of what a block keeps."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_up = F.silu(gate).mul_(gradient)
        return torch.ops.aten.silu_backward(gradient * up, gate), of_up


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """``g sigmoid(1.702 g) (u + 1)`` with g = min(gate, limit) and u = up, at least -limit and at most limit.

    That of gpt-oss (openai/gpt-oss, ``gpt_oss/torch/model.py``). The gradient is zero beyond a limit, and at
    one still that of the side inside.
    """
    g, u = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return g * F.sigmoid(CLAMPED_SWIGLU_ALPHA * g) * (u + 1.0)


def gated(limit: float | None) -> Callable[[Tensor, Tensor], Tensor]:
    """The function of gate and up that a model of this ``swiglu_limit`` has."""
    return swiglu if limit is None else partial(clamped_swiglu, limit=limit)


def fork(activation: Tensor, num_readers: int) -> list[Tensor]:
    """One tensor for each reader; their gradients are added in the order of the readers."""
    return list(_Fork.apply(activation, num_readers))


class _Fork(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, activation: Tensor, num_readers: int) -> tuple[Tensor, ...]:
        return tuple(activation.view_as(activation) for _ in range(num_readers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        total, *others = gradients
        for other in others:
            total = total + other
        return total, None
