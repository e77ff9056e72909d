"""Hyper-connections: how a sub-layer reads, writes and mixes the residual streams of each token.

The formulas are in ``stages/describe/streams.py``. Streams are read in three
places, for the gates, by the sub-layer and by the mixture; their gradient adds
these three in that order. Sinkhorn-Knopp is computed once more on the way
back, in place of keeping what each iteration made, and never in 16 bits.

Shape letters: n streams, H hidden; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from pipeproof.stages.common.ops import Ops, Tensor, Weight
from pipeproof.stages.common.weights import SplitWeights
from pipeproof.stages.describe.streams import BlockStreams


def opened(ops: Ops, activation: Tensor, count: int) -> Tensor:
    """``count`` equal streams of one: [.., H] to [.., n H]. The gradient adds theirs in their order."""
    return ops.concat(ops.fork(activation, count), -1)


def closed(ops: Ops, streams: Tensor, count: int) -> Tensor:
    """The sum of the streams in their order: [.., n H] to [.., H]."""
    total, *others = ops.chunk(streams, count, -1)
    for other in others:
        total = total + other
    return total


def around(
    ops: Ops,
    streams: Tensor,
    sub_layer: Callable[[Tensor], Tensor],
    of: BlockStreams,
    weights: SplitWeights,
    own: Mapping[str, Weight],
) -> Tensor:
    """The streams [.., n H] behind a sub-layer, which takes and gives [.., H].

    ``own`` has the sub-layer's ``weight``, ``scale`` and ``bias``.
    """
    to_gates, to_read, to_mix = ops.fork(streams, 3)
    sizes = [of.count, of.count, of.count * of.count]
    plain = weights.product(ops.rms_norm(to_gates), own["weight"])
    gates = weights.scaled_and_shifted(plain, own["scale"], own["bias"], sizes)
    pre, post, res = ops.split(gates, sizes, -1)
    res = ops.computed_again(partial(sinkhorn, ops, iterations=of.iterations), _apart(res, of.count))
    mixed = (res @ _apart(to_mix, of.count)).flatten(-2)
    read = (pre.sigmoid().unsqueeze(-2) @ _apart(to_read, of.count)).squeeze(-2)
    made = sub_layer(read)
    written = (2.0 * post.sigmoid()).unsqueeze(-1) * made.unsqueeze(-2)
    return mixed + written.flatten(-2)


def sinkhorn(ops: Ops, matrix: Tensor, iterations: int) -> Tensor:
    """The exponential of [.., n, n], its columns and then its rows divided by their sums, ``iterations`` times.

    Computed with logarithms, so that no sum can vanish or overflow.
    """
    logs = ops.wide(matrix)
    for _ in range(iterations):
        logs = logs - logs.logsumexp(-2, keepdim=True)
        logs = logs - logs.logsumexp(-1, keepdim=True)
    return ops.as_type_of(logs.exp(), matrix)


def _apart(flat: Tensor, count: int) -> Tensor:
    """[.., n K] to [.., n, K]."""
    return flat.reshape([*flat.shape[:-1], count, -1])
