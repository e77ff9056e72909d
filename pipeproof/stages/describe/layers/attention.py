"""Attention with groups of heads: rotary queries and keys from one fused product.

The columns of the fused weight are head-major: for each head of keys and values those of its group's q, then of its k
and v. So TP shards have whole groups. With context parallelism each rank has its part of every sequence and gathers the
keys and values of all (arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.layers import operations as ops

ROTARY: ops.Cost = 3, 2


def attention(model: ModelSpec) -> ops.Operations:
    """The operations between the norm and the residual."""
    hidden, queries, keys = model.hidden_size, model.num_heads * model.size_of_head, model.kv_heads * model.size_of_head
    return (
        ops.Enter("attn.in", hidden),
        ops.Product("attn.qkv", (ops.Weight("attn.qkv.weight", (hidden, queries + 2 * keys), 1),), entered=True),
        ops.Elementwise("attn.rotary", ROTARY, ROTARY, sharded=queries + keys),
        ops.GatherKeys("attn.kv", sharded=2 * keys),
        ops.AttentionCore("attn.core", model.num_heads, queries, keys, keys, queries),
        *attention_output(model, queries),
    )


def attention_output(model: ModelSpec, mixed: int) -> ops.Operations:
    """The row-parallel product of the heads' ``mixed`` elements."""
    weight = ops.Weight("attn.out.weight", (mixed, model.hidden_size), 0)
    return ops.Product("attn.out", (weight,)), ops.Leave("attn.out", model.hidden_size)
