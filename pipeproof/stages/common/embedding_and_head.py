"""Embedding, positions and head on one rank, for all MTP streams at once.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks, K heads of keys and values of this
rank, G query heads of each, D head size; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.backend_ops import BackendOps, Tensor, Weight
from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.common.weights import SplitWeights
from pipeproof.stages.common.work_items import MtpStream, join_mtp_streams, split_mtp_streams
from pipeproof.stages.describe.mtp_streams import MTP, has_own_embedding


class Positions:
    """The positions of tokens: learned vectors that are added to the embedding, or rotary heads of queries and keys.

    ``tables`` are cosines and sines of the rotary embedding, [S of the model, D] each, as ``BackendOps.rotate`` takes
    them.
    """

    def __init__(self, ops: BackendOps, plan: PlanSpec, weights: SplitWeights, tables: tuple[Tensor, Tensor]) -> None:
        self._ops, self._weights = ops, weights
        self._cos, self._sin = tables
        self._learned = plan.gpt.positions == "learned"
        self._rows_dim = plan.gpt.activation_order.index("b")

    def embedded(self, x: Tensor, weight_of: Callable[[str, str], Weight], bounds: tuple[int, int]) -> Tensor:
        """Embedded tokens [.., H], of the positions between ``bounds``, with the learned vectors, if there are any."""
        if not self._learned:
            return x
        table = weight_of("embed", "embed.positions.weight")
        return self._weights.added(x, table, lambda whole: whole[slice(*bounds)].unsqueeze(self._rows_dim))

    def grouped_heads(self, heads: Tensor, split: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, K, G, S, D], key and value [B, K, S, D] of a sequence split, from [B, K, G + 2, S, D]."""
        if not self._learned:
            return self._ops.rotated_heads(heads, *self.tables(split, heads.shape[3]))
        query, key, value = self._ops.split(heads, [heads.shape[2] - 2, 1, 1], 2)
        return query, key.squeeze(2), value.squeeze(2)

    def tables(self, split: int, length: int) -> tuple[Tensor, Tensor]:
        """The rotary tables of a sequence split; the sequence may be shorter than the model's."""
        positions = slice(split * length, (split + 1) * length)
        return self._cos[positions], self._sin[positions]


class Vocabulary(Protocol):
    """A framework's operations on the vocabulary; this rank has V / T entries. MTP streams join along ``rows_dim``."""

    def rows(self, tokens: Sequence[Tensor], weight: Weight, region: TensorParallelRegion, rows_dim: int, /) -> Tensor:
        """This rank's addend of the embedded tokens, [.., H], from tokens [..] and the weight [V / T, H]."""

    def losses(
        self, entered: Tensor, weight: Weight, labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int, /
    ) -> list[Tensor]:
        """Each stream's cross-entropy, a scalar, summed over its counted tokens, from the activations [.., H]."""


class EmbeddingAndHead:
    """Embedding lookups and the losses of one stage.

    ``weight_of(layer, weight)`` returns this rank's shard of a weight as that layer uses it.
    """

    def __init__(
        self,
        ops: BackendOps,
        plan: PlanSpec,
        region: TensorParallelRegion,
        weight_of: Callable[[str, str], Weight],
        vocabulary: Vocabulary,
        positions: Positions,
    ) -> None:
        self._positions = positions
        self._ops, self._region, self._weight_of, self._vocabulary = ops, region, weight_of, vocabulary
        self._rows_dim = plan.gpt.activation_order.index("b")
        self._tied, self._modules_have_own = plan.gpt.tied_embedding, has_own_embedding(plan.gpt)

    def embed(self, streams: Sequence[MtpStream], dropouts: Dropouts) -> list[Tensor]:
        """The main stream; if the first stage embeds for all modules, also one stream for each module."""
        names = ["embed", *(f"{MTP}.{number}.embed" for number in range(len(streams) - 1))]
        joined = self._lookup("embed", "embed.out", streams)
        joined = self._positions.embedded(joined, self._weight_of, dropouts.positions_of(joined))
        embedded = split_mtp_streams(self._ops, joined, len(streams), self._rows_dim)
        return [dropouts.between(stream, "embedding", name) for stream, name in zip(embedded, names, strict=True)]

    def embed_for_module(self, layer: str, stream: MtpStream, dropouts: Dropouts) -> Tensor:
        """The embedded tokens of a module that looks them up itself."""
        embedding = self._lookup(layer, f"{layer}.embed.out", [stream])
        return dropouts.between(embedding, "embedding", f"{layer}.embed")

    def losses(self, activations: Sequence[Tensor], streams: Sequence[MtpStream]) -> list[Tensor]:
        """Each stream's cross-entropy, summed over its counted tokens."""
        entered = self._region.enter(join_mtp_streams(self._ops, activations, self._rows_dim), "head.in")
        weight = self._weight_of("head", "embed.weight" if self._tied else "head.weight")
        labels = [stream.labels for stream in streams]
        return self._vocabulary.losses(entered, weight, labels, self._region, self._rows_dim)

    def _lookup(self, layer: str, label: str, streams: Sequence[MtpStream]) -> Tensor:
        tokens = [stream.tokens for stream in streams]
        name = f"{layer}.embed.weight" if layer != "embed" and self._modules_have_own else "embed.weight"
        addend = self._vocabulary.rows(tokens, self._weight_of(layer, name), self._region, self._rows_dim)
        return self._region.leave(addend, label)
