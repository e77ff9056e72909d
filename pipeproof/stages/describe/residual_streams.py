"""Hyper-connections: n residual streams between blocks in place of one.

Manifold-constrained hyper-connections (mHC, arXiv:2512.24880, equations 3, 7, 8 and 9, after arXiv:2409.19606). For
each sub-layer F of a block (attention and MLP with their norms) and each token with its streams x, [n, H]:

    r        = vec(x) / sqrt(mean(vec(x)^2) + eps)           [n H], RMSNorm; its weight is absorbed by the next one
    pre      = sigmoid(a_0 (r W_pre) + b_pre)                [n]
    post     = 2 sigmoid(a_1 (r W_post) + b_post)            [n]
    res      = Sinkhorn-Knopp(a_2 mat(r W_res) + b_res)      [n, n]
    x'       = res x + post^T F(pre x)                       [n, H]

Sinkhorn-Knopp takes the exponential, then t times divides each column by its sum and each row by its sum. The rows of
``res`` sum to one up to rounding, and the columns nearly so: if r is the largest less the smallest of the n^2 numbers,
a column's sum differs from one by at most exp(r k^(2t-1)) - 1, k = tanh(r / 2) (from the first row sums on, each half
of an iteration contracts Hilbert's metric by k: Birkhoff's theorem; Franklin and Lorenz, Linear Algebra Appl. 114/115,
1989).

Each sub-layer has three weights: W = [W_pre | W_post | W_res], [n H, n^2 + 2 n] (``attn_streams.weight``), the three a
(``.scale``), and b, [n^2 + 2 n] (``.bias``). The a start as 0.01, as in the paper; W and b are drawn like other
weights. All TP ranks hold them whole and use them on activations between layers: without sequence parallelism every
rank computes the same streams, with it each rank its own tokens.

The first block copies its input into n equal streams, and the last block returns their sum, in the order of the
streams. So an activation is n times as wide only between blocks; embedding, norm and head do not change. The streams
of a token are consecutive: [S, B, n H], or [B, S, n H].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.layer import is_block

ENDS = ("weight", "scale", "bias")
"""The ends of the names of a sub-layer's stream weights."""


@dataclass(frozen=True, slots=True)
class BlockStreams:
    """The residual streams of one block. ``expands`` is true for the first block, ``contracts`` for the last."""

    count: int
    iterations: int
    expands: bool
    contracts: bool

    @property
    def num_gates(self) -> int:
        """Numbers per token that gate the reading, writing and mixing of its streams."""
        return self.count * (self.count + 2)


def residual_streams_of(model: ModelSpec, layer: str) -> BlockStreams | None:
    """The streams of a block by its name; None for a single residual, and for layers that are not blocks."""
    spec = model.hyper_connections
    if spec is None or not is_block(layer):
        return None
    first, last = layer == "layer.0", layer == f"layer.{model.num_layers - 1}"
    return BlockStreams(spec.streams, spec.sinkhorn_iterations, first, last)


def width_after(model: ModelSpec, names: Sequence[str]) -> int:
    """Elements per token of the activation after ``names``, the model's first layers in any order."""
    num_blocks = sum(map(is_block, names))
    between_blocks = model.hyper_connections is not None and 0 < num_blocks < model.num_layers
    return model.hidden_size * (model.num_streams if between_blocks else 1)
