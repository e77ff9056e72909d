"""Hyper-connections: how a sub-layer reads, writes and mixes the residual streams of each token.

The formulas are in ``stages/describe/streams.py``. Streams are read in three
places, for the gates, by the sub-layer and by the mixture; their gradient adds
these three in that order. Sinkhorn-Knopp is computed once more on the way
back, in place of keeping what each iteration made.

Shape letters: n streams, H hidden; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import paddle
import paddle.nn.functional as F

from pipeproof.stages.describe.streams import BlockStreams
from pipeproof.stages.paddle.again import computed_again
from pipeproof.stages.paddle.expert_exchange import fork
from pipeproof.stages.paddle.functional import rms_norm
from pipeproof.stages.paddle.weights import SplitWeights

Tensor: TypeAlias = paddle.Tensor


def opened(activation: Tensor, count: int) -> Tensor:
    """``count`` equal streams of one: [.., H] to [.., n H]. The gradient adds theirs in their order."""
    return paddle.concat(fork(activation, count), axis=-1)


def closed(streams: Tensor, count: int) -> Tensor:
    """The sum of the streams in their order: [.., n H] to [.., H]."""
    total, *others = paddle.split(streams, count, axis=-1)
    for other in others:
        total = total + other
    return total


def around(
    streams: Tensor,
    sub_layer: Callable[[Tensor], Tensor],
    of: BlockStreams,
    weights: SplitWeights,
    own: Mapping[str, Tensor],
) -> Tensor:
    """The streams [.., n H] behind a sub-layer, which takes and gives [.., H].

    ``own`` has the sub-layer's ``weight``, ``scale`` and ``bias``.
    """
    to_gates, to_read, to_mix = fork(streams, 3)
    sizes = [of.count, of.count, of.count * of.count]
    plain = weights.product(rms_norm(to_gates), own["weight"])
    gates = weights.scaled_and_shifted(plain, own["scale"], own["bias"], sizes)
    pre, post, res = paddle.split(gates, sizes, axis=-1)
    res = computed_again(partial(sinkhorn, iterations=of.iterations), _apart(res, of.count))
    mixed = paddle.matmul(res, _apart(to_mix, of.count)).reshape(streams.shape)
    read = paddle.matmul(F.sigmoid(pre).unsqueeze(-2), _apart(to_read, of.count)).squeeze(-2)
    made = sub_layer(read)
    written = (2.0 * F.sigmoid(post)).unsqueeze(-1) * made.unsqueeze(-2)
    return mixed + written.reshape(streams.shape)


def sinkhorn(matrix: Tensor, iterations: int) -> Tensor:
    """The exponential of [.., n, n], its columns and then its rows divided by their sums, ``iterations`` times.

    Computed with logarithms, so that no sum can vanish or overflow.
    """
    logs = matrix
    for _ in range(iterations):
        logs = logs - paddle.logsumexp(logs, axis=-2, keepdim=True)
        logs = logs - paddle.logsumexp(logs, axis=-1, keepdim=True)
    return paddle.exp(logs)


def _apart(flat: Tensor, count: int) -> Tensor:
    """[.., n K] to [.., n, K]."""
    return flat.reshape([*flat.shape[:-1], count, -1])
