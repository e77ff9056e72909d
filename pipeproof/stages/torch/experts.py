"""Experts and routers on PyTorch. Choices, the order of rows, losses, biases and visits stay on the device.

Shape letters: as in ``stages.common.experts``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pipeproof.specs.model import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common import experts as common
from pipeproof.stages.common.experts import Balance
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.functional import Groups, fork, wide_type

Tensor: TypeAlias = torch.Tensor

reorder = partial(common.reorder, OPS)


def choose(
    logits: Tensor, moe: MoeSpec, bias: Tensor | None = None, fixed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Implement ``Experts``' choice of experts and their weights."""
    scores = _SCORES[moe.score](logits)
    ranked = scores.detach() if bias is None else scores.detach() + bias
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k] if fixed is None else fixed
    gains = scores.gather(-1, chosen)
    if moe.normalize:
        gains = gains / gains.sum(-1, keepdim=True)
    if moe.combine == "expert":
        chosen, order = chosen.sort(dim=-1, stable=True)
        gains = gains.gather(-1, order)
    return chosen, gains if moe.routed_scale == 1.0 else gains * moe.routed_scale


_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


def weighted(results: Tensor, weights: Tensor) -> Tensor:
    """Implement ``Experts``' weighted sum, in one kernel."""
    return (results * weights.unsqueeze(-1)).sum(dim=1).to(results.dtype)


def weighted_in_order(results: Tensor, weights: Tensor) -> Tensor:
    """Implement ``Experts``' weighted sum, one visit after another, 16-bit types in float32."""
    addends = OPS.widened(results) * OPS.widened(weights).unsqueeze(-1)
    return functools.reduce(torch.add, addends.unbind(1)).to(results.dtype)


class TorchExperts(common.Experts):
    """Experts on the device.

    With one expert-parallel rank the host reads nothing, except for types without a grouped product. With several ranks
    it reads the numbers of rows: to and from each rank, or of its own experts. In ``fixed_shapes`` it reads nothing
    with ``dispatcher: all_gather``: there are rows for as many visits as there can be, and products leave out the rest.
    """

    fixed_shapes = False

    _choose = staticmethod(choose)

    def _weighted(self, results: Tensor, weights: Tensor) -> Tensor:
        return (weighted_in_order if self._moe.combine == "expert" else weighted)(results, weights)

    def _counts(self, chosen: Tensor) -> Tensor:
        flat = chosen.flatten()
        counts = torch.zeros(self._moe.num_experts, dtype=torch.int64, device=flat.device)
        return counts.scatter_add_(0, flat, torch.ones_like(flat))  # bincount would make the host wait

    def _visit(self, tokens: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
        announced = None if self._region.num_ranks == 1 else self._announced(counts)
        order = chosen.flatten().argsort(stable=True)  # by expert, then by token
        back = inverse(order)
        if self._moe.combine == "expert":  # the gradients of a token are added one after another
            copies = [each.to(tokens.dtype) for each in fork(OPS.widened(tokens), chosen.shape[1])]
            rows = reorder(torch.stack(copies, 1).flatten(0, 1), order, back)
        else:
            rows = visits(tokens, order, back)
        outputs = self._swiglu(rows, Groups(counts)) if announced is None else self._exchanged(rows, *announced())
        return reorder(outputs, back, order).reshape(*chosen.shape, tokens.shape[-1])

    def _announced(self, sent: Tensor) -> Callable[[], tuple[Tensor, HostCopy]]:
        """Exchange the counts of visits, from ``sent`` [E]; return a function of the received counts and the rows.

        The numbers of rows [2, R] are on their way to the host, which has other kernels to launch before it waits.
        """

        def copied(received: Tensor) -> tuple[Tensor, HostCopy]:  # [R, E / R]
            by_rank = torch.stack([sent.reshape(self._region.num_ranks, -1).sum(1), received.sum(1)])
            return received, HostCopy(by_rank)

        return self._region.announce(sent, f"{self._name}.counts", copied)

    def _exchanged(self, rows: Tensor, received: Tensor, sizes: HostCopy) -> Tensor:
        """Run rows, which are ordered by expert, through the experts of all ranks."""
        region = self._region
        send, receive = sizes.read()
        arrived = region.exchange(rows, send, receive, f"{self._name}.dispatch")
        experts = torch.arange(received.shape[1], device=rows.device).repeat(len(received))
        by_expert = experts.repeat_interleave(received.flatten(), output_size=sum(receive)).argsort(stable=True)
        by_rank = inverse(by_expert)  # rows arrive by rank; by expert, they are ordered by rank, then by token
        outputs = self._swiglu(reorder(arrived, by_expert, by_rank), Groups(received.sum(0)))
        return region.exchange(reorder(outputs, by_rank, by_expert), receive, send, f"{self._name}.combine")

    def _visit_own(self, tokens: Tensor, chosen: Tensor, gains: Tensor) -> Tensor:
        own, top_k = self._own_experts, chosen.shape[1]
        experts = chosen.flatten() - own.start
        elsewhere = (experts < 0) | (experts >= len(own))
        experts = experts.masked_fill(elsewhere, len(own))
        order = experts.argsort(stable=True)  # by expert, then by token; others last
        counts = torch.zeros(len(own) + 1, dtype=torch.int64, device=order.device)
        counts = counts.scatter_add_(0, experts, torch.ones_like(experts))[:-1]
        num_rows = len(tokens) * min(top_k, len(own)) if self.fixed_shapes else int(counts.sum())
        places = Places(
            F.pad(order[:num_rows], (0, int(self.fixed_shapes))),
            inverse(order).masked_fill(elsewhere, num_rows).view(-1, top_k),
            self.fixed_shapes,
        )
        outputs = self._swiglu(places.to_rows(tokens), Groups(counts))
        gains = places._replace(rows=places.rows.view(-1, 1)).to_rows(gains.reshape(-1, 1))
        return places.to_tokens(outputs * gains).to(tokens.dtype)

    def _activation(self, gate: Tensor, up: Tensor, groups: Groups) -> Tensor:
        return self._gated(gate, up)


class HostCopy:
    """A copy of a tensor in the host's memory, for which the host waits when it reads it.

    It waits for the copy only, and not for kernels that were launched after it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record()

    def read(self) -> Any:
        """Return the values as nested lists."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy.tolist()


class FixedTorchExperts(TorchExperts):
    """Experts of a replayed step, whose shapes equal the captured step's."""

    fixed_shapes = True


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation of rows."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def visits(tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Copy each token for each of its experts: [N, H] to [V, H]. Row i belongs to visit ``order[i]``.

    Visit v belongs to token ``v // k``; ``back`` is the inverse of ``order``. A token's gradient is the sum over its
    experts.
    """
    return _Visits.apply(tokens, order, back)


class Places(NamedTuple):
    """The visits [V] to this rank's experts among the visits of tokens to all experts, k of each token.

    Row i belongs to visit ``order[i]``. ``rows`` [V / k, k] has the row of each visit. Visits to other ranks' experts
    have the last row, which belongs to no visit: an existing row if ``has_spare``, otherwise one more.
    """

    order: Tensor
    rows: Tensor
    has_spare: bool

    def to_rows(self, values: Tensor) -> Tensor:
        """The value [V / k, H] of the token of each row [n, H]. Its gradient is the sum over the token's rows."""
        (rows,) = OPS.autograd_node(lambda own: (self._taken(own),), lambda gradient: (self._summed(gradient),), values)
        return rows

    def to_tokens(self, values: Tensor) -> Tensor:
        """Each token's sum [V / k, H] over its rows of values [n, H]: the adjoint of ``to_rows``."""
        (sums,) = OPS.autograd_node(lambda own: (self._summed(own),), lambda gradient: (self._taken(gradient),), values)
        return sums

    def _taken(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.order // self.rows.shape[1])

    def _summed(self, values: Tensor) -> Tensor:
        """Sums that do not read the rows of no visit."""
        if not self.has_spare:
            values = F.pad(values, (0, 0, 0, 1))
        return F.embedding_bag(self.rows, values, mode="sum", padding_idx=len(values) - 1)


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


class TorchBalance(Balance):
    """A ``Balance`` on the device; a ``Routers``. Losses and biases of 16-bit runs are float32."""

    def __init__(self, plan: PlanSpec, layers: Sequence[Layer], device: torch.device, *, adds_losses: bool) -> None:
        self._dtype, self._device = wide_type(getattr(torch, plan.run.dtype)), device
        super().__init__(OPS, plan, layers, adds_losses=adds_losses)

    def bias(self, experts: str) -> Tensor:
        """Return the bias of one router."""
        return self.biases[experts]

    def put_bias(self, experts: str, bias: Tensor) -> None:
        """Replace the bias of one router in position."""
        self.biases[experts].copy_(bias)

    def _table(self, table: npt.NDArray[np.int64]) -> Tensor:
        return torch.tensor(table, device=self._device)

    def _rows(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return table.index_select(0, token_ids.flatten())

    def _zero_bias(self) -> Tensor:
        assert self._moe is not None
        return torch.zeros(self._moe.num_experts, dtype=self._dtype, device=self._device)

    def _total(self, visits: Iterable[Tensor]) -> Tensor:
        return torch.stack([*visits]).sum(0)

    def _move(self, bias: Tensor, distance: Tensor) -> None:
        assert self._rate is not None
        bias.add_(torch.sign(distance).to(bias.dtype) * self._rate)

    def _array(self, value: Tensor) -> npt.NDArray[Any]:
        return np.array(value.cpu().numpy())

    def _losses_of(self, logits: Tensor) -> tuple[Mapping[str, Tensor], Tensor | None]:
        """Implement ``Balance._losses_of``, without autograd.

        Its thread of a GPU may hold a backward that has passed control to the forward which asks for this.
        """
        assert self._moe is not None
        outputs = OPS.widened(logits.detach())
        with torch.no_grad():
            by_name = {name: _LOSSES[name](outputs, self._moe, weight) for name, weight in self._weights.items()}
            losses = {name: loss for name, (loss, _) in by_name.items()}
            if not logits.requires_grad:
                return losses, None
            return losses, functools.reduce(torch.add, [slope for _, slope in by_name.values()]).to(logits.dtype)


def _even_loads(logits: Tensor, moe: MoeSpec, weight: float) -> tuple[Tensor, Tensor]:
    """The auxiliary loss times its weight, and its gradient [N, E]: the operations that autograd would run."""
    scores = _SCORES[moe.score](logits)
    totals = None if moe.score == "softmax" else scores.sum(-1, keepdim=True)
    parts = scores if totals is None else scores / totals
    largest = scores.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    visits = torch.zeros_like(logits).scatter_(-1, largest, 1.0).sum(0)  # bincount would make the host wait
    loads = visits * (moe.num_experts / largest.numel())
    loss = (parts.mean(0) * loads).sum() * weight
    of_parts = (loads * weight).expand_as(parts) / len(parts)
    if totals is None:
        return loss, torch.ops.aten._softmax_backward_data(of_parts, scores, -1, scores.dtype)  # noqa: SLF001 - its name
    of_totals = (-of_parts * (scores / totals / totals)).sum(-1, keepdim=True)
    of_scores = of_parts / totals + of_totals
    if moe.score == "sigmoid":
        return loss, torch.ops.aten.sigmoid_backward(of_scores, scores)
    return loss, torch.ops.aten.softplus_backward(of_scores / (2 * scores), logits, 1, 20)


def _small_outputs(logits: Tensor, _: MoeSpec, weight: float) -> tuple[Tensor, Tensor]:
    """The z loss times its weight, and its gradient [N, E]: the operations that autograd would run."""
    sizes = logits.logsumexp(-1)
    of_sizes = (sizes * 2) * (torch.full_like(sizes, weight) / len(sizes))
    return sizes.square().mean() * weight, of_sizes.unsqueeze(-1) * (logits - sizes.unsqueeze(-1)).exp()


_LOSSES: Mapping[str, Callable[[Tensor, MoeSpec, float], tuple[Tensor, Tensor]]] = {
    "aux": _even_loads, "z": _small_outputs,
}  # fmt: skip
