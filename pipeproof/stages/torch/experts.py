"""Experts on PyTorch, whose choice and order of rows stay on the device.

Shape letters: as in ``stages.common.experts``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.stages.common import experts as common
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.functional import Groups

Tensor: TypeAlias = torch.Tensor

reorder = partial(common.reorder, OPS)


def choose(logits: Tensor, moe: MoeSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Implement ``Experts``' choice of experts and their weights."""
    scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    gains = scores.gather(-1, chosen)
    if moe.normalize:
        gains = gains / gains.sum(-1, keepdim=True)
    return chosen, gains


def weighted(results: Tensor, weights: Tensor) -> Tensor:
    """Implement ``Experts``' weighted sum."""
    return (results * weights.unsqueeze(-1)).sum(dim=1)


class TorchExperts(common.Experts):
    """Experts on the device.

    With one expert-parallel rank the host reads nothing, except for types without a grouped product. With several it
    reads the numbers of rows: to and from each rank, or of its own experts. In ``fixed_shapes`` it reads nothing with
    ``dispatcher: all_gather``: there are rows for as many visits as there can be, and products leave out the rest.
    """

    fixed_shapes = False

    _choose = staticmethod(choose)
    _weighted = staticmethod(weighted)

    def _counts(self, chosen: Tensor) -> Tensor:
        flat = chosen.flatten()
        counts = torch.zeros(self._moe.num_experts, dtype=torch.int64, device=flat.device)
        return counts.scatter_add_(0, flat, torch.ones_like(flat))  # bincount would make the host wait

    def _visit(self, tokens: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)  # by expert, then by token
        back = inverse(order)
        rows = visits(tokens, order, back)
        is_local = self._region.num_ranks == 1
        outputs = self._swiglu(rows, Groups(counts)) if is_local else self._exchanged(rows, counts)
        return reorder(outputs, back, order).reshape(*chosen.shape, tokens.shape[-1])

    def _exchanged(self, rows: Tensor, sent: Tensor) -> Tensor:
        """Run rows through the experts of all ranks. Rows are ordered by expert; ``sent`` [E] counts them."""
        region = self._region
        received = region.counts(sent, f"{self._name}.counts")  # [R, E / R]
        send, receive = torch.stack([sent.reshape(region.num_ranks, -1).sum(1), received.sum(1)]).tolist()
        arrived = region.exchange(rows, send, receive, f"{self._name}.dispatch")
        experts = torch.arange(received.shape[1], device=sent.device).repeat(len(received))
        by_expert = experts.repeat_interleave(received.flatten(), output_size=sum(receive)).argsort(stable=True)
        by_rank = inverse(by_expert)  # rows arrive by rank; by expert, they are ordered by rank, then by token
        outputs = self._swiglu(reorder(arrived, by_expert, by_rank), Groups(received.sum(0)))
        return region.exchange(reorder(outputs, by_rank, by_expert), receive, send, f"{self._name}.combine")

    def _visit_own(self, tokens: Tensor, chosen: Tensor, gains: Tensor) -> Tensor:
        own, top_k = self._own_experts, chosen.shape[1]
        experts = chosen.flatten() - own.start
        elsewhere = (experts < 0) | (experts >= len(own))
        order = experts.masked_fill(elsewhere, len(own)).argsort(stable=True)  # by expert, then by token; others last
        counts = torch.zeros(len(own) + 1, dtype=torch.int64, device=order.device)
        counts = counts.scatter_add_(0, experts.masked_fill(elsewhere, len(own)), torch.ones_like(experts))[:-1]
        most = len(tokens) * min(top_k, len(own))
        num_rows = most if self.fixed_shapes else int(counts.sum())
        places = Places(order[:num_rows], inverse(order), elsewhere)
        rows = _ToRows.apply(tokens, places, top_k)
        outputs = self._swiglu(rows, Groups(counts)) * _ToRows.apply(gains.reshape(-1, 1), places, 1)
        return _ToTokens.apply(outputs, places, top_k)

    def _activation(self, gate: Tensor, up: Tensor, groups: Groups) -> Tensor:
        return self._gated(gate, up)


class FixedTorchExperts(TorchExperts):
    """Experts of a step that is replayed, whose shapes are those of the captured one."""

    fixed_shapes = True


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation of rows."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def visits(tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Copy each token for each of its experts: [N, H] to [V, H]. Row i belongs to visit ``order[i]``.

    Visit v is one of token ``v // k``; ``back`` is the inverse of ``order``. A token's gradient is the sum over its
    experts.
    """
    return _Visits.apply(tokens, order, back)


class Places(NamedTuple):
    """The visits [V] to this rank's experts among those of tokens to all experts, k of each token.

    Row i of this rank belongs to visit ``order[i]``, ``back`` is the row of a visit. Visits ``elsewhere`` have no row,
    though there may be rows left for them.
    """

    order: Tensor
    back: Tensor
    elsewhere: Tensor

    def by_visit(self, rows: Tensor) -> Tensor:
        """The rows [n, H] by visit [V, H], zero for those elsewhere."""
        if not len(rows):
            return rows.new_zeros((len(self.back), rows.shape[1]))
        taken = rows.index_select(0, self.back.clamp(max=len(rows) - 1))
        return taken.masked_fill_(self.elsewhere.unsqueeze(1), 0)


class _ToRows(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """Values [V / k, H] for each row of ``places`` [n, H]. Backward adds the visits of each in their order."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Places, num_visits: int) -> Tensor:
        ctx.places, ctx.num_visits = places, num_visits
        return values.index_select(0, places.order // num_visits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.places.by_visit(gradient).unflatten(0, (-1, ctx.num_visits)).sum(1), None, None


class _ToTokens(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """Sums over the visits of each token [V / k, H], from rows [n, H]: the adjoint of ``_ToRows``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Places, num_visits: int) -> Tensor:
        ctx.places, ctx.num_visits = places, num_visits
        return places.by_visit(rows).unflatten(0, (-1, num_visits)).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient.index_select(0, ctx.places.order // ctx.num_visits), None, None


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
