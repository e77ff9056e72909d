"""Tokens on their way to experts and back, as autograd sees it: exchanges over ``ep``, and moves of rows.

Shape letters: N tokens, k experts of each, V = N k visits, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import torch

Tensor: TypeAlias = torch.Tensor


class ExpertCollectives(Protocol):
    """What is exchanged over the expert-parallel ranks of one stage, outside autograd."""

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

    def counts(self, own: Tensor, label: str) -> Tensor:
        """From the visits that own tokens make to each expert: [ranks, own experts], of each rank's to each of ours."""
        each = len(own) // self.num_ranks
        if self.num_ranks == 1:
            return own.reshape(1, each)
        sizes = [each] * self.num_ranks
        return self.collectives.all_to_all(own, sizes, sizes, label=label).reshape(self.num_ranks, each)

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], label: str) -> Tensor:
        """Rows to the ranks that ``send`` counts them for; their gradients come back under ``label.grad``."""
        return rows if self.num_ranks == 1 else _Exchange.apply(rows, self, tuple(send), tuple(receive), label)

    @property
    def collectives(self) -> ExpertCollectives:
        """What moves the data; there where there is more than one rank."""
        assert self._collectives is not None
        return self._collectives


class _Exchange(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, region: ExpertRegion, send: Sequence[int], receive: Sequence[int], label: str
    ) -> Tensor:
        ctx.region, ctx.send, ctx.receive, ctx.label = region, send, receive, label
        return region.collectives.all_to_all(rows.contiguous(), send, receive, label=label)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        back = ctx.region.collectives.all_to_all(
            gradient.contiguous(), ctx.receive, ctx.send, label=f"{ctx.label}.grad"
        )
        return back, None, None, None, None


def inverse(order: Tensor) -> Tensor:
    """Of an order of rows, the one that undoes it."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def visits(tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Each token once for each of its experts: [N, H] to [V, H], row i that of visit ``order[i]``, in one move.

    Visit v is one of token ``v // k``; ``back`` undoes ``order``. A token's gradient is the sum over its experts.
    """
    return _Visits.apply(tokens, order, back)


class _Visits(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.num_tokens = len(tokens)
        return tokens.index_select(0, order // (len(order) // len(tokens)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (back,) = ctx.saved_tensors
        by_token = gradient.index_select(0, back).unflatten(0, (ctx.num_tokens, -1))
        return by_token.sum(1), None, None


def reorder(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """The rows in another order: row i of the result is row ``order[i]``, each exactly once; ``back`` undoes it."""
    return _Reorder.apply(rows, order, back)


class _Reorder(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """A move without addition, so that backward is a move, too, and not a sum over places."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None
