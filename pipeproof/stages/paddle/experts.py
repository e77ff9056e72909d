"""Experts in place of an MLP: each token goes to those that its router scores highest, none is dropped.

Rows of an expert's products are its tokens, by the expert-parallel rank that
they come from and then by their place in that rank's micro-batch. How many rows
there are is part of the bits of a product, and of functions that a processor
computes several elements at a time, so an expert computes all its tokens, and
no other's, at once.

Shape letters: S sequence, B rows, H hidden, N = S B tokens, E experts, k of them for a token, V visits, M inner size;
R expert-parallel ranks, each with E / R experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import paddle
import paddle.nn.functional as F

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.stages.paddle.expert_exchange import ExpertRegion, Places, fork, reorder, visits, weighted
from pipeproof.stages.paddle.functional import swiglu
from pipeproof.stages.paddle.weights import SplitWeights

Tensor: TypeAlias = paddle.Tensor


class Experts:
    """The experts of one block; ``weight_of`` finds this rank's weights by the end of their names."""

    def __init__(
        self,
        moe: MoeSpec,
        name: str,
        weights: SplitWeights,
        weight_of: Callable[[str], Tensor],
        region: ExpertRegion,
    ) -> None:
        self._moe, self._name, self._region = moe, name, region
        self._weights, self._weight_of = weights, weight_of

    def forward(self, entered: Tensor) -> Tensor:
        """This tensor-parallel rank's addend of what all experts make of [S, B, H], shared ones included."""
        shared = self._moe.num_shared_experts > 0
        to_router, to_experts, *to_shared = fork(entered, 3 if shared else 2)
        logits = self._weights.product(to_router, self._weight("router"))
        chosen, gains = choose(logits.reshape([-1, self._moe.num_experts]), self._moe)
        tokens = to_experts.reshape([-1, entered.shape[-1]])
        routed = weighted(self._visit(tokens, chosen), gains).reshape(entered.shape)
        return routed + self._shared(to_shared[0]) if shared else routed

    def _visit(self, tokens: Tensor, chosen: Places) -> Tensor:
        """What each token's experts make of it: [N, H] and the experts [N, k] to [N, k, H]."""
        region, (_, top_k) = self._region, chosen.shape
        order = np.argsort(chosen.reshape(-1), kind="stable")  # by expert, then by token
        own = np.bincount(chosen.reshape(-1), minlength=self._moe.num_experts)
        theirs = region.counts(own, f"{self._name}.counts")  # [R, E / R]
        send = own.reshape([region.num_ranks, -1]).sum(axis=1).tolist()
        receive = theirs.sum(axis=1).tolist()
        arrived = region.exchange(visits(tokens, order, top_k), send, receive, f"{self._name}.dispatch")
        expert_of = np.repeat(np.tile(np.arange(theirs.shape[1]), len(theirs)), theirs.reshape(-1))
        by_expert = np.argsort(expert_of, kind="stable")  # then by rank, and by token
        made = reorder(self._swiglu(reorder(arrived, by_expert), theirs.sum(axis=0).tolist()), np.argsort(by_expert))
        back = region.exchange(made, receive, send, f"{self._name}.combine")
        return reorder(back, np.argsort(order)).reshape([*chosen.shape, tokens.shape[-1]])

    def _swiglu(self, rows: Tensor, sizes: list[int]) -> Tensor:
        gate = self._weights.grouped(rows, self._weight("experts.gate"), sizes)
        up = self._weights.grouped(rows, self._weight("experts.up"), sizes)
        return self._weights.grouped(_by_group(swiglu, gate, up, sizes), self._weight("experts.down"), sizes)

    def _shared(self, activation: Tensor) -> Tensor:
        gate = self._weights.product(activation, self._weight("shared.gate"))
        up = self._weights.product(activation, self._weight("shared.up"))
        return self._weights.product(swiglu(gate, up), self._weight("shared.down"))

    def _weight(self, part: str) -> Tensor:
        return self._weight_of(f"{self._name}.{part}.weight")


def _by_group(function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, sizes: Sequence[int]) -> Tensor:
    """``function`` of each group of rows by itself."""
    rows = [size for size in sizes if size]
    if len(rows) < 2:
        return function(a, b)
    return paddle.concat([function(*parts) for parts in zip(paddle.split(a, rows), paddle.split(b, rows), strict=True)])


def choose(logits: Tensor, moe: MoeSpec) -> tuple[Places, Tensor]:
    """The experts of each token, best first, and their weights: two of [N, k] from [N, E]; of equals, the lower expert.

    No gradient flows through the choice.
    """
    scores = F.softmax(logits, axis=-1) if moe.score == "softmax" else F.sigmoid(logits)
    chosen = np.argsort(-scores.numpy(), axis=-1, kind="stable")[:, : moe.top_k]
    gains = paddle.take_along_axis(scores, paddle.to_tensor(chosen), axis=-1)
    if moe.normalize:
        gains = gains / paddle.sum(gains, axis=-1, keepdim=True)
    return chosen, gains
