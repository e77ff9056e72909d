"""Keys and values of attention where a sequence is split, over time or over context-parallel ranks.

Over time (Seq1F1B, arXiv:2406.03488): forwards run from the first split of a sequence to the last, backwards from the
last to the first. A later split reads leaves of autograd with an earlier split's keys and values. Its backward leaves
their gradients there, and the earlier split's own backward adds them. A recomputed forward uses the same leaves.

Over context-parallel ranks (arXiv:2407.21783, section 3.3.2): rank k has the k-th split of every sequence and gathers
the keys and values of all. Its queries see the keys of their own and earlier positions. Splits are contiguous and
equally long, so the last rank has about twice the mean work of causal attention: nothing balances the load.

Shape letters: B rows, K heads of keys and values of this rank, n positions of a split, S positions, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from pipeproof.stages.common.backend_ops import BackendOps, Tensor

_KeysAndValues: TypeAlias = tuple[list[Tensor], list[Tensor]]
"""Keys, and values, of the splits so far, as later splits read them."""

_SEQUENCE_DIM = 2
"""Of keys and values [B, K, S, D]."""


class EarlierSplits:
    """Keys and values of the splits of each sequence on one stage, kept until the forward of the last split.

    With ``recomputes`` every split is joined in forward and again in backward. The second call uses the tensors of
    the first.
    """

    def __init__(self, ops: BackendOps, num_splits: int, *, recomputes: bool = False) -> None:
        self._ops, self._num_splits, self._recomputes = ops, num_splits, recomputes
        self._sequences: dict[tuple[int, str], _KeysAndValues] = {}
        self._joined: dict[tuple[int, str, int], tuple[_KeysAndValues, tuple[_SharedLeaf, _SharedLeaf]]] = {}

    def join(self, key: Tensor, value: Tensor, *, micro_batch: int, layer: str, split: int) -> list[Tensor]:
        """Join the keys, and the values, of all splits up to this one: two of [B, K, n, D] to two of [B, K, S, D]."""
        if self._num_splits == 1:
            return [key, value]
        sequence, use = (micro_batch, layer), (micro_batch, layer, split)
        is_recomputed = use in self._joined
        if is_recomputed:
            earlier, leaves = self._joined.pop(use)
        else:
            earlier, leaves = self._sequences.pop(sequence, ([], [])), (_SharedLeaf(), _SharedLeaf())
            if self._recomputes:
                self._joined[use] = earlier, leaves
        if split < self._num_splits - 1:
            key, value = self._share(key, leaves[0]), self._share(value, leaves[1])
            if not is_recomputed:
                self._sequences[sequence] = [*earlier[0], leaves[0].tensor], [*earlier[1], leaves[1].tensor]
        each = zip(earlier, (key, value), strict=True)
        return [self._ops.concat([*before, own], _SEQUENCE_DIM) for before, own in each]

    def _share(self, own: Tensor, leaf: _SharedLeaf) -> Tensor:
        """Return the tensor for the split itself; fill ``leaf`` for later splits, unless it is filled already.

        The gradient of ``own`` is the gradient of the leaf plus the incoming one, in this order.
        """

        def backward(gradient: Tensor) -> tuple[Tensor]:
            later = leaf.tensor.grad
            return (self._ops.alias(gradient) if later is None else later + gradient,)

        (seen,) = self._ops.autograd_node(lambda x: (self._ops.alias(x),), backward, own)
        if leaf.tensor is None:
            leaf.tensor = self._ops.leaf(seen)
        return seen


@dataclass(slots=True)
class _SharedLeaf:
    """The leaf that later splits read. Their backwards add to its gradient."""

    tensor: Tensor = None
    """None until the split has been forward."""


_STACKED_SEQUENCE_DIM = 3
"""Of keys and values in one tensor, [2, B, K, n, D]."""


class ContextCollectives(Protocol):
    """Collectives over the context-parallel ranks of one stage, outside autograd.

    With Paddle they block, and sums add in rank order.
    """

    def all_gather(self, tensor: Tensor, dim: int, *, label: str, axis: str = ...) -> Tensor:
        """Concatenate all ranks' tensors along ``dim`` in rank order."""

    def reduce_scatter(self, tensor: Tensor, dim: int, *, label: str, axis: str = ...) -> Tensor:
        """This rank's shard along ``dim`` of the sum over all ranks."""


class GatheredKeys:
    """The counterpart of ``EarlierSplits`` for sequences that are split over context-parallel ranks."""

    def __init__(self, ops: BackendOps, num_ranks: int, collectives: ContextCollectives) -> None:
        self._ops, self._num_ranks, self._collectives = ops, num_ranks, collectives

    def join(self, key: Tensor, value: Tensor, *, micro_batch: int, layer: str, split: int) -> list[Tensor]:
        """Join the keys, and the values, of the ranks up to this one, the ``split``-th: [B, K, n, D] to [B, K, S, D].

        Each direction is one collective for keys and values together. Backward sums the gradients from all ranks'
        queries.
        """
        label = f"{layer}.kv"

        def forward(*own: Tensor) -> tuple[Tensor, ...]:
            whole = self._collectives.all_gather(self._ops.stack(own, 0), _STACKED_SEQUENCE_DIM, label=label, axis="cp")
            seen = whole[:, :, :, : own[0].shape[_STACKED_SEQUENCE_DIM - 1] * (split + 1)]
            return seen[0].contiguous(), seen[1].contiguous()

        def backward(*gradients: Tensor) -> tuple[Tensor, ...]:
            seen = self._ops.stack(gradients, 0)
            num_unseen = self._num_ranks - split - 1
            if num_unseen:
                part = self._ops.zeros_like(seen[:, :, :, : seen.shape[_STACKED_SEQUENCE_DIM] // (split + 1)])
                seen = self._ops.concat([seen, *[part] * num_unseen], _STACKED_SEQUENCE_DIM)
            own = self._collectives.reduce_scatter(seen, _STACKED_SEQUENCE_DIM, label=f"{label}.grad", axis="cp")
            return own[0], own[1]

        return list(self._ops.autograd_node(forward, backward, key, value))
