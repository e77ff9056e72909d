"""Hyper-connections for the references: several residual streams of each token (arXiv:2512.24880).

Streams of a token stand one after the other in the last dim, n H. Their
gradient adds those of what reads them in this order: the gates, the sub-layer,
the mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import paddle

from pipeproof.specs.hyper_connections import HyperConnectionsSpec
from pipeproof.stages.reference.pieces import Copies, add

Tensor: TypeAlias = paddle.Tensor
Behind: TypeAlias = Callable[[Tensor], Tensor]
"""What stands behind a sub-layer, from what it made."""

WEIGHTS = ("weight", "scale", "bias")
"""The ends of the names of a sub-layer's weights, as ``read`` takes them."""


def widened(x: Tensor, spec: HyperConnectionsSpec) -> Tensor:
    """The first block's streams: copies, whose gradients are added in their order."""
    return paddle.concat(list(Copies.apply(x, spec.streams)), axis=-1)


def summed(x: Tensor, spec: HyperConnectionsSpec) -> Tensor:
    """What the last block gives: the first stream, and the others added to it in turn."""
    return add(x.split(spec.streams, axis=-1))


def read(x: Tensor, weights: Sequence[Tensor], spec: HyperConnectionsSpec) -> tuple[Tensor, Behind]:
    """What a sub-layer takes of the streams, and how they go on behind it."""
    n = spec.streams
    weight, scale, bias = weights
    for_gates, for_layer, for_mixture = Copies.apply(x, 3)
    each = [*x.shape[:-1], n, x.shape[-1] // n]
    a = paddle.assign(for_gates)
    normed = a * paddle.rsqrt(paddle.square(a).mean(axis=-1, keepdim=True) + 1e-6)
    parts = [n, n, n * n]
    numbers = [
        part * factor + shift
        for part, factor, shift in zip(
            paddle.matmul(normed, weight).split(parts, axis=-1), scale.split(3), bias.split(parts), strict=True
        )
    ]
    pre, post = paddle.nn.functional.sigmoid(numbers[0]), paddle.nn.functional.sigmoid(numbers[1]) * 2.0
    matrix = numbers[2].reshape([*x.shape[:-1], n, n])
    for _ in range(spec.sinkhorn_iterations):
        matrix = matrix - matrix.logsumexp(axis=-2, keepdim=True)  # columns add up to one
        matrix = matrix - matrix.logsumexp(axis=-1, keepdim=True)  # rows do
    mixture = paddle.matmul(matrix.exp(), for_mixture.reshape(each))
    taken = paddle.matmul(pre.unsqueeze(-2), for_layer.reshape(each)).squeeze(-2)

    def behind(made: Tensor) -> Tensor:
        written = post.unsqueeze(-1) * made.unsqueeze(-2)
        return mixture.reshape(x.shape) + written.reshape(x.shape)

    return taken, behind
