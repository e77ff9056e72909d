"""Table rows: uses of weights, whose input and weight gradients are computed separately."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from pipeproof.specs.model import HyperConnectionsSpec
from pipeproof.stages.common.backend_ops import BackendOps
from pipeproof.stages.common.stage import (
    contract_streams,
    expand_streams,
    gated_sum_of_streams,
    sinkhorn,
    sinkhorn_of_softmax,
    with_streams,
)
from pipeproof.stages.common.work_items import join_mtp_streams, split_mtp_streams, training_loss
from pipeproof.stages.describe.layers.layer_operations import ENDS
from tests.stages.adjoints.rows import plain
from tests.stages.adjoints.world import Backend, Case, Held, Rank, make_plan

Shapes: TypeAlias = Sequence[tuple[int, ...]]


def used(name: str, covers: str, function: Callable[..., Any], inputs: Shapes, weights: Shapes, **more: Any) -> Case:
    """A function of a rank, of inputs and of weights."""
    held = (*map(Held, inputs), *(Held(shape, is_weight=True) for shape in weights))
    return Case(name, tuple(covers.split()), function, held, **more)


def weights(fw: Backend) -> list[Case]:
    """Products and the like."""
    return [
        used("product", "SplitWeights.product", lambda r, x, w: r.weights.product(x, w), [(2, 3, 4)], [(4, 5)]),
        used("transposed product", "SplitWeights.product",
             lambda r, x, w: r.weights.product(x, w, transposed=True), [(2, 3, 4)], [(5, 4)]),
        used("product of part of a tensor", "SplitWeights.product",
             lambda r, x, w: r.weights.product(x[:, 1:], w), [(3, 4, 4)], [(4, 5)]),
        used("one weight twice", "SplitWeights.product",
             lambda r, x, w: r.weights.product(r.weights.product(x, w).tanh(), w), [(3, 4)], [(4, 4)]),
        used("added", "SplitWeights.added", lambda r, x, w: r.weights.added(x, w).tanh(), [(2, 3, 4)], [(4,)]),
        used("added rows", "SplitWeights.added",
             lambda r, x, w: r.weights.added(x, w, lambda whole: whole[1:3].unsqueeze(1)).tanh(),
             [(2, 3, 4)], [(5, 4)]),
        used("scaled and shifted", "SplitWeights.scaled_and_shifted",
             lambda r, x, a, b: r.weights.scaled_and_shifted(x, a, b, [3, 1, 2]), [(2, 6)], [(3,), (6,)]),
        used("grouped evenly", "SplitWeights.grouped_evenly",
             lambda r, x, w: r.weights.grouped_evenly(x, w), [(6, 4)], [(3, 4, 6)]),
        used("deferred", "SplitWeights.deferred",
             lambda r, x, w: (x * r.weights.deferred(w)).tanh(), [(2, 3, 4)], [(3, 1)]),
        used("product, gathered again", "", lambda r, x, w: r.weights.product(r.region.enter(x, "in"), w),
             [(2, 2, 4)], [(4, 5)], num_ranks=2, sequence_dim=0, regathers=True),
    ]  # fmt: skip


def lanes_and_streams(fw: Backend) -> list[Case]:
    """Functions of multi-token prediction and hyper-connections on one tensor, or several."""
    ops, around = fw.ops, partial(_around, fw.ops)
    modules = make_plan(model={"mtp": {"num_modules": 2, "loss_weight": 0.3}})
    return [
        plain("streams", "split_mtp_streams", lambda x: split_mtp_streams(ops, x, 3, 1), (2, 6, 4)),
        plain(
            "joined streams", "join_mtp_streams", lambda x, y: join_mtp_streams(ops, [x, y], 1), (2, 3, 4), (2, 3, 4)
        ),
        plain("whole loss", "training_loss", lambda *losses: training_loss(modules, losses), (1,), (1,), (1,)),
        plain("expand_streams", "expand_streams", lambda x: expand_streams(ops, x, 3), (2, 4)),
        plain("contract_streams", "contract_streams", lambda x: contract_streams(ops, x, 3), (2, 12)),
        plain("Sinkhorn", "sinkhorn", lambda x: sinkhorn(ops, x, 4), (2, 3, 3)),
        plain("Sinkhorn of softmax", "sinkhorn_of_softmax", lambda x: sinkhorn_of_softmax(ops, x, 4, 0.1), (2, 3, 3)),
        used("streams with_streams a layer", "with_streams", around, [(2, 2, 12)], [(12, 15), (3,), (15,)]),
        used("streams of DeepSeek-V4 around a layer", "with_streams", partial(around, streams=_V4),
             [(2, 2, 12)], [(12, 15), (3,), (15,)]),
        used("streams gated_sum_of_streams", "gated_sum_of_streams",
             lambda r, x, *own: gated_sum_of_streams(ops, x, _V4, r.weights, dict(zip(ENDS, own, strict=True))),
             [(2, 2, 12)], [(12, 3), (1,), (3,)]),
    ]  # fmt: skip


_PLAIN = HyperConnectionsSpec(streams=3, sinkhorn_iterations=4)
_V4 = _PLAIN.model_copy(update={"sinkhorn": "softmax", "epsilon": 0.1, "transposed": True})


def _around(ops: BackendOps, rank: Rank, x: Any, *own: Any, streams: HyperConnectionsSpec = _PLAIN) -> Any:
    return with_streams(ops, x, lambda read: read.tanh(), streams, rank.weights, dict(zip(ENDS, own, strict=True)))
