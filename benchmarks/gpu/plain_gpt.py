"""The GPT as plain modules of PyTorch with plain autograd: the parts of a rival's stages.

The arithmetic is as in ``pipeproof.stages.torch``, with the same attention, norms and types. A comparison therefore
shows schedules, split backward and communication alone.

Shape letters: S sequence, B rows, H hidden, A heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeproof.stages.common.backend_ops import NORM_EPSILON
from pipeproof.stages.torch.functional import causal_attention, rotary_tables, rotate


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return F.silu(gate) * up


class PlainBlock(nn.Module):
    """A block for activations [B, S, H]."""

    def __init__(
        self, hidden: int, num_heads: int, ffn: int, seq_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        made = {"bias": False, "dtype": dtype, "device": device}
        self.num_heads, self.head_size = num_heads, hidden // num_heads
        self.attn_norm = nn.RMSNorm(hidden, NORM_EPSILON, dtype=dtype, device=device)
        self.mlp_norm = nn.RMSNorm(hidden, NORM_EPSILON, dtype=dtype, device=device)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, **made), nn.Linear(hidden, hidden, **made)
        self.gate, self.up = nn.Linear(hidden, ffn, **made), nn.Linear(hidden, ffn, **made)
        self.down = nn.Linear(ffn, hidden, **made)
        cos, sin = rotary_tables(seq_length, self.head_size, dtype, device)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] to the same."""
        heads = self.qkv(self.attn_norm(x)).unflatten(-1, (self.num_heads, 3, self.head_size))
        turned, value = heads.permute(0, 2, 3, 1, 4).split([2, 1], dim=2)  # [B, A, 3, S, D]
        query, key = rotate(turned, self.cos, self.sin).split([1, 1], dim=2)
        mixed = causal_attention(query, key.squeeze(2), value.squeeze(2))  # [B, A, 1, S, D]
        x = x + self.out(mixed.permute(0, 3, 1, 2, 4).flatten(2))
        return x + self.mlp(self.mlp_norm(x))

    def mlp(self, normed: Tensor) -> Tensor:
        """SwiGLU."""
        made: Tensor = self.down(swiglu(self.gate(normed), self.up(normed)))
        return made


class PlainStage(nn.Module):
    """Blocks one after the other; the first stage embeds tokens, the last ends with logits."""

    def __init__(self, blocks: list[PlainBlock], embed: nn.Module | None, head: nn.Module | None) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = embed, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [B, S] or activations [B, S, H]."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of all tokens."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="sum")
