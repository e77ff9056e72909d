"""Positions of tokens: learned vectors that are added to the embedding, or rotary heads of queries and keys.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values of this rank, G query heads of each, D head
size; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.backend_ops import BackendOps, Tensor, Weight
from pipeproof.stages.common.weights import SplitWeights


class Positions:
    """The positions of the plan's model.

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
