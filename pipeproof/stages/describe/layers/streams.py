"""Several residual streams around the sub-layers of a block (``residual_streams``).

Costs per token between layers, with fused kernels (arXiv:2512.24880, section 4.3.1): one pass reads the streams for a
sub-layer; one mixes them and adds the sub-layer's output; Sinkhorn-Knopp stays on the chip and backward recomputes it.
Each operand and each result counts once. Shape letters of the costs: n streams, H hidden, g = n^2 + 2 n numbers that
gate and mix them, t iterations.
"""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.layers import operations as ops
from pipeproof.stages.describe.residual_streams import BlockStreams

INITIAL_SCALE = 0.01
"""Initial value of the scales a (arXiv:2512.24880, table 5)."""

_SIGMOID, _SIGMOID_BACK = 4, 3
_NORMALIZE, _NORMALIZE_BACK = 3, 4
"""FLOPs per element. Sinkhorn, per column or row pass: an exponential and two additions; backward also a product."""


def read_streams(model: ModelSpec, streams: BlockStreams, name: str, *, is_first: bool) -> ops.Operations:
    """Weights and stored activations of the sub-layer ``name``; the streams themselves come first.

    The first block is computed again from the single stream that it expands.
    """
    n, hidden, gates = streams.count, model.hidden_size, streams.num_gates
    weight = ops.Weight(f"{name}_streams.weight", (n * hidden, gates))
    scale = ops.Weight(f"{name}_streams.scale", (3,), init_std=None, init_value=INITIAL_SCALE)
    bias = ops.Weight(f"{name}_streams.bias", (gates,), init_std=1.0)
    expanded = ops.Stored("streams.open", "TO_INPUT", hidden, is_input=True, if_recomputed=True)
    return (
        ops.StreamWeights(f"{name}_streams", (weight, scale, bias)),
        *((expanded,) if is_first and streams.expands else ()),
        ops.Stored(f"{name}.streams", "TO_INPUT", n * hidden, is_input=is_first and not streams.expands),
        ops.Stored(f"{name}.streams.factor", "TO_INPUT", 1, is_float32=True),
        ops.Stored(f"{name}.streams.gates", "TO_WEIGHT", n * hidden),  # the norm's result
        ops.Stored(f"{name}.streams.gates.grad", "BETWEEN", gates),
        ops.Stored(f"{name}.streams.scale", "TO_WEIGHT", gates),
        ops.Stored(f"{name}.streams.scale.grad", "BETWEEN", gates),
        ops.Stored(f"{name}.streams.sinkhorn", "TO_INPUT", n * n),
        ops.Stored(f"{name}.streams.mix", "TO_INPUT", gates + hidden),  # the gates, and the sub-layer's output
    )


def write_streams(model: ModelSpec, streams: BlockStreams, name: str) -> ops.Operations:
    """The work before and after the sub-layer ``name``, in place of a residual addition."""
    n, hidden, gates = streams.count, model.hidden_size, streams.num_gates
    passes = 2 * streams.iterations
    sinkhorn, sinkhorn_back = passes * _NORMALIZE + 1, passes * (_NORMALIZE + _NORMALIZE_BACK) + 1
    return (
        _pass(f"{name}.streams.norm", n * hidden, (4, 2), (8, 3)),
        ops.StreamProduct(f"{name}.streams.gates", n * hidden, gates),
        _pass(f"{name}.streams.scale", gates, (2 + _SIGMOID, 2), (1 + _SIGMOID_BACK, 3), (3, 2)),
        _pass(f"{name}.streams.sinkhorn", n * n, (sinkhorn, 2), (sinkhorn_back, 3)),
        # Backward: gradients of streams and gates, and the sum of the gradients of the streams' three readers.
        _pass(f"{name}.streams.read", hidden, (2 * n, n + 1), (2 * n + 3 * n, 4 * n + 1)),
        _pass(f"{name}.streams.mix", hidden, (2 * n * (n + 1), 2 * n + 1), (4 * n * (n + 1), 3 * n + 2)),
    )


def ends_of_streams(model: ModelSpec, streams: BlockStreams) -> ops.Operations:
    """The work that makes the streams, in the first block, and that adds them up, in the last block."""
    n, hidden = streams.count, model.hidden_size
    opened = (_pass("streams.open", hidden, (0, n + 1), (n - 1, n + 1)),)
    closed = (_pass("streams.close", hidden, (n - 1, n + 1), (0, n + 1)),)
    return opened * streams.expands + closed * streams.contracts


def _pass(name: str, numel: int, forward: ops.Cost, back: ops.Cost, weight: ops.Cost | None = None) -> ops.Elementwise:
    return ops.Elementwise(name, forward, back, weight, whole=numel, rows=ops.BETWEEN)
