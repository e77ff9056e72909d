"""What an MLP of the references makes of its gate and its other factor."""

from __future__ import annotations

from typing import TypeAlias

import paddle
import paddle.nn.functional as F

Tensor: TypeAlias = paddle.Tensor


def gated(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """SwiGLU, or with a limit that of gpt-oss: both are clamped, and the gradient is zero beyond it."""
    if limit is None:
        return F.silu(gate) * up
    most = paddle.full_like(gate, limit)
    gate = paddle.where(gate <= most, gate, most)
    up = paddle.where(up <= most, paddle.where(up >= -most, up, -most), most)
    return gate * F.sigmoid(gate * 1.702) * (1.0 + up)
