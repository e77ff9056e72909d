"""Latent attention: queries, keys and values of heads from compressed vectors (arXiv:2405.04434).

Shape letters: S sequence, B rows, H hidden, A heads of this rank, N and R elements of a head's query without and with
positions, Z of its value; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pipeproof.specs.model_parts import MlaSpec
from pipeproof.stages.common.collectives import TensorParallelRegion
from pipeproof.stages.common.ops import Ops, Tensor

Way: TypeAlias = Callable[[Tensor, str], Tensor]
"""What a weight, named by the end of its name, makes of a tensor."""


def latent_heads(
    ops: Ops, x: Tensor, mla: MlaSpec, product: Way, norm: Way, region: TensorParallelRegion, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [.., A, N + R], key without positions and value [.., A, N + Z], key with positions [.., R].

    ``x`` is what lies between layers, [.., H]; what is compressed enters the tensor-parallel region, each way one
    collective, in the order query, latent, positions.
    """
    latent, shared = ops.split(product(x, "kv_down"), [mla.kv_rank, mla.rope_head_size], -1)
    latent = norm(latent, "kv_norm")
    if mla.q_rank is None:
        before, label, up = x, f"{name}.in", "q"
    else:
        before, label, up = norm(product(x, "q_down"), "q_norm"), f"{name}.q.in", "q_up"
    ways = [label, f"{name}.kv.in", f"{name}.rope.in"]
    before, latent, shared = region.enter_each([before, latent, shared], ways)
    query, keys = product(before, up), product(latent, "kv_up")
    query = query.reshape([*query.shape[:2], -1, mla.nope_head_size + mla.rope_head_size])
    keys = keys.reshape([*keys.shape[:2], -1, mla.nope_head_size + mla.value_head_size])
    return query, keys, shared


def with_positions(
    ops: Ops, query: Tensor, keys: Tensor, shared: Tensor, mla: MlaSpec, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [B, A, S, N + R] and value [B, A, S, Z], from [B, A, S, ..] and the shared key [B, S, R]."""
    plain, turned = ops.split(query, [mla.nope_head_size, mla.rope_head_size], -1)
    query = ops.concat([plain, ops.rotate(turned, cos, sin)], -1)
    key, value = ops.split(keys, [mla.nope_head_size, mla.value_head_size], -1)
    of_heads = ops.repeated(ops.rotate(shared, cos, sin), key.shape[1], 1)
    return query, ops.concat([key, of_heads], -1), value
