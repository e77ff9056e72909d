"""Embedding and head on one rank, on all lanes at once.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.lanes import MTP
from pipeproof.stages.describe.synthetic import Batch
from pipeproof.stages.paddle.collectives import TensorParallelRegion
from pipeproof.stages.paddle.dropout import Dropouts
from pipeproof.stages.paddle.lanes import join_lanes, split_lanes
from pipeproof.stages.paddle.vocabulary import embed_tokens, summed_cross_entropies
from pipeproof.stages.paddle.weights import SplitWeights

Tensor: TypeAlias = paddle.Tensor


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
        weight_of: Callable[[str, str], Tensor],
    ) -> None:
        self._weights, self._region, self._weight_of = weights, region, weight_of
        self._batch_first = plan.model.activation_order == "bsh"
        self._rows_dim = plan.model.activation_order.index("b")
        self._tied = plan.model.tied_embedding

    def embed(self, batches: Sequence[Batch], dropouts: Dropouts) -> list[Tensor]:
        """The main lane, and where the first stage embeds for all, what modules will read, in one lane each."""
        names = ["embed", *(f"{MTP}.{number}.embed" for number in range(len(batches) - 1))]
        lanes = split_lanes(self._looked_up("embed", "embed.out", batches), len(batches), self._rows_dim)
        return [dropouts.between(lane, "embedding", name) for lane, name in zip(lanes, names, strict=True)]

    def embed_again(self, layer: str, batch: Batch, dropouts: Dropouts) -> Tensor:
        """What a module reads that looks it up itself."""
        embedding = self._looked_up(layer, f"{layer}.embed.out", [batch])
        return dropouts.between(embedding, "embedding", f"{layer}.embed")

    def losses(self, lanes: Sequence[Tensor], batches: Sequence[Batch]) -> list[Tensor]:
        """Each lane's cross-entropy, summed over its counted tokens."""
        entered = self._region.enter(join_lanes(lanes, self._rows_dim), "head.in")
        each = split_lanes(entered, len(lanes), self._rows_dim)
        weight = self._weight_of("head", "embed.weight" if self._tied else "head.weight")
        logits = self._weights.product_each(each, weight, transposed=self._tied)
        labels = [self._in_order(batch.labels) for batch in batches]
        return summed_cross_entropies(logits, labels, self._region, self._rows_dim)

    def _looked_up(self, layer: str, label: str, batches: Sequence[Batch]) -> Tensor:
        tokens = [self._in_order(batch.tokens) for batch in batches]
        weight = self._weight_of(layer, "embed.weight")
        return self._region.leave(embed_tokens(tokens, weight, self._weights, self._region, self._rows_dim), label)

    def _in_order(self, words: npt.NDArray[np.int64]) -> Tensor:
        """Tokens or labels [B, S] in the order of the plan's activations."""
        return paddle.to_tensor(np.ascontiguousarray(words if self._batch_first else words.T))
