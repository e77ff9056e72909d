"""Dropout on one rank: its part of the masks of ``describe.synthetic``, in the layout of the tensor that they multiply.

Masks are drawn on the host and copied when they are needed.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values of this rank, G query heads of each.
"""

from __future__ import annotations

from pipeproof.stages.common.backend_ops import BackendOps, Tensor
from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.describe.boundary import micro_batch_size
from pipeproof.stages.describe.synthetic import DropoutKeys, DropoutMask, DropoutSite, dropout_gain, dropout_rate


class Dropouts:
    """Dropout of one micro-batch, or one split of its sequences, on one rank.

    Calls are independent of each other, so a part that is recomputed in backward has the same masks.
    """

    def __init__(self, ops: BackendOps, keys: DropoutKeys, split: int, region: TensorParallelRegion) -> None:
        self._ops, self._keys, self._split, self._region = ops, keys, split, region
        self._plan = plan = keys.plan
        size = micro_batch_size(plan, keys.index % plan.schedule.num_micro_batches)
        self._length = size.seq_length // (plan.schedule.num_sequence_splits * plan.topology.cp)
        self._batch_first = plan.gpt.activation_order == "bsh"

    def between(self, activation: Tensor, site: DropoutSite, layer: str) -> Tensor:
        """Apply dropout to the activation after ``layer``, [S, B, H] or [B, S, H]."""
        rate = dropout_rate(self._plan, site)
        if not rate:
            return activation
        mask = self._keys.of_tokens(layer, rate, self.positions_of(activation))
        return activation * self._factors(mask if self._batch_first else mask.swapaxes(0, 1), rate, activation)

    def positions_of(self, activation: Tensor) -> tuple[int, int]:
        """The first position, and the one after the last, of an activation between layers, [S, B, H] or [B, S, H]."""
        length = activation.shape[1 if self._batch_first else 0]
        first = self._region.rank * length if self._region.sequence_dim is not None else 0
        start = self._split * self._length + first
        return start, start + length

    def of_attention(self, layer: str, like: Tensor) -> Tensor | None:
        """Factors of this rank's probabilities, [B, K, G, S, keys], or None without dropout.

        ``like`` is the query, [B, K, G, ..].
        """
        rate = dropout_rate(self._plan, "attention")
        if not rate:
            return None
        rows, num_kv_heads, group = like.shape[:3]
        num_heads, start = num_kv_heads * group, self._split * self._length
        heads = self._region.rank * num_heads, (self._region.rank + 1) * num_heads
        mask = self._keys.of_attention(layer, rate, heads, (start, start + self._length))
        return self._factors(mask.reshape([rows, num_kv_heads, group, *mask.shape[2:]]), rate, like)

    def _factors(self, mask: DropoutMask, rate: float, like: Tensor) -> Tensor:
        """The gain where an element is kept, else 0."""
        return self._ops.masked_gain(mask, dropout_gain(rate), like)
