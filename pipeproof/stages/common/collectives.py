"""Tensor-parallel collectives as autograd sees them.

Who moves the data is not known here: a ``TensorParallelCollectives`` does. The
ways into and out of the parallel region follow Megatron-LM (arXiv:1909.08053,
the conjugate operators f and g) and, with sequence parallelism,
arXiv:2205.05198 (g and g-bar).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

from pipeproof.stages.common.ops import Ops, Tensor


class TensorParallelCollectives(Protocol):
    """Collectives over the tensor-parallel ranks of one stage, outside autograd. Inputs are contiguous.

    With Paddle they block, and sums add in TP rank order, ((r0 + r1) + r2) + ..: that makes the bits of a run a
    function of its plan. With PyTorch, what they return on a GPU is ready for what is launched next on the current
    stream; the host does not wait.
    """

    def all_reduce(self, tensor: Tensor, *, label: str, reduction: str = "sum") -> Tensor:
        """The ``sum`` or ``max`` over all ranks, in a new tensor of the same shape."""
        ...

    def all_gather(self, tensor: Tensor, dim: int, *, label: str) -> Tensor:
        """All ranks' tensors joined along ``dim`` in rank order."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int, *, label: str) -> Tensor:
        """This rank's part along ``dim`` of the sum over all ranks."""
        ...


class TensorParallelRegion:
    """One rank's view of its tensor-parallel group, with the differentiable ways in and out.

    ``sequence_dim`` is the dim along which activations between blocks are
    sharded, None without sequence parallelism. With one rank nothing is issued.
    With ``gathers_again`` what is gathered on the way in is not kept for the
    gradients of weights, which gather it again, under ``label.again``.
    """

    def __init__(
        self,
        ops: Ops,
        rank: int,
        num_ranks: int,
        sequence_dim: int | None,
        collectives: TensorParallelCollectives | None,
        *,
        gathers_again: bool = False,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"tensor-parallel rank {rank} of {num_ranks}: must be 0 to {num_ranks - 1}")
        if num_ranks > 1 and collectives is None:
            raise ValueError(f"{num_ranks} tensor-parallel ranks need collectives, got None")
        self.rank, self.num_ranks = rank, num_ranks
        self.sequence_dim = sequence_dim if num_ranks > 1 else None
        self._ops, self._collectives = ops, collectives
        self._gathers_again = gathers_again and self.sequence_dim is not None

    def enter(self, activation: Tensor, label: str) -> Tensor:
        """From between blocks into column-parallel weights: all tokens, on every rank.

        Backward sums the ranks' input gradients, under ``label.grad``.
        """
        return self.enter_each([activation], [label])[0]

    def enter_each(self, activations: Sequence[Tensor], labels: Sequence[str]) -> list[Tensor]:
        """``enter`` of several, whose collectives come in this order, and backward in the other.

        One node of the graph for all that enter together, so that no order of backward is left to autograd.
        """
        if self.num_ranks == 1:
            return list(activations)

        def forward(*owns: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.spread(own, label) for own, label in zip(owns, labels, strict=True))

        def backward(*gradients: Tensor) -> tuple[Tensor, ...]:
            calls = [*zip(gradients, labels, strict=True)]
            return tuple([self.reduce(gradient, f"{label}.grad") for gradient, label in reversed(calls)][::-1])

        entered = list(self._ops.passed(forward, backward, *activations))
        if self._gathers_again:
            for made, own, label in zip(entered, activations, labels, strict=True):
                self._ops.gather_again(made, partial(self.spread, own.detach(), f"{label}.again"))
        return entered

    def leave(self, addend: Tensor, label: str) -> Tensor:
        """From a row-parallel product, one addend per rank, to the activation between blocks."""
        if self.num_ranks == 1:
            return addend
        (left,) = self._ops.passed(
            lambda own: (self.reduce(own, label),),
            lambda gradient: (self.spread(gradient, f"{label}.grad"),),
            addend,
        )
        return left

    def sum(self, addend: Tensor, label: str) -> Tensor:
        """The sum of every rank's addend on every rank, which all go on to use alike."""
        (total,) = self._ops.passed(
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
        """What moves the data; there where there is more than one rank."""
        assert self._collectives is not None
        return self._collectives

    def spread(self, tensor: Tensor, label: str) -> Tensor:
        """All tokens from what one rank holds between blocks; issues nothing without sequence parallelism."""
        if self.sequence_dim is None:
            return self._ops.alias(tensor)
        return self.collectives.all_gather(tensor.contiguous(), self.sequence_dim, label=label)

    def reduce(self, tensor: Tensor, label: str) -> Tensor:
        """The sum over ranks, and of it what one rank holds between blocks."""
        if self.sequence_dim is None:
            return self.collectives.all_reduce(tensor.contiguous(), label=label)
        return self.collectives.reduce_scatter(tensor.contiguous(), self.sequence_dim, label=label)
