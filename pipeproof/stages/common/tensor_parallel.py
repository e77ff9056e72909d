"""Tensor-parallel collectives with their gradients.

A ``TensorParallelCollectives`` moves the data. The operators into and out of the parallel region follow Megatron-LM
(arXiv:1909.08053, the conjugate operators f and g) and, with sequence parallelism, arXiv:2205.05198 (g and g-bar).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from pipeproof.stages.common.backend_ops import BackendOps, Tensor


class TensorParallelCollectives(Protocol):
    """Collectives over the tensor-parallel ranks of one stage, outside autograd. Inputs are contiguous.

    With Paddle they block, and sums add in TP rank order, ((r0 + r1) + r2) + ..: so the plan determines the bits of a
    run. With PyTorch on a GPU the result is ready for the next kernel on the current stream; the host does not wait.
    """

    def all_reduce(self, tensor: Tensor, *, label: str, reduction: str = "sum") -> Tensor:
        """The ``sum`` or ``max`` over all ranks, in a new tensor of the same shape."""

    def all_gather(self, tensor: Tensor, dim: int, *, label: str) -> Tensor:
        """Concatenate all ranks' tensors along ``dim`` in rank order."""

    def reduce_scatter(self, tensor: Tensor, dim: int, *, label: str) -> Tensor:
        """This rank's shard along ``dim`` of the sum over all ranks."""


class TensorParallelRegion:
    """One rank's view of its tensor-parallel group, with the differentiable operators into and out of it.

    ``sequence_dim`` is the dim along which activations between blocks are sharded, None without sequence parallelism.
    With one rank no collective is issued. With ``regathers`` the gathered input is not kept for weight gradients; W
    gathers it again, under ``label.again``.
    """

    def __init__(
        self,
        ops: BackendOps,
        rank: int,
        num_ranks: int,
        sequence_dim: int | None,
        collectives: TensorParallelCollectives | None,
        *,
        regathers: bool = False,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"tensor-parallel rank {rank} of {num_ranks}: must be 0 to {num_ranks - 1}")
        if num_ranks > 1 and collectives is None:
            raise ValueError(f"{num_ranks} tensor-parallel ranks need collectives, got None")
        self.rank, self.num_ranks = rank, num_ranks
        self.sequence_dim = sequence_dim if num_ranks > 1 else None
        self._ops, self._collectives = ops, collectives
        self._regathers = regathers and self.sequence_dim is not None

    def enter(self, activation: Tensor, label: str) -> Tensor:
        """Enter column-parallel weights from between blocks: all tokens, on every rank.

        Backward sums the ranks' input gradients, under ``label.grad``.
        """
        return self.enter_each([activation], [label])[0]

    def enter_each(self, activations: Sequence[Tensor], labels: Sequence[str]) -> list[Tensor]:
        """``enter`` for several tensors. Collectives run in this order, and in reverse order in backward.

        They are one node of the graph, so autograd cannot choose another order in backward.
        """
        if self.num_ranks == 1:
            return list(activations)

        def forward(*shards: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.spread(shard, label) for shard, label in zip(shards, labels, strict=True))

        def backward(*gradients: Tensor) -> tuple[Tensor, ...]:
            calls = [*zip(gradients, labels, strict=True)]
            return tuple([self.reduce(gradient, f"{label}.grad") for gradient, label in reversed(calls)][::-1])

        entered = list(self._ops.autograd_node(forward, backward, *activations))
        if self._regathers:
            for output, shard, label in zip(entered, activations, labels, strict=True):
                self._ops.regather_input(output, partial(self.spread, shard.detach(), f"{label}.again"))
        return entered

    def leave(self, addend: Tensor, label: str) -> Tensor:
        """Leave a row-parallel product: one addend per rank becomes the activation between blocks."""
        if self.num_ranks == 1:
            return addend
        (left,) = self._ops.autograd_node(
            lambda own: (self.reduce(own, label),),
            lambda gradient: (self.spread(gradient, f"{label}.grad"),),
            addend,
        )
        return left

    def sum(self, addend: Tensor, label: str) -> Tensor:
        """The sum of all ranks' addends, on every rank. All ranks use it in the same way."""
        (total,) = self._ops.autograd_node(
            lambda own: (self.collectives.all_reduce(own.contiguous(), label=label),),
            lambda gradient: (self._ops.alias(gradient),),
            addend,
        )
        return total

    def max(self, tensor: Tensor, label: str) -> Tensor:
        """The maximum over all ranks; no gradient flows through it."""
        return self.collectives.all_reduce(tensor.detach().contiguous(), label=label, reduction="max")

    @property
    def collectives(self) -> TensorParallelCollectives:
        """The collectives; they are present if there is more than one rank."""
        assert self._collectives is not None
        return self._collectives

    def spread(self, tensor: Tensor, label: str) -> Tensor:
        """All tokens, from this rank's tokens between blocks. No collective without sequence parallelism."""
        if self.sequence_dim is None:
            return self._ops.alias(tensor)
        return self.collectives.all_gather(tensor.contiguous(), self.sequence_dim, label=label)

    def reduce(self, tensor: Tensor, label: str) -> Tensor:
        """The part of the sum over ranks that this rank holds between blocks."""
        if self.sequence_dim is None:
            return self.collectives.all_reduce(tensor.contiguous(), label=label)
        return self.collectives.reduce_scatter(tensor.contiguous(), self.sequence_dim, label=label)
