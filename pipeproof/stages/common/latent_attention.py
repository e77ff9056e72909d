"""Latent attention: queries, keys and values of the heads from compressed vectors (arXiv:2405.04434).

Shape letters: S sequence, B rows, H hidden, A heads of this rank, N and R elements of a head's query without and with
positions, Z of its value; [..] is [S, B] or [B, S].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pipeproof.specs.model import MlaSpec
from pipeproof.stages.common.backend_ops import BackendOps, Tensor
from pipeproof.stages.common.tensor_parallel import TensorParallelRegion

WeightOp: TypeAlias = Callable[[Tensor, str], Tensor]
"""Apply a weight to a tensor. The second argument is the end of the weight's name."""


def latent_heads(
    ops: BackendOps, x: Tensor, mla: MlaSpec, product: WeightOp, norm: WeightOp, region: TensorParallelRegion, name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [.., A, N + R], key without positions and value [.., A, N + Z], key with positions [.., R].

    ``x`` is the activation between layers, [.., H]. The compressed vectors enter the tensor-parallel region with one
    collective each, in the order query, latent, positions.
    """
    latent, shared = ops.split(product(x, "kv_down"), [mla.kv_rank, mla.rope_head_size], -1)
    latent = norm(latent, "kv_norm")
    if mla.q_rank is None:
        before, label, up = x, f"{name}.in", "q"
    else:
        before, label, up = norm(product(x, "q_down"), "q_norm"), f"{name}.q.in", "q_up"
    labels = [label, f"{name}.kv.in", f"{name}.rope.in"]
    before, latent, shared = region.enter_each([before, latent, shared], labels)
    query, keys = product(before, up), product(latent, "kv_up")
    query = query.reshape([*query.shape[:2], -1, mla.nope_head_size + mla.rope_head_size])
    keys = keys.reshape([*keys.shape[:2], -1, mla.nope_head_size + mla.value_head_size])
    return query, keys, shared


def with_positions(
    ops: BackendOps, query: Tensor, keys: Tensor, shared: Tensor, mla: MlaSpec, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [B, A, S, N + R] and value [B, A, S, Z], from [B, A, S, ..] and the shared key [B, S, R]."""
    plain, rotary = ops.split(query, [mla.nope_head_size, mla.rope_head_size], -1)
    query = ops.concat([plain, ops.rotate(rotary, cos, sin)], -1)
    key, value = ops.split(keys, [mla.nope_head_size, mla.value_head_size], -1)
    shared_of_heads = ops.repeat(ops.rotate(shared, cos, sin), key.shape[1], 1)
    return query, ops.concat([key, shared_of_heads], -1), value
