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
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.stages.paddle.balance import RouterBalance
from pipeproof.stages.paddle.expert_exchange import ExpertRegion, Places, fork, reorder, visits, weighted
from pipeproof.stages.paddle.functional import swiglu
from pipeproof.stages.paddle.gathered import source_of
from pipeproof.stages.paddle.weights import SplitWeights

Tensor: TypeAlias = paddle.Tensor
Gated: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""What an MLP makes of its gate and its other factor."""


class Experts:
    """The experts of one block; ``weight_of`` finds this rank's weights by name, ``gated`` is what each does inside."""

    def __init__(
        self,
        moe: MoeSpec,
        name: str,
        weights: SplitWeights,
        weight_of: Callable[[str], Tensor],
        region: ExpertRegion,
        gated: Gated = swiglu,
    ) -> None:
        self._moe, self._name, self._region = moe, name, region
        self._weights, self._weight_of, self._gated = weights, weight_of, gated

    def forward(self, entered: Tensor, router: RouterBalance) -> Tensor:
        """This tensor-parallel rank's addend of what all experts make of [S, B, H], shared ones included.

        ``router`` is told what is routed, and may have a bias for the choice.
        """
        shared = self._moe.num_shared_experts > 0
        to_router, to_experts, *to_shared = fork(entered, 3 if shared else 2)
        source = source_of(entered)
        if source is not None:
            source.mark(to_router, *to_shared)
        logits = self._weights.product(to_router, self._weight("router"))
        logits = router.enter(logits.reshape([-1, self._moe.num_experts]))
        chosen, gains = choose(logits, self._moe, router.bias)
        router.count(chosen)
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
        return self._weights.grouped(_by_group(self._gated, gate, up, sizes), self._weight("experts.down"), sizes)

    def _shared(self, activation: Tensor) -> Tensor:
        gate = self._weights.product(activation, self._weight("shared.gate"))
        up = self._weights.product(activation, self._weight("shared.up"))
        return self._weights.product(self._gated(gate, up), self._weight("shared.down"))

    def _weight(self, part: str) -> Tensor:
        return self._weight_of(f"{self._name}.{part}.weight")


def _by_group(function: Gated, a: Tensor, b: Tensor, sizes: Sequence[int]) -> Tensor:
    """``function`` of each group of rows by itself."""
    rows = [size for size in sizes if size]
    if len(rows) < 2:
        return function(a, b)
    return paddle.concat([function(*parts) for parts in zip(paddle.split(a, rows), paddle.split(b, rows), strict=True)])


def choose(logits: Tensor, moe: MoeSpec, bias: npt.NDArray[Any] | None = None) -> tuple[Places, Tensor]:
    """The experts of each token, best first, and their weights: two of [N, k] from [N, E]; of equals, the lower expert.

    A ``bias`` [E] is added to scores for the choice alone. No gradient flows through the choice.
    """
    scores = F.softmax(logits, axis=-1) if moe.score == "softmax" else F.sigmoid(logits)
    ranked = scores.numpy() if bias is None else scores.numpy() + bias
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, : moe.top_k]
    gains = paddle.take_along_axis(scores, paddle.to_tensor(chosen), axis=-1)
    if moe.normalize:
        gains = gains / paddle.sum(gains, axis=-1, keepdim=True)
    return chosen, gains
