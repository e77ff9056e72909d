"""Hyper-connections: a sub-layer reads, writes and mixes the residual streams of each token.

The formulas are in ``describe/layers/layer_operations.py``. The streams have three readers: the gates, the sub-layer
and the mixture. Their gradients are added in that order. Backward recomputes Sinkhorn-Knopp, so the results of its
iterations are not kept. It never runs in 16 bits.

Shape letters: n streams, H hidden; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from pipeproof.stages.common.backend_ops import BackendOps, Tensor, Weight
from pipeproof.stages.common.weights import SplitWeights
from pipeproof.stages.describe.layers.layer_operations import BlockStreams


def expand_streams(ops: BackendOps, activation: Tensor, count: int) -> Tensor:
    """Copy one activation into ``count`` streams: [.., H] to [.., n H]. The gradient adds theirs in order."""
    return ops.concat(ops.fork(activation, count), -1)


def contract_streams(ops: BackendOps, streams: Tensor, count: int) -> Tensor:
    """Add the streams in order: [.., n H] to [.., H]."""
    total, *others = ops.chunk(streams, count, -1)
    for other in others:
        total = total + other
    return total


def with_streams(
    ops: BackendOps,
    streams: Tensor,
    sub_layer: Callable[[Tensor], Tensor],
    spec: BlockStreams,
    weights: SplitWeights,
    parameters: Mapping[str, Weight],
) -> Tensor:
    """Run a sub-layer, [.., H] to [.., H], on streams [.., n H] and return the new streams.

    ``parameters`` has the ``weight``, ``scale`` and ``bias`` of the sub-layer's streams.
    """
    to_gates, to_read, to_mix = ops.fork(streams, 3)
    sizes = [spec.count, spec.count, spec.count * spec.count]
    products = weights.product(ops.rms_norm(to_gates), parameters["weight"])
    gates = weights.scaled_and_shifted(products, parameters["scale"], parameters["bias"], sizes)
    pre, post, res = ops.split(gates, sizes, -1)
    res = ops.recompute_in_backward(
        partial(sinkhorn, ops, iterations=spec.iterations), _unflatten_streams(res, spec.count)
    )
    mixed = (res @ _unflatten_streams(to_mix, spec.count)).flatten(-2)
    read = (pre.sigmoid().unsqueeze(-2) @ _unflatten_streams(to_read, spec.count)).squeeze(-2)
    output = sub_layer(read)
    written = (2.0 * post.sigmoid()).unsqueeze(-1) * output.unsqueeze(-2)
    return mixed + written.flatten(-2)


def sinkhorn(ops: BackendOps, matrix: Tensor, iterations: int) -> Tensor:
    """Sinkhorn-Knopp: exp of [.., n, n], then ``iterations`` times columns, then rows, divided by their sums.

    It works on logarithms, so no sum can vanish or overflow.
    """
    logs = ops.widened(matrix)
    for _ in range(iterations):
        logs = logs - logs.logsumexp(-2, keepdim=True)
        logs = logs - logs.logsumexp(-1, keepdim=True)
    return ops.as_type_of(logs.exp(), matrix)


def _unflatten_streams(flat: Tensor, count: int) -> Tensor:
    """[.., n K] to [.., n, K]."""
    return flat.reshape([*flat.shape[:-1], count, -1])
