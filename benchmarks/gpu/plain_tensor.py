"""The GPT as plain modules of PyTorch that are cut over tensor-parallel ranks, with sequence parallelism.

The cut is as in ``pipeproof.stages.torch``: columns, then rows, of each pair of weights, words of both ends, and tokens
in between (arXiv:2205.05198). Activations are [S, B, H] as in ours: parts of a sequence lie in one piece.

Shape letters: T ranks, S sequence, n = S / T, B rows, H hidden, A heads of this rank, D head size, V words.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from plain_gpt import swiglu
from sizes import Size
from torch import Tensor, nn

from pipeproof.stages.common.backend_ops import NORM_EPSILON
from pipeproof.stages.torch.functional import causal_attention, rotary_tables, rotate


class TensorBlock(nn.Module):
    """A block for activations [n, B, H]."""

    def __init__(self, size: Size, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.group, num = group, group.size()
        made = {"dtype": size.dtype, "device": device}
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(size.hidden, NORM_EPSILON, **made) for _ in range(2))
        self.num_heads, self.head_size = size.num_heads // num, size.hidden // size.num_heads
        own, inner = size.hidden // num, size.ffn // num
        self.qkv = nn.Linear(size.hidden, 3 * own, bias=False, **made)
        self.out = nn.Linear(own, size.hidden, bias=False, **made)
        self.gate, self.up = (nn.Linear(size.hidden, inner, bias=False, **made) for _ in range(2))
        self.down = nn.Linear(inner, size.hidden, bias=False, **made)
        cos, sin = rotary_tables(size.seq_length, self.head_size, size.dtype, device)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        """[n, B, H] to the same."""
        entered = _Gathered.apply(self.attn_norm(x), self.group)
        heads = self.qkv(entered).unflatten(-1, (self.num_heads, 3, self.head_size))
        turned, value = heads.permute(1, 2, 3, 0, 4).split([2, 1], dim=2)  # [B, A, 3, S, D]
        query, key = rotate(turned, self.cos, self.sin).split([1, 1], dim=2)
        mixed = causal_attention(query, key.squeeze(2), value.squeeze(2))  # [B, A, 1, S, D]
        x = x + _Scattered.apply(self.out(mixed.permute(3, 0, 1, 2, 4).flatten(2)), self.group)
        entered = _Gathered.apply(self.mlp_norm(x), self.group)
        return x + _Scattered.apply(self.down(swiglu(self.gate(entered), self.up(entered))), self.group)


class TensorStage(nn.Module):
    """Blocks one after the other; the first stage looks tokens up, the last ends with this rank's part of logits."""

    def __init__(self, size: Size, num_blocks: int, group: dist.ProcessGroup, device: torch.device, ends: str) -> None:
        super().__init__()
        self.group, self.ends, own = group, ends, size.vocab_size // group.size()
        made = {"dtype": size.dtype, "device": device}
        self.layer_prefix, self.num_words = group.rank() * own, own
        self.blocks = nn.ModuleList(TensorBlock(size, group, device) for _ in range(num_blocks))
        if "first" in ends:
            self.embed = nn.Embedding(own, size.hidden, **made)
        if "last" in ends:
            self.norm = nn.RMSNorm(size.hidden, NORM_EPSILON, **made)
            self.head = nn.Linear(size.hidden, own, bias=False, **made)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.uniform_(weight, -0.02, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, S], or activations [n, B, H]; to these, or logits [S, B, V / T]."""
        if "first" in self.ends:
            place, is_mine = self.own_words(x.t())
            x = _Scattered.apply(self.embed(place) * is_mine.unsqueeze(-1), self.group)
        for block in self.blocks:
            x = block(x)
        return self.head(_Gathered.apply(self.norm(x), self.group)) if "last" in self.ends else x

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy of all tokens, labels [B, S]; the words of logits are shared out."""
        logits = logits.float()
        highest = logits.detach().amax(-1)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
        shifted = logits - highest.unsqueeze(-1)
        total = _Summed.apply(shifted.exp().sum(-1), self.group)
        place, is_mine = self.own_words(labels.t())
        target = _Summed.apply(shifted.gather(-1, place.unsqueeze(-1)).squeeze(-1) * is_mine, self.group)
        return (total.log() - target).sum()

    def own_words(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Each word's place among this rank's, 0 for another rank's; and whether it is here."""
        place = words - self.layer_prefix
        is_mine = (place >= 0) & (place < self.num_words)
        return torch.where(is_mine, place, 0), is_mine

    def sum_gradients(self) -> None:
        """Sum the gradients of norms, which each rank has for its own tokens."""
        for name, weight in self.named_parameters():
            if "norm" in name:
                dist.all_reduce(weight.grad, group=self.group)


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    made = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(made, x.contiguous(), group=group)
    return made


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    made = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(made, x.contiguous(), group=group)
    return made


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(gradient, ctx.group), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_gather(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
