"""Hyper-connections: n residual streams between blocks in place of one.

Manifold-constrained hyper-connections (mHC, arXiv:2512.24880, equations 3, 7,
8 and 9, after arXiv:2409.19606). Around each sub-layer F of a block, attention
and MLP with their norms, stand for each token with its streams x, [n, H]:

    r        = vec(x) / sqrt(mean(vec(x)^2) + eps)           [n H], RMSNorm; its weight is absorbed by the next one
    pre      = sigmoid(a_0 (r W_pre) + b_pre)                [n]
    post     = 2 sigmoid(a_1 (r W_post) + b_post)            [n]
    res      = Sinkhorn-Knopp(a_2 mat(r W_res) + b_res)      [n, n]
    x'       = res x + post^T F(pre x)                       [n, H]

Sinkhorn-Knopp takes the exponential, and then t times divides each column by
its sum, and each row by its own. ``res`` has rows that sum to one up to
rounding, and columns that come close to it: with r the largest less the
smallest of the n^2 numbers, a column's sum is at most exp(r k^(2t-1)) - 1 off,
k = tanh(r / 2) (from the first sums of rows on, each half of an iteration
contracts Hilbert's metric by k: Birkhoff's theorem; Franklin and Lorenz, Linear
Algebra Appl. 114/115, 1989).

Each sub-layer has three weights: W = [W_pre | W_post | W_res], [n H, n^2 + 2 n]
(``attn_streams.weight``), the three a (``.scale``), and b, [n^2 + 2 n]
(``.bias``). The a start as 0.01, as in the paper; W and b are drawn as other
weights are. Over TP all ranks hold them whole and use them on what lies between
layers: without sequence parallelism every rank computes the same streams, with
it each its own tokens.

The first block makes n equal streams of what it is given, and the last one
gives their sum, in the order of the streams: so an activation is n times as
wide just between blocks, and embedding, norm and head stay as they are. Streams
of a token stand one after the other: [S, B, n H], or [B, S, n H].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeproof.specs.layout import INVARIANT
from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.layers import Parameter, is_block

ENDS = ("weight", "scale", "bias")
"""The ends of the names of a sub-layer's weights."""

_STREAMS = "_streams"

INITIAL_SCALE = 0.01
"""Of what the streams say of their own mixing (arXiv:2512.24880, table 5)."""


@dataclass(frozen=True, slots=True)
class BlockStreams:
    """The streams of one block: their number, and whether the block makes them of one, or one of them."""

    count: int
    iterations: int
    expands: bool
    contracts: bool

    @property
    def num_gates(self) -> int:
        """Numbers of a token that say how its streams are read, written and mixed."""
        return self.count * (self.count + 2)


def streams_of(model: ModelSpec, layer: str) -> BlockStreams | None:
    """The streams of a block, by its name; None where there is one residual, and for layers that are no blocks."""
    spec = model.hyper_connections
    if spec is None or not is_block(layer):
        return None
    first, last = layer == "layer.0", layer == f"layer.{model.num_layers - 1}"
    return BlockStreams(spec.streams, spec.sinkhorn_iterations, first, last)


def width_after(model: ModelSpec, names: Sequence[str]) -> int:
    """Elements of a token that the last of the layers ``names`` gives, the model's first ones in any order."""
    num_blocks = sum(map(is_block, names))
    between_blocks = model.hyper_connections is not None and 0 < num_blocks < model.num_layers
    return model.hidden_size * (model.num_streams if between_blocks else 1)


def stream_weights(model: ModelSpec, at: str, partial_over: tuple[str, ...]) -> list[Parameter]:
    """The three weights of the sub-layer ``at`` (``layer.0.attn_streams``); none where there is one residual."""
    spec = model.hyper_connections
    if spec is None:
        return []
    inner = spec.streams * model.hidden_size
    return [  # in the order of ``ENDS``
        Parameter(f"{at}.weight", (inner, spec.num_gates), INVARIANT, partial_over, init_std=0.02),
        Parameter(f"{at}.scale", (3,), INVARIANT, partial_over, init_value=INITIAL_SCALE),
        Parameter(f"{at}.bias", (spec.num_gates,), INVARIANT, partial_over, init_std=1.0),
    ]


def measured_with(name: str) -> tuple[str, ...]:
    """The weights whose gradients' largest element a difference of the named gradient is measured in, beside its own.

    A scale or a bias has few elements, each a sum over all tokens of addends of
    either sign, which every now and then cancel to a small part of what they
    are: alone they are no measure.
    """
    at, _, end = name.rpartition(".")
    return tuple(f"{at}.{other}" for other in ENDS if other != end) if at.endswith(_STREAMS) else ()
