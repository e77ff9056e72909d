"""Embedding and head on one rank, on all lanes at once.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.collectives import TensorParallelRegion
from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.common.lanes import join_lanes, split_lanes
from pipeproof.stages.common.ops import Ops, Tensor, Weight
from pipeproof.stages.common.units import Lane
from pipeproof.stages.describe.lanes import MTP


class Vocabulary(Protocol):
    """How a framework meets the vocabulary, of which this rank has V / T words; lanes are joined along ``rows_dim``."""

    def rows(self, tokens: Sequence[Tensor], weight: Weight, region: TensorParallelRegion, rows_dim: int, /) -> Tensor:
        """Rows of the embedding [V / T, H] for each lane's tokens [..]: this rank's addend of [.., H]."""
        ...

    def losses(
        self, entered: Tensor, weight: Weight, labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int, /
    ) -> list[Tensor]:
        """Each lane's cross-entropy, summed over its counted tokens, a scalar, from the lanes' activations [.., H]."""
        ...


class Ends:
    """What the layers of one stage look up in the embedding, and make of the last activations.

    ``weight_of`` finds this rank's part of a weight as a layer uses it, by the
    names of both.
    """

    def __init__(
        self,
        ops: Ops,
        plan: PlanSpec,
        region: TensorParallelRegion,
        weight_of: Callable[[str, str], Weight],
        vocabulary: Vocabulary,
    ) -> None:
        self._ops, self._region, self._weight_of, self._vocabulary = ops, region, weight_of, vocabulary
        self._rows_dim = plan.model.activation_order.index("b")
        self._tied = plan.model.tied_embedding

    def embed(self, lanes: Sequence[Lane], dropouts: Dropouts) -> list[Tensor]:
        """The main lane, and where the first stage embeds for all, what modules will read, in one lane each."""
        names = ["embed", *(f"{MTP}.{number}.embed" for number in range(len(lanes) - 1))]
        embedded = split_lanes(self._ops, self._looked_up("embed", "embed.out", lanes), len(lanes), self._rows_dim)
        return [dropouts.between(lane, "embedding", name) for lane, name in zip(embedded, names, strict=True)]

    def embed_again(self, layer: str, lane: Lane, dropouts: Dropouts) -> Tensor:
        """What a module reads that looks it up itself."""
        embedding = self._looked_up(layer, f"{layer}.embed.out", [lane])
        return dropouts.between(embedding, "embedding", f"{layer}.embed")

    def losses(self, activations: Sequence[Tensor], lanes: Sequence[Lane]) -> list[Tensor]:
        """Each lane's cross-entropy, summed over its counted tokens."""
        entered = self._region.enter(join_lanes(self._ops, activations, self._rows_dim), "head.in")
        weight = self._weight_of("head", "embed.weight" if self._tied else "head.weight")
        labels = [lane.labels for lane in lanes]
        return self._vocabulary.losses(entered, weight, labels, self._region, self._rows_dim)

    def _looked_up(self, layer: str, label: str, lanes: Sequence[Lane]) -> Tensor:
        tokens = [lane.tokens for lane in lanes]
        addend = self._vocabulary.rows(tokens, self._weight_of(layer, "embed.weight"), self._region, self._rows_dim)
        return self._region.leave(addend, label)
