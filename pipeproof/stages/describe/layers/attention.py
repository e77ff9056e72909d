"""Attention with groups of heads: queries, keys and values from one fused product.

The columns of the fused weight are head-major: for each head of keys and values those of its group's q, then of its k
and v. So TP shards have whole groups. With context parallelism each rank has its part of every sequence and gathers the
keys and values of all (arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from pipeproof.specs.model import MlaSpec, ModelSpec
from pipeproof.stages.describe.layers import operations as ops
from pipeproof.stages.describe.layers.operations import norm

ROTARY: ops.Cost = 3, 2
MEASURED_WITH = {"attn.k_head_norm.bias": ("attn.q_head_norm.bias",)}
"""Weights whose gradients are measured in the elements of others (``gradient_units``).

Without rotary positions the addends of the bias of the keys' norm cancel exactly: softmax does not change if all keys
of a query are shifted.
"""


def attention(model: ModelSpec) -> ops.Operations:
    """The operations between the norm and the residual."""
    hidden, queries, keys = model.hidden_size, model.num_heads * model.size_of_head, model.kv_heads * model.size_of_head
    fused = ops.Weight("attn.qkv.weight", (hidden, queries + 2 * keys), 1)
    heads = (("q", model.num_heads), ("k", model.kv_heads)) if model.qk_norm else ()
    rotary = ops.Elementwise("attn.rotary", ROTARY, ROTARY, sharded=queries + keys)
    return (
        ops.Enter("attn.in", hidden),
        ops.Product("attn.qkv", (fused,), entered=True),
        *(norm(model, f"attn.{part}_head_norm", model.size_of_head, heads=number) for part, number in heads),
        *((rotary,) if model.positions == "rotary" else ()),
        ops.GatherKeys("attn.kv", sharded=2 * keys),
        ops.AttentionCore("attn.core", model.num_heads, queries, keys, keys, queries),
        *attention_output(model, queries),
    )


def attention_output(model: ModelSpec, mixed: int) -> ops.Operations:
    """The row-parallel product of the heads' ``mixed`` elements."""
    weight = ops.Weight("attn.out.weight", (mixed, model.hidden_size), 0)
    return ops.Product("attn.out", (weight,)), ops.Leave("attn.out", model.hidden_size)


# Latent attention (arXiv:2405.04434): queries, keys and values from compressed vectors.
#
# All tokens are compressed on every TP rank or, with sequence parallelism, each rank's own tokens. The weights that
# expand the compressed vectors are sharded by heads. All heads share the part of the key with positions.


_INPUT = "attn_norm"
"""The tensor that both compressions read."""


def latent_attention(model: ModelSpec, mla: MlaSpec) -> ops.Operations:
    """The operations between the norm and the residual."""
    hidden, heads, rope = model.hidden_size, model.num_heads, mla.rope_head_size
    queries, values = heads * (mla.nope_head_size + rope), heads * mla.value_head_size
    expanded = heads * (mla.nope_head_size + mla.value_head_size)
    compressed = ops.Weight("attn.kv_down.weight", (hidden, mla.kv_rank + rope))
    return (
        *_queries(model, queries, mla.q_rank),
        ops.Product("attn.kv_down", (compressed,), ops.BETWEEN, reads=_INPUT),
        norm(model, "attn.kv_norm", mla.kv_rank),
        ops.Enter("attn.kv.in", mla.kv_rank),
        ops.Product("attn.kv_up", (ops.Weight("attn.kv_up.weight", (mla.kv_rank, expanded), 1),), entered=True),
        ops.Enter("attn.rope.in", rope, feeds_weights=False),
        ops.Elementwise("attn.rotary", ROTARY, ROTARY, sharded=heads * rope, whole=rope),
        ops.GatherKeys("attn.kv", sharded=expanded),
        ops.GatherKeys("attn.rope", whole=rope),
        ops.AttentionCore("attn.core", heads, queries, queries, values, values),
        *attention_output(model, values),
    )


def _queries(model: ModelSpec, queries: int, rank: int | None) -> ops.Operations:
    hidden = model.hidden_size
    if rank is None:
        weight = ops.Weight("attn.q.weight", (hidden, queries), 1)
        return ops.Enter("attn.in", hidden), ops.Product("attn.q", (weight,), entered=True, reads=_INPUT)
    return (
        ops.Product("attn.q_down", (ops.Weight("attn.q_down.weight", (hidden, rank)),), ops.BETWEEN, reads=_INPUT),
        norm(model, "attn.q_norm", rank),
        ops.Enter("attn.q.in", rank),
        ops.Product("attn.q_up", (ops.Weight("attn.q_up.weight", (rank, queries), 1),), entered=True),
    )
