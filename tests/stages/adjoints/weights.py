"""Table rows: uses of weights, whose input and weight gradients are computed separately."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import paddle

from pipeproof.specs.model import HyperConnectionsSpec
from pipeproof.stages.common.stage import (
    contract_streams,
    expand_streams,
    gated_sum_of_streams,
    sinkhorn,
    sinkhorn_of_softmax,
    with_streams,
)
from pipeproof.stages.common.weights import mark, source_of
from pipeproof.stages.common.work_items import join_mtp_streams, split_mtp_streams, training_loss
from pipeproof.stages.describe.layers.layer_operations import ENDS
from pipeproof.stages.paddle.backend_ops import OPS, PaddleGatheredInput, PartOfGathered
from tests.stages.adjoints.rows import plain
from tests.stages.adjoints.world import Case, Held, Rank
from tests.stages.staged_run import make_plan

SIZES = [2, 0, 3]
"""Rows of each group; no row is of the second."""


def weights() -> list[Case]:
    """Products and the like."""

    def of(name: str, covers: str, function: Callable[..., Any], *shapes: tuple[int, ...]) -> Case:
        return Case(name, tuple(covers.split()), function, tuple(map(Held, shapes)))

    return [
        of("product", "SplitWeights.product", lambda r, x, w: r.weights.product(x, w), (2, 3, 4), (4, 5)),
        of("transposed product", "SplitWeights.product",
           lambda r, x, w: r.weights.product(x, w, transposed=True), (2, 3, 4), (5, 4)),
        of("scaled", "SplitWeights.scaled", lambda r, x, w: r.weights.scaled(x, w), (2, 3, 4), (4,)),
        of("added", "SplitWeights.added", lambda r, x, w: r.weights.added(x, w).tanh(), (2, 3, 4), (4,)),
        of("added rows", "SplitWeights.added",
           lambda r, x, w: r.weights.added(x, w, lambda whole: whole[1:3].unsqueeze(1)).tanh(), (2, 3, 4), (5, 4)),
        of("added to each", "SplitWeights.added_each used_on_each copies",
           lambda r, x, y, w: [z.tanh() for z in r.weights.added_each([x, y], w)], (2, 3, 4), (3, 4), (4,)),
        of("scaled and shifted", "SplitWeights.scaled_and_shifted",
           lambda r, x, a, b: r.weights.scaled_and_shifted(x, a, b, [3, 1, 2]), (2, 6), (3,), (6,)),
        of("grouped", "SplitWeights.grouped", lambda r, x, w: r.weights.grouped(x, w, SIZES), (5, 4), (3, 4, 6)),
        of("grouped evenly", "SplitWeights.grouped_evenly",
           lambda r, x, w: r.weights.grouped_evenly(x, w), (6, 4), (3, 4, 6)),
        of("deferred", "SplitWeights.deferred", lambda r, x, w: (x * r.weights.deferred(w)).tanh(), (2, 3, 4), (3, 1)),
        of("product of each", "SplitWeights.product_each used_on_each copies",
           lambda r, x, y, w: r.weights.product_each([x, y], w), (2, 3, 4), (3, 4), (4, 5)),
        of("scaled of each", "SplitWeights.scaled_each used_on_each copies",
           lambda r, x, y, w: r.weights.scaled_each([x, y], w), (2, 3, 4), (3, 4), (4,)),
        of("RMSNorm of each", "SplitWeights.norm_each",
           lambda r, x, y, w: r.weights.norm_each([x, y], w), (2, 3, 4), (3, 4), (4,)),
        of("LayerNorm of each", "SplitWeights.norm_each",
           lambda r, x, y, w, b: r.weights.norm_each([x, y], w, b), (2, 3, 4), (3, 4), (4,), (4,)),
        Case("product, gathered again", ("PaddleGatheredInput.without_keeping",), _gathered,
             (Held((2, 2, 4)), Held((4, 5))), num_ranks=2, sequence_dim=0, regathers=True),
        Case("products of parts, gathered again", ("PartOfGathered.without_keeping",), _gathered_parts,
             (Held((2, 2, 4)), Held((4, 5))), num_ranks=2, sequence_dim=0, regathers=True),
    ]  # fmt: skip


def _gathered(rank: Rank, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
    return rank.weights.product(rank.region.enter(x, "in"), weight)


def _gathered_parts(rank: Rank, x: paddle.Tensor, weight: paddle.Tensor) -> list[paddle.Tensor]:
    """Each row of the micro-batch by itself."""
    entered = rank.region.enter(x, "in")
    source = source_of(entered)
    assert isinstance(source, PaddleGatheredInput)
    parts = paddle.split(entered, 2, axis=1)
    for number, part in enumerate(parts):
        mark(PartOfGathered(source, lambda whole, number=number: paddle.split(whole, 2, axis=1)[number]), part)
    return [rank.weights.product(part, weight) for part in parts]


def lanes_and_streams() -> list[Case]:
    """What multi-token prediction and hyper-connections make of one tensor, or several."""
    modules = make_plan(model={"mtp": {"num_modules": 2, "loss_weight": 0.3}})
    return [
        plain("streams", "split_mtp_streams", lambda x: split_mtp_streams(OPS, x, 3, 1), (2, 6, 4)),
        plain(
            "joined streams", "join_mtp_streams", lambda x, y: join_mtp_streams(OPS, [x, y], 1), (2, 3, 4), (2, 3, 4)
        ),
        plain("whole loss", "training_loss", lambda *losses: training_loss(modules, losses), (1,), (1,), (1,)),
        plain("expand_streams", "expand_streams", lambda x: expand_streams(OPS, x, 3), (2, 4)),
        plain("contract_streams", "contract_streams", lambda x: contract_streams(OPS, x, 3), (2, 12)),
        plain("Sinkhorn", "sinkhorn", lambda x: sinkhorn(OPS, x, 4), (2, 3, 3)),
        plain("Sinkhorn of softmax", "sinkhorn_of_softmax", lambda x: sinkhorn_of_softmax(OPS, x, 4, 0.1), (2, 3, 3)),
        Case(
            "streams with_streams a layer",
            ("with_streams",),
            _around,
            tuple(map(Held, ((2, 2, 12), (12, 15), (3,), (15,)))),
        ),
        Case(
            "streams of DeepSeek-V4 around a layer",
            ("with_streams",),
            partial(_around, streams=_V4),
            tuple(map(Held, ((2, 2, 12), (12, 15), (3,), (15,)))),
        ),
        Case(
            "streams gated_sum_of_streams",
            ("gated_sum_of_streams",),
            lambda r, x, *own: gated_sum_of_streams(OPS, x, _V4, r.weights, dict(zip(ENDS, own, strict=True))),
            tuple(map(Held, ((2, 2, 12), (12, 3), (1,), (3,)))),
        ),
    ]


_PLAIN = HyperConnectionsSpec(streams=3, sinkhorn_iterations=4)
_V4 = _PLAIN.model_copy(update={"sinkhorn": "softmax", "epsilon": 0.1, "transposed": True})


def _around(rank: Rank, x: paddle.Tensor, *own: paddle.Tensor, streams: HyperConnectionsSpec = _PLAIN) -> paddle.Tensor:
    return with_streams(OPS, x, paddle.tanh, streams, rank.weights, dict(zip(ENDS, own, strict=True)))
