"""Latent attention: queries, keys and values of heads from compressed vectors (arXiv:2405.04434).

Shape letters: S sequence, B rows, H hidden, A heads of this rank, N and R elements of a head's query without and with
positions, Z of its value; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from pipeproof.specs.model_parts import MlaSpec
from pipeproof.stages.torch.collectives import TensorParallelRegion
from pipeproof.stages.torch.functional import rotate

Tensor: TypeAlias = torch.Tensor
Way: TypeAlias = Callable[[Tensor, str], Tensor]
"""What a weight, named by the end of its name, makes of a tensor."""


def latent_heads(
    x: Tensor, mla: MlaSpec, product: Way, norm: Way, region: TensorParallelRegion, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [.., A, N + R], key without positions and value [.., A, N + Z], key with positions [.., R].

    ``x`` is what lies between layers, [.., H]; what is compressed enters the tensor-parallel region, each way one
    collective, in the order query, latent, positions.
    """
    latent, shared = product(x, "kv_down").split([mla.kv_rank, mla.rope_head_size], dim=-1)
    latent = norm(latent, "kv_norm")
    if mla.q_rank is None:
        before, label, up = x, f"{name}.in", "q"
    else:
        before, label, up = norm(product(x, "q_down"), "q_norm"), f"{name}.q.in", "q_up"
    ways = [label, f"{name}.kv.in", f"{name}.rope.in"]
    before, latent, shared = region.enter_each([before, latent, shared], ways)
    query = product(before, up).unflatten(-1, (-1, mla.nope_head_size + mla.rope_head_size))
    keys = product(latent, "kv_up").unflatten(-1, (-1, mla.nope_head_size + mla.value_head_size))
    return query, keys, shared


def with_positions(
    query: Tensor, keys: Tensor, shared: Tensor, mla: MlaSpec, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [B, A, S, N + R] and value [B, A, S, Z], from [B, A, S, ..] and the shared key [B, S, R]."""
    plain, turned = query.split([mla.nope_head_size, mla.rope_head_size], dim=-1)
    query = torch.cat([plain, rotate(turned, cos, sin)], dim=-1)
    key, value = keys.split([mla.nope_head_size, mla.value_head_size], dim=-1)
    of_heads = rotate(shared, cos, sin).unsqueeze(1).expand(-1, key.shape[1], -1, -1)
    return query, torch.cat([key, of_heads], dim=-1), value
