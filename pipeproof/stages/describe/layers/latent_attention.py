"""Latent attention (arXiv:2405.04434): queries, keys and values from compressed vectors.

All tokens are compressed on every TP rank or, with sequence parallelism, each rank's own tokens. The weights that
expand the compressed vectors are sharded by heads. All heads share the part of the key with positions.
"""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.model_parts import MlaSpec
from pipeproof.stages.describe.layers import operations as ops
from pipeproof.stages.describe.layers.attention import ROTARY, attention_output
from pipeproof.stages.describe.layers.norm import norm

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
