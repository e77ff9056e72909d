"""Streams of the references: residual streams of hyper-connections (arXiv:2512.24880), and of multi-token prediction.

The streams of a token are consecutive in the last dim, n H. They have three readers, whose gradients are added in this
order: the gates, the sub-layer, the mixture. MTP stream 0 is the prediction of the main model, stream j + 1 the
prediction of module j.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import paddle

from pipeproof.specs.model import HyperConnectionsSpec, ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.mtp_streams import module_weight
from pipeproof.stages.reference.sharded_tensors import Copies, Shards, add
from pipeproof.stages.reference.shared_math import stream_factors, stream_mixing


def copies_for_mtp_streams(weight: Tensor, num_streams: int) -> list[Tensor]:
    """Return one copy of a weight for each MTP stream. Their gradients are added in the order of the streams."""
    return [weight] if num_streams == 1 else list(Copies.apply(weight, num_streams))


def stacked_losses(losses: Sequence[Tensor]) -> Tensor:
    """The losses of all MTP streams as reported: a scalar, or a vector for several streams."""
    return losses[0] if len(losses) == 1 else paddle.stack(list(losses))


def training_loss(plan: PlanSpec, losses: Tensor) -> Tensor:
    """The loss that is trained on, a scalar: the main loss plus the weighted losses of modules."""
    mtp = plan.gpt.mtp
    if mtp is None:
        return losses
    weights = np.array([1.0] + [module_weight(mtp)] * mtp.num_modules, dtype=plan.run.dtype)
    return (losses * paddle.to_tensor(weights)).sum()


Tensor: TypeAlias = paddle.Tensor
StreamUpdate: TypeAlias = Callable[[Tensor], Tensor]
"""Compute the residual after a sub-layer from the sub-layer's output."""

WEIGHTS = ("weight", "scale", "bias")
"""The ends of the names of a sub-layer's stream weights, in the order of ``read``."""


def widened(x: Tensor, spec: HyperConnectionsSpec) -> Tensor:
    """Copy the activation into streams, for the first block. Their gradients are added in order."""
    return paddle.concat(list(Copies.apply(x, spec.streams)), axis=-1)


def summed(x: Tensor, spec: HyperConnectionsSpec) -> Tensor:
    """Add the streams in order, for the output of the last block."""
    return add(x.split(spec.streams, axis=-1))


def gated_sum(x: Tensor, weights: Sequence[Tensor], spec: HyperConnectionsSpec) -> Tensor:
    """Add the streams with learned factors, for the output of the last block."""
    weight, scale, bias = weights
    for_gates, for_sum = Copies.apply(x, 2)
    factors = stream_factors(paddle.matmul(_normed(for_gates), weight) * scale + bias, spec)
    return paddle.matmul(factors.unsqueeze(-2), for_sum.reshape([*x.shape[:-1], spec.streams, -1])).squeeze(-2)


def _normed(x: Tensor) -> Tensor:
    a = paddle.assign(x)
    return a * paddle.rsqrt(paddle.square(a).mean(axis=-1, keepdim=True) + 1e-6)


def read(x: Tensor, weights: Sequence[Tensor], spec: HyperConnectionsSpec) -> tuple[Tensor, StreamUpdate]:
    """The input of a sub-layer from the streams, and the function that updates the streams with its output."""
    n = spec.streams
    weight, scale, bias = weights
    for_gates, for_layer, for_mixture = Copies.apply(x, 3)
    each = [*x.shape[:-1], n, x.shape[-1] // n]
    parts = [n, n, n * n]
    numbers = [
        part * factor + shift
        for part, factor, shift in zip(
            paddle.matmul(_normed(for_gates), weight).split(parts, axis=-1),
            scale.split(3),
            bias.split(parts),
            strict=True,
        )
    ]
    pre, post = stream_factors(numbers[0], spec), paddle.nn.functional.sigmoid(numbers[1]) * 2.0
    matrix = stream_mixing(numbers[2].reshape([*x.shape[:-1], n, n]), spec)
    mixture = paddle.matmul(matrix, for_mixture.reshape(each))
    sub_layer_input = paddle.matmul(pre.unsqueeze(-2), for_layer.reshape(each)).squeeze(-2)

    def update(output: Tensor) -> Tensor:
        written = post.unsqueeze(-1) * output.unsqueeze(-2)
        return mixture.reshape(x.shape) + written.reshape(x.shape)

    return sub_layer_input, update


@dataclass(frozen=True)
class Residual:
    """The input of a sub-layer, and for each shard the function from its output to the next residual."""

    sub_layer_input: Shards
    updates: Sequence[StreamUpdate]

    def update(self, output: Shards) -> Shards:
        """The residual after the sub-layer."""
        return [update(shard) for update, shard in zip(self.updates, output, strict=True)]


def residual(x: Shards, sub_layer: str, model: ModelSpec, weights: Mapping[str, Shards]) -> Residual:
    """The residual around ``sub_layer``: a sum, or all streams. Each shard has copies of the weights."""
    spec = model.hyper_connections
    if spec is None:
        return Residual(x, [partial(operator.add, shard) for shard in x])
    weights_of_shards = zip(*(weights[f"{sub_layer}_streams.{end}"] for end in WEIGHTS), strict=True)
    reads = [read(shard, copies, spec) for shard, copies in zip(x, weights_of_shards, strict=True)]
    return Residual([sub_layer_input for sub_layer_input, _ in reads], [update for _, update in reads])


def expanded(x: Shards, model: ModelSpec, name: str) -> Shards:
    """The input of the block: in the first one, and in modules, one activation becomes the streams."""
    spec = model.hyper_connections
    if spec is None or not is_end(name, 0) or (model.modules_read_streams and name != "layer.0"):
        return x
    return [widened(shard, spec) for shard in x]


def contracted(x: Shards, model: ModelSpec, name: str, weights: Mapping[str, Shards]) -> Shards:
    """The output of the block: in the last one, and in modules, the streams become one activation.

    Of the last block they do not if a module reads them.
    """
    spec = model.hyper_connections
    if spec is None or not is_end(name, model.num_layers - 1):
        return x
    if spec.contraction == "sum":
        return [summed(shard, spec) for shard in x]
    if model.modules_read_streams and name.startswith("layer."):
        return x
    return contracted_by(x, spec, f"{name}.out_streams", weights)


def contracted_by(x: Shards, spec: HyperConnectionsSpec, name: str, weights: Mapping[str, Shards]) -> Shards:
    """The learned contraction with the weights of that name."""
    of_shards = zip(*(weights[f"{name}.{end}"] for end in WEIGHTS), strict=True)
    return [gated_sum(shard, own, spec) for shard, own in zip(x, of_shards, strict=True)]


def is_end(name: str, number: int) -> bool:
    """True for the block of that number, and for modules, whose blocks are the first and the last at once."""
    return name == f"layer.{number}" or name.startswith("mtp.")
