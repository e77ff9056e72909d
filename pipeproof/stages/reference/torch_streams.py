"""Hyper-connections for the uncut PyTorch reference: several residual streams of each token (arXiv:2512.24880).

Streams of a token stand one after the other in the last dim, n H. Their
gradient adds those of what reads them in this order: the gates, the sub-layer,
the mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F

from pipeproof.specs.hyper_connections import HyperConnectionsSpec
from pipeproof.stages.reference.torch_weights import WholeWeights, copies

Tensor: TypeAlias = torch.Tensor
Behind: TypeAlias = Callable[[Tensor], Tensor]
"""What stands behind a sub-layer, from what it made."""


def widened(x: Tensor, spec: HyperConnectionsSpec) -> Tensor:
    """The first block's streams: copies, whose gradients are added in their order."""
    return torch.cat(copies(x, spec.streams), -1)


def summed(x: Tensor, spec: HyperConnectionsSpec) -> Tensor:
    """What the last block gives: the first stream, and the others added to it in turn."""
    parts = torch.chunk(x, spec.streams, -1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def read(x: Tensor, weights: WholeWeights, at: str, spec: HyperConnectionsSpec) -> tuple[Tensor, Behind]:
    """What the sub-layer ``at`` takes of the streams, and how they go on behind it."""
    n = spec.streams
    for_gates, for_layer, for_mixture = copies(x, 3)
    parts = [n, n, n * n]
    normed = F.rms_norm(for_gates, for_gates.shape[-1:], eps=1e-6)
    scale = weights.value(f"{at}_streams.scale")
    factors = torch.cat([scale[place].expand(size) for place, size in enumerate(parts)])
    numbers = weights.product(normed, f"{at}_streams.weight") * factors + weights.value(f"{at}_streams.bias")
    pre, post, mix = torch.split(numbers, parts, -1)
    matrix = mix.reshape(*x.shape[:-1], n, n)
    if matrix.dtype in (torch.bfloat16, torch.float16):
        matrix = matrix.float()
    for _ in range(spec.sinkhorn_iterations):
        matrix = matrix - torch.logsumexp(matrix, -2, keepdim=True)  # columns add up to one
        matrix = matrix - torch.logsumexp(matrix, -1, keepdim=True)  # rows do
    each = (*x.shape[:-1], n, x.shape[-1] // n)
    mixture = torch.matmul(torch.exp(matrix).to(x.dtype), for_mixture.reshape(each))
    taken = torch.matmul(torch.sigmoid(pre).unsqueeze(-2), for_layer.reshape(each)).squeeze(-2)

    def behind(made: Tensor) -> Tensor:
        written = (torch.sigmoid(post) * 2.0).unsqueeze(-1) * made.unsqueeze(-2)
        return mixture.reshape(x.shape) + written.reshape(x.shape)

    return taken, behind
