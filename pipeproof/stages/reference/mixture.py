"""A mixture of experts for the references: a loop over experts, of the tokens of one or several ranks.

Which rows stand in one product, and in which order a token's gradients are
added, are part of the bits, and so they are written out: an expert's rows are
its tokens, rank by rank; a token adds what its experts make of it, and the
gradients that come back, in the order of its choice.

Shape letters: N tokens, E experts, k of them for a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.stages.reference.gated import gated
from pipeproof.stages.reference.pieces import Copies, add

Tensor: TypeAlias = paddle.Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of each token, best first [N, k], and what each of them counts for, k tensors of [N, 1]."""

    experts: npt.NDArray[np.int64]
    gains: Sequence[Tensor]


def route(logits: Tensor, moe: MoeSpec, bias: npt.NDArray[Any] | None = None) -> Routing:
    """Choose by [.., E] outputs of the router: the largest scores, of equal ones those of lower experts.

    A ``bias`` [E] is added to the scores for the choice alone.
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


def mixture(
    inputs: Sequence[Tensor], routings: Sequence[Routing], weights: Sequence[Tensor], swiglu_limit: float | None = None
) -> list[Tensor]:
    """What the experts make of each rank's tokens: tensors of the shapes of ``inputs`` [.., H].

    ``weights`` are gate, up and down of all experts: [E, H, M] twice and [E, M, H].
    """
    hidden = inputs[0].shape[-1]
    top_k = routings[0].experts.shape[1]
    # Every visit of a token to an expert has a row: rank by rank, token by token, its choices in turn.
    of_ranks = [
        paddle.stack(list(Copies.apply(x.reshape([-1, hidden]), top_k)), axis=1).reshape([-1, hidden]) for x in inputs
    ]
    experts = np.concatenate([routing.experts.reshape(-1) for routing in routings])
    rows = of_ranks[0] if len(of_ranks) == 1 else paddle.concat(of_ranks)
    order = np.argsort(experts, kind="stable")
    visited, sizes = np.unique(experts, return_counts=True)
    gates, ups, downs = (weight.unbind() for weight in weights)
    made = []
    for expert, mine in zip(visited, paddle.split(Moved.apply(rows, order), sizes.tolist()), strict=True):
        inner = gated(paddle.matmul(mine, gates[expert]), paddle.matmul(mine, ups[expert]), swiglu_limit)
        made.append(paddle.matmul(inner, downs[expert]))
    back = Moved.apply(paddle.concat(made), np.argsort(order)).split([x.shape[0] for x in of_ranks])
    results = []
    for of_rank, routing, x in zip(back, routings, inputs, strict=True):
        choices = of_rank.reshape([-1, top_k, hidden]).unbind(1)
        addends = [y * gain for y, gain in zip(choices, routing.gains, strict=True)]
        results.append(add(addends).reshape(x.shape))
    return results


class Moved(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """Rows in another order. Their gradients only move back: autograd's own way would add them to zeros."""

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
