"""Experts in place of an MLP: each token goes to those that its router scores highest, none is dropped.

Shape letters: S sequence, B rows, H hidden, N = S B tokens, E experts, k of them for a token, V visits, M inner size;
R expert-parallel ranks, each with E / R experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.stages.torch.balance import RouterBalance
from pipeproof.stages.torch.expert_exchange import ExpertRegion, inverse, reorder, visits
from pipeproof.stages.torch.functional import fork, swiglu
from pipeproof.stages.torch.gathered import source_of
from pipeproof.stages.torch.grouped import Groups
from pipeproof.stages.torch.weights import SplitWeights, Weight

Tensor: TypeAlias = torch.Tensor
Gated: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""What an MLP makes of its gate and its other factor."""


class Experts:
    """The experts of one block; ``weight_of`` finds this rank's weights by name, ``gated`` is what each does inside."""

    def __init__(
        self,
        moe: MoeSpec,
        name: str,
        weights: SplitWeights,
        weight_of: Callable[[str], Weight],
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
        logits = router.enter(self._weights.product(to_router, self._weight("router")).flatten(0, -2))
        chosen, gains = choose(logits, self._moe, router.bias)
        visited = self._visit(to_experts.flatten(0, -2), chosen, router)
        routed = (visited * gains.unsqueeze(-1)).sum(dim=1).reshape(entered.shape)
        return routed + self._shared(to_shared[0]) if shared else routed

    def _visit(self, tokens: Tensor, chosen: Tensor, router: RouterBalance) -> Tensor:
        """What each token's experts make of it: [N, H] and the experts [N, k] to [N, k, H].

        The order of rows stays on the device. With several expert-parallel ranks the host reads how many rows go to
        each and come from each; with one it reads nothing, but for products of types that are multiplied one by one.
        """
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # by expert, then by token
        back = inverse(order)
        own = torch.zeros(self._moe.num_experts, dtype=torch.int64, device=flat.device)
        own.scatter_add_(0, flat, torch.ones_like(flat))  # bincount would make the host wait
        router.count(own)
        rows = visits(tokens, order, back)
        made = self._swiglu(rows, Groups(own)) if self._region.num_ranks == 1 else self._elsewhere(rows, own)
        return reorder(made, back, order).reshape(*chosen.shape, tokens.shape[-1])

    def _elsewhere(self, rows: Tensor, own: Tensor) -> Tensor:
        """What experts of all ranks make of rows, which are in the order of the experts; ``own`` [E] counts them."""
        region = self._region
        theirs = region.counts(own, f"{self._name}.counts")  # [R, E / R]
        send, receive = torch.stack([own.reshape(region.num_ranks, -1).sum(1), theirs.sum(1)]).tolist()
        arrived = region.exchange(rows, send, receive, f"{self._name}.dispatch")
        experts = torch.arange(theirs.shape[1], device=own.device).repeat(len(theirs))
        by_expert = experts.repeat_interleave(theirs.flatten(), output_size=sum(receive)).argsort(stable=True)
        by_rank = inverse(by_expert)  # as they arrived; by expert, they are then by rank, and by token
        made = self._swiglu(reorder(arrived, by_expert, by_rank), Groups(theirs.sum(0)))
        return region.exchange(reorder(made, by_rank, by_expert), receive, send, f"{self._name}.combine")

    def _swiglu(self, rows: Tensor, groups: Groups) -> Tensor:
        gate = self._weights.grouped(rows, self._weight("experts.gate"), groups)
        up = self._weights.grouped(rows, self._weight("experts.up"), groups)
        return self._weights.grouped(self._gated(gate, up), self._weight("experts.down"), groups)

    def _shared(self, activation: Tensor) -> Tensor:
        gate = self._weights.product(activation, self._weight("shared.gate"))
        up = self._weights.product(activation, self._weight("shared.up"))
        return self._weights.product(self._gated(gate, up), self._weight("shared.down"))

    def _weight(self, part: str) -> Weight:
        return self._weight_of(f"{self._name}.{part}.weight")


def choose(logits: Tensor, moe: MoeSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first, and their weights: two of [N, k] from [N, E]; of equals, the lower expert.

    A ``bias`` [E] is added to scores for the choice alone. No gradient flows through the choice.
    """
    scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    gains = scores.gather(-1, chosen)
    if moe.normalize:
        gains = gains / gains.sum(-1, keepdim=True)
    return chosen, gains
