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

Costs per token between layers, with fused kernels (arXiv:2512.24880, section 4.3.1): one pass reads the streams for a
sub-layer; one mixes them and adds the sub-layer's output; Sinkhorn-Knopp stays on the chip and backward recomputes it.
As in ``op_work`` and ``activation_memory``, each operand and each result counts once. Shape letters of the costs: n
streams, H hidden, g = n^2 + 2 n numbers that gate and mix them, t iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeproof.specs.axis_layout import INVARIANT
from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.layers import Parameter, is_block

ENDS = ("weight", "scale", "bias")
"""The ends of the names of a sub-layer's stream weights."""

_STREAMS = "_streams"

INITIAL_SCALE = 0.01
"""Initial value of the scales a (arXiv:2512.24880, table 5)."""


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


def stream_weights(model: ModelSpec, sub_layer: str, partial_over: tuple[str, ...]) -> list[Parameter]:
    """The three stream weights of the sub-layer ``sub_layer`` (``layer.0.attn_streams``), if there are streams."""
    spec = model.hyper_connections
    if spec is None:
        return []
    inner = spec.streams * model.hidden_size
    return [  # in the order of ``ENDS``
        Parameter(f"{sub_layer}.weight", (inner, spec.num_gates), INVARIANT, partial_over, init_std=0.02),
        Parameter(f"{sub_layer}.scale", (3,), INVARIANT, partial_over, init_value=INITIAL_SCALE),
        Parameter(f"{sub_layer}.bias", (spec.num_gates,), INVARIANT, partial_over, init_std=1.0),
    ]


def measured_with(name: str) -> tuple[str, ...]:
    """Other weights whose largest gradient element is also the unit for differences of the named gradient.

    A scale or a bias has few elements. Each is a sum over all tokens of addends with both signs, which sometimes nearly
    cancel, so these elements alone are not a good unit.
    """
    prefix, _, end = name.rpartition(".")
    return tuple(f"{prefix}.{other}" for other in ENDS if other != end) if prefix.endswith(_STREAMS) else ()


Cost = tuple[int, int]
"""(FLOPs, elements read or written) for each element."""

_NORM, _NORM_BACK, _SIGMOID, _SIGMOID_BACK = 4, 8, 4, 3
_NORMALIZE, _NORMALIZE_BACK = 3, 4
"""FLOPs per element. Sinkhorn, per column or row pass: an exponential and two additions; backward also a product."""


@dataclass(frozen=True, slots=True)
class StreamProduct:
    """A product of each token with a weight of [inner, columns]."""

    name: str
    inner: int
    columns: int


@dataclass(frozen=True, slots=True)
class StreamPass:
    """An elementwise pass over ``numel`` elements of a token: costs of forward, input gradient and weight gradient."""

    name: str
    numel: int
    forward: Cost
    backward: Cost
    weight: Cost = (0, 0)


def work_around(streams: BlockStreams, hidden: int, sub_layer: str) -> tuple[StreamProduct | StreamPass, ...]:
    """The operations before and after the sub-layer ``sub_layer``, in place of a residual addition."""
    n, gates = streams.count, streams.num_gates
    passes = 2 * streams.iterations
    sinkhorn = passes * _NORMALIZE + 1
    return (
        StreamPass(f"{sub_layer}.streams.norm", n * hidden, (_NORM, 2), (_NORM_BACK, 3)),
        StreamProduct(f"{sub_layer}.streams.gates", n * hidden, gates),
        StreamPass(f"{sub_layer}.streams.scale", gates, (2 + _SIGMOID, 2), (1 + _SIGMOID_BACK, 3), (3, 2)),
        StreamPass(f"{sub_layer}.streams.sinkhorn", n * n, (sinkhorn, 2), (sinkhorn + passes * _NORMALIZE_BACK, 3)),
        # Backward: gradients of streams and gates, and the sum of the gradients of the streams' three readers.
        StreamPass(f"{sub_layer}.streams.read", hidden, (2 * n, n + 1), (2 * n + 3 * n, 4 * n + 1)),
        StreamPass(f"{sub_layer}.streams.mix", hidden, (2 * n * (n + 1), 2 * n + 1), (4 * n * (n + 1), 3 * n + 2)),
    )


def work_at_ends(streams: BlockStreams, hidden: int) -> tuple[StreamPass, ...]:
    """Operations that make the streams, in the first block, and that add them up, in the last block."""
    n = streams.count
    opened = StreamPass("streams.open", hidden, (0, n + 1), (n - 1, n + 1))
    closed = StreamPass("streams.close", hidden, (n - 1, n + 1), (0, n + 1))
    return (*([opened] if streams.expands else []), *([closed] if streams.contracts else []))


@dataclass(frozen=True, slots=True)
class StoredStream:
    """``numel`` elements of a token, stored to the end of I, or to the end of W, or only between them."""

    name: str
    lifetime: Literal["TO_INPUT", "TO_WEIGHT", "BETWEEN"]
    numel: int
    is_float32: bool = False


def stored_around(streams: BlockStreams, hidden: int, sub_layer: str) -> tuple[StoredStream, ...]:
    """Activations stored for the streams around the sub-layer ``sub_layer``; the streams themselves come first."""
    n, gates = streams.count, streams.num_gates
    return (
        StoredStream(f"{sub_layer}.streams", "TO_INPUT", n * hidden),
        StoredStream(f"{sub_layer}.streams.factor", "TO_INPUT", 1, is_float32=True),
        StoredStream(f"{sub_layer}.streams.gates", "TO_WEIGHT", n * hidden),  # the norm's result
        StoredStream(f"{sub_layer}.streams.gates.grad", "BETWEEN", gates),
        StoredStream(f"{sub_layer}.streams.scale", "TO_WEIGHT", gates),
        StoredStream(f"{sub_layer}.streams.scale.grad", "BETWEEN", gates),
        StoredStream(f"{sub_layer}.streams.sinkhorn", "TO_INPUT", n * n),
        StoredStream(f"{sub_layer}.streams.mix", "TO_INPUT", gates + hidden),  # the gates, and the sub-layer's output
    )
