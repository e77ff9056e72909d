"""Dropout on one rank: its part of the masks that ``describe.dropout`` keys, in the layout of what it multiplies.

Masks are drawn on the host and copied over as they are needed: on a GPU the
host waits, so a plan that drops is for comparisons, and is not captured in a graph.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values of this rank, G query heads of each.
"""

from __future__ import annotations

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.collectives import TensorParallelRegion
from pipeproof.stages.common.ops import Ops, Tensor
from pipeproof.stages.describe.boundary import micro_batch_size
from pipeproof.stages.describe.dropout import DropoutKeys, DropoutPlace, Kept, dropout_gain, dropout_rate


class Dropouts:
    """What is dropped of one micro-batch, or one piece of its sequences, on one rank.

    Nothing is kept from one call to the next: what is computed again on the way back has the same masks.
    """

    def __init__(
        self, ops: Ops, plan: PlanSpec, step: int, index: int, piece: int, region: TensorParallelRegion
    ) -> None:
        self._ops, self._plan, self._piece, self._region = ops, plan, piece, region
        self._keys = DropoutKeys(plan, step, index)
        size = micro_batch_size(plan, index % plan.schedule.num_micro_batches)
        self._length = size.seq_length // (plan.schedule.num_sequence_splits * plan.topology.cp)
        self._batch_first = plan.model.activation_order == "bsh"

    def between(self, activation: Tensor, place: DropoutPlace, layer: str) -> Tensor:
        """Of what one rank holds between layers, [S, B, H] or [B, S, H]; ``layer`` is the name of what made it."""
        rate = dropout_rate(self._plan, place)
        if not rate:
            return activation
        own = activation.shape[1 if self._batch_first else 0]
        start = self._piece * self._length + (self._region.rank * own if self._region.sequence_dim is not None else 0)
        kept = self._keys.of_tokens(layer, rate, (start, start + own))
        return activation * self._factors(kept if self._batch_first else kept.transpose([1, 0, 2]), rate, activation)

    def of_attention(self, layer: str, like: Tensor) -> Tensor | None:
        """What this rank's probabilities are multiplied by, [B, K, G, S, keys]; ``like`` is the query, [B, K, G, ..].

        None where none are dropped.
        """
        rate = dropout_rate(self._plan, "attention")
        if not rate:
            return None
        rows, num_kv_heads, group = like.shape[:3]
        own, start = num_kv_heads * group, self._piece * self._length
        heads = self._region.rank * own, (self._region.rank + 1) * own
        kept = self._keys.of_attention(layer, rate, heads, (start, start + self._length))
        return self._factors(kept.reshape([rows, num_kv_heads, group, *kept.shape[2:]]), rate, like)

    def _factors(self, kept: Kept, rate: float, like: Tensor) -> Tensor:
        """The gain where an element is kept, else 0."""
        return self._ops.masked_gain(kept, dropout_gain(rate), like)
