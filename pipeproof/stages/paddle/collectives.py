"""Tensor-parallel collectives as autograd sees them.

Who moves the data is not known here: a ``TensorParallelCollectives`` does. The
ways into and out of the parallel region follow Megatron-LM (arXiv:1909.08053,
the conjugate operators f and g) and, with sequence parallelism,
arXiv:2205.05198 (g and g-bar).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import paddle
from paddle.autograd import PyLayer

from pipeproof.stages.paddle.gathered import GatheredInput

Tensor: TypeAlias = paddle.Tensor


class TensorParallelCollectives(Protocol):
    """Collectives over the tensor-parallel ranks of one stage, blocking, outside autograd.

    Sums add in TP rank order, ((r0 + r1) + r2) + ..: that makes the bits of a
    run a function of its plan. Inputs are contiguous.
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
        self._collectives = collectives
        self._gathers_again = gathers_again and self.sequence_dim is not None

    def enter(self, activation: Tensor, label: str) -> Tensor:
        """From between blocks into column-parallel weights: all tokens, on every rank.

        Backward sums the ranks' input gradients, under ``label.grad``.
        """
        if self.num_ranks == 1:
            return activation
        entered = _Enter.apply(activation, self, label)
        self._forget(entered, activation, label)
        return entered

    def enter_each(self, activations: Sequence[Tensor], labels: Sequence[str]) -> list[Tensor]:
        """``enter`` of several, whose collectives come in this order, and backward in the other."""
        if self.num_ranks == 1:
            return list(activations)
        entered = list(_EnterEach.apply(self, labels, *activations))
        for made, own, label in zip(entered, activations, labels, strict=True):
            self._forget(made, own, label)
        return entered

    def _forget(self, entered: Tensor, activation: Tensor, label: str) -> None:
        """Let who reads what entered forget it, if it is to be gathered again."""
        if self._gathers_again:
            own = activation.detach()
            GatheredInput(lambda: self.spread(own, f"{label}.again")).mark(entered)

    def leave(self, partial: Tensor, label: str) -> Tensor:
        """From a row-parallel product, one addend per rank, to the activation between blocks."""
        return partial if self.num_ranks == 1 else _Leave.apply(partial, self, label)

    def sum(self, partial: Tensor, label: str) -> Tensor:
        """The sum of every rank's addend on every rank, which all go on to use alike."""
        return _Sum.apply(partial, self, label)

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
            return tensor.clone()
        return self.collectives.all_gather(tensor.contiguous(), self.sequence_dim, label=label)

    def reduce(self, tensor: Tensor, label: str) -> Tensor:
        """The sum over ranks, and of it what one rank holds between blocks."""
        if self.sequence_dim is None:
            return self.collectives.all_reduce(tensor.contiguous(), label=label)
        return self.collectives.reduce_scatter(tensor.contiguous(), self.sequence_dim, label=label)


class _Enter(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, activation: Tensor, region: TensorParallelRegion, label: str) -> Tensor:
        ctx.region, ctx.label = region, label
        return region.spread(activation, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.region.reduce(grad, f"{ctx.label}.grad")


class _EnterEach(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """One node of the graph, so that no order of backward is left to autograd."""

    @staticmethod
    def forward(
        ctx: Any, region: TensorParallelRegion, labels: Sequence[str], *activations: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.region, ctx.labels = region, labels
        return tuple(region.spread(x, label) for x, label in zip(activations, labels, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        calls = [*zip(grads, ctx.labels, strict=True)]
        return tuple([ctx.region.reduce(grad, f"{label}.grad") for grad, label in reversed(calls)][::-1])


class _Leave(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, partial: Tensor, region: TensorParallelRegion, label: str) -> Tensor:
        ctx.region, ctx.label = region, label
        return region.reduce(partial, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.region.spread(grad, f"{ctx.label}.grad")


class _Sum(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, partial: Tensor, region: TensorParallelRegion, label: str) -> Tensor:
        return region.collectives.all_reduce(partial.contiguous(), label=label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()
