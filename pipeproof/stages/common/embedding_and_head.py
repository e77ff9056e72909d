"""Embedding and head on one rank, for all MTP streams at once.

Shape letters: S sequence, B rows, H hidden, V vocabulary, T tensor-parallel ranks; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.backend_ops import BackendOps, Tensor, Weight
from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.common.positions import Positions
from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.common.work_items import MtpStream, join_mtp_streams, split_mtp_streams
from pipeproof.stages.describe.mtp_streams import MTP


class Vocabulary(Protocol):
    """A framework's operations on the vocabulary; this rank has V / T entries. MTP streams join along ``rows_dim``."""

    def rows(self, tokens: Sequence[Tensor], weight: Weight, region: TensorParallelRegion, rows_dim: int, /) -> Tensor:
        """This rank's addend of the embedded tokens, [.., H], from tokens [..] and the weight [V / T, H]."""
        ...

    def losses(
        self, entered: Tensor, weight: Weight, labels: Sequence[Tensor], region: TensorParallelRegion, rows_dim: int, /
    ) -> list[Tensor]:
        """Each stream's cross-entropy, a scalar, summed over its counted tokens, from the activations [.., H]."""
        ...


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
        self._tied = plan.gpt.tied_embedding

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
        addend = self._vocabulary.rows(tokens, self._weight_of(layer, "embed.weight"), self._region, self._rows_dim)
        return self._region.leave(addend, label)
