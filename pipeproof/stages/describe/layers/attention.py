"""Attention with groups of heads: queries, keys and values from one fused product.

The columns of the fused weight are head-major: for each head of keys and values, its group's q, then its k and v. So TP
shards have whole groups. With context parallelism each rank has its part of every sequence and gathers the keys and
values of all (arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.specs.compressed_attention import SPARSE, AttentionType, CompressedAttentionSpec
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


# Attention to near tokens, compressed far ones and a sink, with one head of keys that are also the values. A block has
# one of three types (``CompressedAttentionSpec``). The formulas, for A heads of D elements; the last R elements are
# rotated in pairs of neighbours by the position of their token:
#
#     q      = rotated(rms(W_up norm(W_down x))) by head,   k = rotated(norm(W_kv x))
#     entry  = rotated(norm(sum over slots of softmax over slots(W_gate x + b) * (W_kv' x)))
#     p      = softmax over (q k / sqrt(D) of the last tokens, q entry / sqrt(D) of seen entries, the sink's logit)
#     y      = W_out [W_g of each group of heads](rotated back(sum of p k and of p entry))
#
# A window of ``rate`` tokens makes an entry, at the position of its first token. If it is heavily compressed, its slots
# are its tokens. If it is sparse, both products are twice as wide: the slots are the tokens of the window before, with
# the first half, and its own tokens, with the second half. The first window has only its own. A query at position t
# sees the entries below (t + 1) // rate. Of sparse ones an indexer chooses ``index_topk``, at equal scores the first:
# it has rotated entries and queries of its own, and the score is a sum over its heads of (W_heads x) * relu(q entry). A
# choice has no gradient, so the loss does not train the indexer's weights. Packed documents see neither each other's
# tokens nor entries, and each has windows of its own: its first entry has no window before it.
#
# With tensor parallelism each rank has the queries, sinks and output groups of its heads. Keys, entries and choices are
# computed whole on every rank: of products between layers, which sequence parallelism divides, the ranks gather the
# results, and their gradients are summed, because each rank's queries have an addend.


_NORMALIZE: ops.Cost = 4, 2
_NORMALIZE_BACK: ops.Cost = 8, 3


def compressed_attention(model: ModelSpec, spec: CompressedAttentionSpec, kind: AttentionType) -> ops.Operations:
    """The operations between the norm and the residual."""
    hidden, size, rate = model.hidden_size, model.size_of_head, spec.rate_of(kind)
    queries, rotated, low = model.num_heads * size, model.num_heads * spec.qk_rope_head_dim, spec.q_lora_rank
    is_sparse = kind == SPARSE
    sinks = ops.Weight("attn.sinks.weight", (model.num_heads,), 0)
    top_k = spec.index_topk if is_sparse else None
    group = ops.Weight("attn.groups.weight", (spec.o_groups, queries // spec.o_groups, spec.o_lora_rank), 0)
    return (
        ops.Product("attn.q_down", (ops.Weight("attn.q_down.weight", (hidden, low)),), ops.BETWEEN, reads=_INPUT),
        norm(model, "attn.q_norm", low),
        ops.Enter("attn.q.in", low),
        ops.Product("attn.q_up", (ops.Weight("attn.q_up.weight", (low, queries), 1),), entered=True),
        ops.Elementwise("attn.q_head_norm", _NORMALIZE, _NORMALIZE_BACK, sharded=queries, stored=1),
        ops.Product("attn.kv", (ops.Weight("attn.kv.weight", (hidden, size)),), ops.BETWEEN, reads=_INPUT),
        norm(model, "attn.kv_norm", size),
        ops.Enter("attn.kv.in", size, feeds_weights=False),
        ops.Elementwise("attn.rotary", ROTARY, ROTARY, sharded=rotated, whole=spec.qk_rope_head_dim),
        *(() if rate is None else _entries(model, "attn.compressor", rate, size, is_sparse=is_sparse, trained=True)),
        *(_indexer(model, spec, rate) if is_sparse and rate is not None else ()),
        ops.CompressedCore("attn.core", model.num_heads, size, spec.sliding_window, sinks, rate, top_k, spec.documents),
        ops.Elementwise("attn.rotary_back", ROTARY, ROTARY, sharded=rotated),
        ops.Product("attn.groups", (group,), ops.GROUPS),
        *attention_output(model, spec.o_groups * spec.o_lora_rank),
    )


def _entries(
    model: ModelSpec, name: str, rate: int, size: int, *, is_sparse: bool, trained: bool
) -> Iterator[ops.Operation]:
    """Entries of ``size`` elements, from products of all tokens."""
    slots = 2 * rate if is_sparse else rate
    width = 2 * size if is_sparse else size
    for part in ("kv", "gate"):
        weight = ops.Weight(f"{name}.{part}.weight", (model.hidden_size, width), trained=trained)
        yield ops.Product(f"{name}.{part}", (weight,), ops.BETWEEN, reads=_INPUT)
    yield ops.Enter(f"{name}.in", 2 * width, feeds_weights=False, trained=trained)
    # Of each element of an entry: the softmax of its slots, and the sum of their products.
    softmax, back = slots * (ops.SOFTMAX[0] + 3), slots * (ops.SOFTMAX_BACK[0] + 4)
    positions = ops.Weight(f"{name}.positions.weight", (rate, width), trained=trained)
    yield ops.Elementwise(
        f"{name}.positions", (softmax, 2 * slots + 1), (back, 4 * slots + 1) if trained else None,
        (slots, slots) if trained else None, whole=size, rows=ops.ENTRIES, stored=2 * slots if trained else 0,
        widened=slots if trained else 0, weights=(positions,),
    )  # fmt: skip
    normed = norm(model, f"{name}.norm", size)
    weights = tuple(weight._replace(trained=trained) for weight in normed.weights)
    yield normed._replace(weights=weights, of_entries=True)


def _indexer(model: ModelSpec, spec: CompressedAttentionSpec, rate: int) -> Iterator[ops.Operation]:
    """The choice of entries, which has no gradient."""
    heads, size = spec.index_n_heads, spec.index_head_dim
    products, *others = _entries(model, "attn.indexer", rate, size, is_sparse=True, trained=False)
    gate, enter, *pooled = others
    assert isinstance(enter, ops.Enter)
    of_heads = ops.Weight("attn.indexer.heads.weight", (model.hidden_size, heads), trained=False)
    queries = ops.Weight("attn.indexer.q.weight", (spec.q_lora_rank, heads * size), trained=False)
    yield from (products, gate)
    yield ops.Product("attn.indexer.heads", (of_heads,), ops.BETWEEN, reads=_INPUT)
    yield enter._replace(size=enter.size + heads)
    yield from pooled
    yield ops.Product("attn.indexer.q", (queries,))
    yield ops.IndexerScores("attn.indexer.scores", heads, size, rate)
