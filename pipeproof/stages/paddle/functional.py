"""The model's arithmetic without parameters or communication, on Paddle's own autograd.

If an activation feeds several operations, the order in which its gradients are added changes the bits. No tensor here
feeds more than two operations: a sum of two is the same in either order.

Shape letters: S sequence, B rows, K heads of keys and values of this rank, G query heads of each, D head size, Z head
size of values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.common.backend_ops import NORM_EPSILON, gated, rotary_angles

Tensor: TypeAlias = paddle.Tensor
Indices: TypeAlias = npt.NDArray[np.int64]


def rms_norm(activation: Tensor) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last dim (arXiv:1910.07467), before the weight."""
    x = paddle.assign(activation)  # a separate node: the caller's tensor feeds this norm once
    mean_square = paddle.mean(paddle.square(x), axis=-1, keepdim=True)
    return x * paddle.rsqrt(mean_square + NORM_EPSILON)


def rotary_tables(seq_length: int, head_size: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (arXiv:2104.09864), [S, D] each.

    Position p rotates the pair (i, i + D/2) by p * 10000^(-2i/D). The tables are computed in float64, then rounded.
    """
    angles = np.tile(rotary_angles(seq_length, head_size), 2)
    return paddle.to_tensor(np.cos(angles), dtype=dtype), paddle.to_tensor(np.sin(angles), dtype=dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x * cos + rotate_half(x) * sin`` with ``rotate_half((a, b)) = (-b, a)``; heads are [.., S, D]."""
    first, second = paddle.chunk(heads, 2, axis=-1)
    cos_first, cos_second = paddle.chunk(cos, 2, axis=-1)
    sin_first, sin_second = paddle.chunk(sin, 2, axis=-1)
    rotated = [first * cos_first - second * sin_first, second * cos_second + first * sin_second]
    return paddle.concat(rotated, axis=-1)


def rotated_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split [B, K, G + 2, S, D] into query [B, K, G, S, D], key and value [B, K, S, D]; rotate query and key."""
    query, key, value = paddle.split(heads, [heads.shape[2] - 2, 1, 1], axis=2)
    return rotate(query, cos, sin), rotate(key.squeeze(2), cos, sin), value.squeeze(2)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, factors: Tensor | None = None) -> Tensor:
    """Causal softmax attention, [B, K, G, S, Z]: a position sees itself and the positions before it.

    ``query`` is [B, K, G, S, D], ``key`` [B, K, S, D] and ``value`` [B, K, S, Z]. A group's queries are rows of one
    product with the head that they share (arXiv:2305.13245), so sums over a group are sums inside products. With more
    keys than queries, the queries are the last positions. The dropout ``factors`` [B, K, G, S, keys] multiply the
    probabilities.
    """
    rows, num_kv_heads, group, num_queries, head_size = query.shape
    num_keys = key.shape[-2]
    stacked = query.reshape([rows, num_kv_heads, group * num_queries, head_size])
    scores = paddle.matmul(stacked, key, transpose_y=True) * head_size**-0.5
    future = np.triu(np.full((num_queries, num_keys), -np.inf), k=1 + num_keys - num_queries)
    mask = paddle.to_tensor(np.tile(future, (group, 1)), dtype=scores.dtype)
    probabilities = F.softmax(scores + mask, axis=-1)
    if factors is not None:
        probabilities = probabilities * factors.reshape(probabilities.shape)
    return paddle.matmul(probabilities, value).reshape([*query.shape[:-1], -1])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (arXiv:2002.05202)."""
    return F.silu(gate) * up


def mlp_activation(model: ModelSpec) -> Callable[..., Tensor]:
    """The activation function of a model's MLPs: SwiGLU of gate and up, or GELU (arXiv:1606.08415) of up."""
    if model.mlp == "swiglu":
        return gated(swiglu, model, paddle.clip)
    return partial(F.gelu, approximate=model.mlp == "gelu_tanh")


def fork(activation: Tensor, num_readers: int) -> list[Tensor]:
    """Return one tensor for each reader. Their gradients are added in the order of the readers."""
    return list(_Fork.apply(activation, num_readers))


class _Fork(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, activation: Tensor, num_readers: int) -> tuple[Tensor, ...]:
        return tuple(activation.clone() for _ in range(num_readers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total = total + gradient
        return total
