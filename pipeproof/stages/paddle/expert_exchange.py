"""Tokens on their way to experts and back, as autograd sees it: moves, sums in a stated order, exchanges over ``ep``.

Gradients are moved as their tokens were, the other way; nothing is added where
nothing met. Where a token's visits meet, they are added in the order in which
the token chose its experts.

Shape letters: N tokens, k experts of each, V = N k visits, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
from paddle.autograd import PyLayer

Tensor: TypeAlias = paddle.Tensor
Places: TypeAlias = npt.NDArray[np.int64]


class ExpertCollectives(Protocol):
    """What is exchanged over the expert-parallel ranks of one stage, blocking, outside autograd."""

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str) -> Tensor:
        """``send[m]`` of this rank's rows, in order, to each member m; ``receive[m]`` from each, joined in order."""
        ...


class ExpertRegion:
    """One rank's view of its expert-parallel group; with one rank nothing is exchanged."""

    def __init__(self, rank: int, num_ranks: int, collectives: ExpertCollectives | None) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"expert-parallel rank {rank} of {num_ranks}: must be 0 to {num_ranks - 1}")
        if num_ranks > 1 and collectives is None:
            raise ValueError(f"{num_ranks} expert-parallel ranks need collectives, got None")
        self.rank, self.num_ranks = rank, num_ranks
        self._collectives = collectives

    def counts(self, own: Places, label: str) -> Places:
        """From the visits that own tokens make to each expert: [ranks, own experts], of each rank's to each of ours."""
        each = len(own) // self.num_ranks
        if self.num_ranks == 1:
            return own.reshape([1, each])
        sizes = [each] * self.num_ranks
        told = self.collectives.all_to_all(paddle.to_tensor(own), sizes, sizes, label=label)
        return np.asarray(told.numpy()).reshape([self.num_ranks, each])

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], label: str) -> Tensor:
        """Rows to the ranks that ``send`` counts them for; their gradients come back under ``label.grad``."""
        return rows if self.num_ranks == 1 else _Exchange.apply(rows, self, tuple(send), tuple(receive), label)

    @property
    def collectives(self) -> ExpertCollectives:
        """What moves the data; there where there is more than one rank."""
        assert self._collectives is not None
        return self._collectives


class _Exchange(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, region: ExpertRegion, send: Sequence[int], receive: Sequence[int], label: str
    ) -> Tensor:
        ctx.region, ctx.send, ctx.receive, ctx.label = region, send, receive, label
        return region.collectives.all_to_all(rows.contiguous(), send, receive, label=label)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.region.collectives.all_to_all(
            gradient.contiguous(), ctx.receive, ctx.send, label=f"{ctx.label}.grad"
        )


def fork(activation: Tensor, num_readers: int) -> list[Tensor]:
    """One tensor for each reader; their gradients are added in the order of the readers."""
    return list(_Fork.apply(activation, num_readers))


def reorder(rows: Tensor, order: Places) -> Tensor:
    """The rows in another order: row i of the result is row ``order[i]``, each exactly once."""
    return _Reorder.apply(rows, order) if len(order) else rows


def visits(tokens: Tensor, order: Places, num_visits: int) -> Tensor:
    """[N, H] to [V, H]: each token once for each of its k = ``num_visits`` experts, in ``order`` of [N, k] flattened.

    A token's gradient adds those of its visits in the order of its choice.
    """
    copies = paddle.stack(fork(tokens, num_visits), axis=1)
    return reorder(copies.reshape([-1, tokens.shape[-1]]), order)


def weighted(results: Tensor, weights: Tensor) -> Tensor:
    """What a token gets of its visits: [N, k, H] and [N, k] to [N, H], added in the order of its choice."""
    addends = [
        result * weight.unsqueeze(-1)
        for result, weight in zip(paddle.unbind(results, axis=1), paddle.unbind(weights, axis=1), strict=True)
    ]
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total


class _Fork(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, activation: Tensor, num_readers: int) -> tuple[Tensor, ...]:
        return tuple(activation.clone() for _ in range(num_readers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        for gradient in gradients[1:]:
            total = total + gradient
        return total


class _Reorder(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Places) -> Tensor:
        ctx.order = order
        return paddle.index_select(rows, paddle.to_tensor(order), axis=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return paddle.index_select(gradient, paddle.to_tensor(np.argsort(ctx.order)), axis=0)
