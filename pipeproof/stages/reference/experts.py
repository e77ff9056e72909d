"""Mixture of experts for the references: a loop over experts, for the tokens of one or more ranks.

The bits depend on the rows of each product and on the order in which a token's gradients are added, so both are
explicit: an expert's rows are its tokens, rank by rank. A token adds the outputs of its experts, and the gradients that
come back, in the order of its choice.

Shape letters: N tokens, E experts, k of them for a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.specs.model import MoeSpec
from pipeproof.stages.reference.layer_math import gated
from pipeproof.stages.reference.sharded_tensors import Copies, add

Tensor: TypeAlias = paddle.Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of each token, best first [N, k], and their weights, k tensors of [N, 1]."""

    experts: npt.NDArray[np.int64]
    gains: Sequence[Tensor]


def route(logits: Tensor, moe: MoeSpec, bias: npt.NDArray[Any] | None = None) -> Routing:
    """Choose experts by the router's outputs [.., E]: the largest scores. Ties go to the lower expert.

    A ``bias`` [E] is added to the scores for the choice only.
    """
    flat = logits.reshape([-1, moe.num_experts])
    scores = F.softmax(flat, axis=-1) if moe.score == "softmax" else F.sigmoid(flat)
    values = scores.numpy() if bias is None else scores.numpy() + bias
    best = [sorted(range(moe.num_experts), key=lambda e: (-row[e], e))[: moe.top_k] for row in values]
    experts = np.array(best, dtype=np.int64)
    gains = paddle.take_along_axis(scores, paddle.to_tensor(experts), axis=-1)
    if moe.normalize:
        gains = gains / gains.sum(axis=-1, keepdim=True)
    return Routing(experts, gains.split(moe.top_k, axis=-1))


def gathered_mixture(
    inputs: Sequence[Tensor],
    routings: Sequence[Sequence[Routing]],
    weights: Sequence[Tensor],
    swiglu_limit: float | None,
) -> list[Tensor]:
    """``mixture`` where each of R ranks adds the results of its experts, and the ranks' addends are added in order.

    ``routings`` has R of each rank's tokens, one for each rank that computes with them.
    """
    num_ranks, num_own = len(inputs), weights[0].shape[0] // len(inputs)
    copies = [Copies.apply(x, num_ranks) for x in inputs]
    addends = [
        mixture(
            [readers[rank] for readers in copies],
            [readers[rank] for readers in routings],
            weights,
            swiglu_limit,
            range(rank * num_own, (rank + 1) * num_own),
        )
        for rank in range(num_ranks)
    ]
    return [add(list(of_rank)) for of_rank in zip(*addends, strict=True)]


def mixture(
    inputs: Sequence[Tensor],
    routings: Sequence[Routing],
    weights: Sequence[Tensor],
    swiglu_limit: float | None = None,
    own: Container[int] | None = None,
) -> list[Tensor]:
    """Outputs of the experts for each rank's tokens: tensors of the shapes of ``inputs`` [.., H].

    ``weights`` are gate, up and down of all experts: [E, H, M] twice and [E, M, H]. With ``own`` other experts add
    zero.
    """
    hidden = inputs[0].shape[-1]
    top_k = routings[0].experts.shape[1]
    # Each visit of a token to an expert has a row: rank by rank, token by token, in the order of its choice.
    rank_rows = [
        paddle.stack(list(Copies.apply(x.reshape([-1, hidden]), top_k)), axis=1).reshape([-1, hidden]) for x in inputs
    ]
    experts = np.concatenate([routing.experts.reshape(-1) for routing in routings])
    rows = rank_rows[0] if len(rank_rows) == 1 else paddle.concat(rank_rows)
    order = np.argsort(experts, kind="stable")
    visited, sizes = np.unique(experts, return_counts=True)
    gates, ups, downs = (weight.unbind() for weight in weights)
    outputs = []
    for expert, group in zip(visited, paddle.split(PermuteRows.apply(rows, order), sizes.tolist()), strict=True):
        if own is not None and int(expert) not in own:
            outputs.append(group * 0.0)
            continue
        inner = gated(paddle.matmul(group, gates[expert]), paddle.matmul(group, ups[expert]), swiglu_limit)
        outputs.append(paddle.matmul(inner, downs[expert]))
    back = PermuteRows.apply(paddle.concat(outputs), np.argsort(order)).split([x.shape[0] for x in rank_rows])
    results = []
    for rank_output, routing, x in zip(back, routings, inputs, strict=True):
        choices = rank_output.reshape([-1, top_k, hidden]).unbind(1)
        addends = [y * gain for y, gain in zip(choices, routing.gains, strict=True)]
        results.append(add(addends).reshape(x.shape))
    return results


class PermuteRows(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """A permutation of rows. Gradients only move back; autograd's own backward would add them to zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: npt.NDArray[np.int64]) -> Tensor:
        """Row ``order[i]`` as row i."""
        ctx.order = order
        return paddle.gather(rows, paddle.to_tensor(order))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Row i as row ``order[i]``."""
        back = np.empty_like(ctx.order)
        back[ctx.order] = np.arange(len(back))
        return paddle.gather(gradient, paddle.to_tensor(back))
