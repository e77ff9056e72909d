"""Blocks with experts as plain modules of PyTorch: the parts of a rival's stages.

The arithmetic is as in ``pipeproof.stages.torch``: the same choice of experts, products of all experts in one kernel,
and one read by the host where tokens go to other ranks.

Shape letters: S sequence, B rows, H hidden, N = S B tokens, E experts, k of them for a token, V = N k visits,
R expert-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_gpt import PlainBlock, swiglu
from torch import Tensor, nn


class PlainExperts(nn.Module):
    """Routed experts of SwiGLU; this rank's E / R of them, of the world's R ranks where ``is_shared_out``."""

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        ffn: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_shared_out: bool,
    ) -> None:
        super().__init__()
        self.num_ranks = dist.get_world_size() if is_shared_out else 1
        self.num_experts, self.top_k, own = num_experts, top_k, num_experts // self.num_ranks
        made = {"dtype": dtype, "device": device}
        self.router = nn.Linear(hidden, num_experts, bias=False, **made)
        self.gate, self.up = (nn.Parameter(torch.empty(own, hidden, ffn, **made)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(own, ffn, hidden, **made))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] to the same."""
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).softmax(-1)
        chosen = scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        gains = scores.gather(-1, chosen)
        gains = gains / gains.sum(-1, keepdim=True)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        own = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        own.scatter_add_(0, flat, torch.ones_like(flat))
        rows = _Visits.apply(tokens, order)
        made = self._of_experts(rows, own) if self.num_ranks == 1 else self._elsewhere(rows, own)
        back = _Moved.apply(made, _inverse(order)).unflatten(0, chosen.shape)
        return (back * gains.unsqueeze(-1)).sum(1).reshape(x.shape)

    def _of_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        made = swiglu(F.grouped_mm(rows, self.gate, offs=ends), F.grouped_mm(rows, self.up, offs=ends))
        return F.grouped_mm(made, self.down, offs=ends)

    def _elsewhere(self, rows: Tensor, own: Tensor) -> Tensor:
        theirs = torch.empty_like(own)
        dist.all_to_all_single(theirs, own)
        theirs = theirs.view(self.num_ranks, -1)
        send, receive = torch.stack([own.view(self.num_ranks, -1).sum(1), theirs.sum(1)]).tolist()
        arrived = _Exchanged.apply(rows, send, receive)
        experts = torch.arange(theirs.shape[1], device=own.device).repeat(self.num_ranks)
        order = experts.repeat_interleave(theirs.flatten(), output_size=sum(receive)).argsort(stable=True)
        made = self._of_experts(_Moved.apply(arrived, order), theirs.sum(0))
        return _Exchanged.apply(_Moved.apply(made, _inverse(order)), receive, send)


class PlainExpertsBlock(PlainBlock):
    """A block whose MLP are experts."""

    def __init__(self, *block: Any, experts: PlainExperts) -> None:
        super().__init__(*block)
        del self.gate, self.up, self.down
        self.experts = experts

    def mlp(self, normed: Tensor) -> Tensor:
        """Output of the experts."""
        made: Tensor = self.experts(normed)
        return made


def _inverse(order: Tensor) -> Tensor:
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class _Visits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.num_tokens = len(tokens)
        return tokens.index_select(0, order // (len(order) // len(tokens)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, _inverse(order)).unflatten(0, (ctx.num_tokens, -1)).sum(1), None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, _inverse(order)), None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        ctx.send, ctx.receive = send, receive
        return _all_to_all(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_to_all(gradient.contiguous(), ctx.receive, ctx.send), None, None


def _all_to_all(rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    arrived = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(arrived, rows, list(receive), list(send))
    return arrived
