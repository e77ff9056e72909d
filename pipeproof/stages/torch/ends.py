"""Embedding and head on one rank, on all lanes at once: lanes are more rows of one lookup, and of one product.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.lanes import MTP
from pipeproof.stages.torch.batches import Lane
from pipeproof.stages.torch.collectives import TensorParallelRegion
from pipeproof.stages.torch.dropout import Dropouts
from pipeproof.stages.torch.lanes import join_lanes, split_lanes
from pipeproof.stages.torch.vocabulary import embed_tokens, summed_cross_entropies
from pipeproof.stages.torch.weights import SplitWeights, Weight

Tensor: TypeAlias = torch.Tensor


class Ends:
    """What the layers of one stage look up in the embedding, and make of the last activations.

    ``weight_of`` finds this rank's part of a weight as a layer uses it, by the
    names of both.
    """

    def __init__(
        self,
        plan: PlanSpec,
        weights: SplitWeights,
        region: TensorParallelRegion,
        weight_of: Callable[[str, str], Weight],
    ) -> None:
        self._weights, self._region, self._weight_of = weights, region, weight_of
        self._rows_dim = plan.model.activation_order.index("b")
        self._tied = plan.model.tied_embedding

    def embed(self, lanes: Sequence[Lane], dropouts: Dropouts) -> list[Tensor]:
        """The main lane, and where the first stage embeds for all, what modules will read, in one lane each."""
        names = ["embed", *(f"{MTP}.{number}.embed" for number in range(len(lanes) - 1))]
        embedded = split_lanes(self._looked_up("embed", "embed.out", lanes), len(lanes), self._rows_dim)
        return [dropouts.between(lane, "embedding", name) for lane, name in zip(embedded, names, strict=True)]

    def embed_again(self, layer: str, lane: Lane, dropouts: Dropouts) -> Tensor:
        """What a module reads that looks it up itself."""
        embedding = self._looked_up(layer, f"{layer}.embed.out", [lane])
        return dropouts.between(embedding, "embedding", f"{layer}.embed")

    def losses(self, activations: Sequence[Tensor], lanes: Sequence[Lane]) -> list[Tensor]:
        """Each lane's cross-entropy, summed over its counted tokens."""
        entered = self._region.enter(join_lanes(activations, self._rows_dim), "head.in")
        weight = self._weight_of("head", "embed.weight" if self._tied else "head.weight")
        logits = self._weights.product(entered, weight, transposed=self._tied)
        return summed_cross_entropies(logits, [lane.labels for lane in lanes], self._region, self._rows_dim)

    def _looked_up(self, layer: str, label: str, lanes: Sequence[Lane]) -> Tensor:
        tokens = join_lanes([lane.tokens for lane in lanes], self._rows_dim)
        weight = self._weight_of(layer, "embed.weight")
        return self._region.leave(embed_tokens(tokens, weight, self._weights, self._region), label)
