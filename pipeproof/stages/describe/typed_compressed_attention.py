"""The types of attention to near tokens, compressed entries and sinks, for the programs of ``typed_gpt``.

Dims: ``a`` heads of ``q`` elements, ``o`` = ``a`` x ``q``, ``lq`` the compressed query, ``t`` the tokens as keys,
``kv`` the elements of a key. For entries of each type (``sparse``, ``heavy``) and of the indexer (``index``): ``w_``
windows of ``m_`` tokens, ``u_`` the tokens in windows, ``k_`` the columns of a product and ``c_`` the columns of all
products next to each other; an entry has ``kv`` or ``ki`` elements. The indexer has ``ai`` heads, ``oi`` = ``ai`` x
``ki``. Of the output: ``z`` groups of ``each`` heads, ``i`` = ``each`` x ``q``, ``lo`` the compressed output of a
group, ``g`` = ``z`` x ``lo``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pipeproof.specs.compressed_attention import AttentionType, CompressedAttentionSpec
from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.typed_ops import ProgramBuilder

_SHORT: Mapping[AttentionType, str] = {
    "compressed_sparse_attention": "sparse", "heavily_compressed_attention": "heavy",
}  # fmt: skip

Change = Callable[[ProgramBuilder, str, str], str]
"""Enter column-parallel weights, or leave a row-parallel product: program, name and value, to the name."""


def compressed_sizes(model: ModelSpec, spec: CompressedAttentionSpec, seq_length: int) -> Mapping[str, int]:
    """The sizes of the dims."""
    heads, size, inner = model.num_heads, model.size_of_head, spec.index_head_dim
    sizes = {
        "a": heads, "q": size, "o": heads * size, "lq": spec.q_lora_rank, "kv": size,
        "z": spec.o_groups, "each": heads // spec.o_groups, "i": heads // spec.o_groups * size,
        "lo": spec.o_lora_rank, "g": spec.o_groups * spec.o_lora_rank,
        "ai": spec.index_n_heads, "ki": inner, "oi": spec.index_n_heads * inner,
    }  # fmt: skip
    for kind, name in _SHORT.items():
        rate, num = spec.rate_of(kind) or 1, spec.num_entries(kind, seq_length)
        sizes |= {f"w_{name}": num, f"m_{name}": rate, f"u_{name}": num * rate}
    columns = {"k_sparse": 2 * size, "k_heavy": size, "k_index": 2 * inner}
    products = {"c_sparse": 4 * size, "c_heavy": 2 * size, "c_index": 4 * inner + spec.index_n_heads}
    return {**sizes, **columns, **products}


class _EntryDims(NamedTuple):
    """Dims of entries: windows, the tokens of one, the tokens in windows, columns of a product, and of all together."""

    windows: str
    tokens: str
    used: str
    width: str
    products: str


def _dims(of_windows: str, of_columns: str) -> _EntryDims:
    return _EntryDims(*(f"{dim}_{of_windows}" for dim in "wmu"), *(f"{dim}_{of_columns}" for dim in "kc"))


def typed_compressed_attention(
    p: ProgramBuilder, x: str, *, spec: CompressedAttentionSpec, kind: AttentionType, enter: Change, leave: Change
) -> str:
    """Attention after the norm ``x``. Ranks over ``tp`` have heads; keys, entries and choices are whole on each."""
    p.constant("angles", "s")
    p.parameter("attn.q_down.weight", "h lq")
    p.apply(
        "q_norm",
        p.multiply("q_down", x, "attn.q_down.weight", over="h"),
        p.parameter("attn.q_norm.weight", "lq"),
        along="lq",
    )
    low = enter(p, "attn.q.in", "q_norm")
    p.multiply("q_up", low, p.parameter("attn.q_up.weight", "lq o", tp="S(o)"), over="lq")
    p.apply("query", p.split("plain_query", "q_up", "o", "a q"), "angles", along="q")
    p.multiply("plain_kv", x, p.parameter("attn.kv.weight", "h kv"), over="h")
    p.apply("kv_norm", "plain_kv", p.parameter("attn.kv_norm.weight", "kv"), along="kv")
    p.apply("own_kv", enter(p, "attn.kv.in", "kv_norm"), "angles", along="kv")
    seen, dropped = [p.select("keys", "own_kv", "s", "t")], "t kv"
    if (short := _SHORT.get(kind)) is not None:
        name, dims = "attn.compressor", _dims(short, short)
        own = _joined(p, name, {"kv": dims.width, "gate": dims.width}, x, dims.products)
        seen.append(_entries(p, enter(p, f"{name}.in", own), name, dims, "kv"))
        dropped += f" {dims.windows}"
    if short == "sparse":
        seen.append(_choice(p, x, low, enter))
    sinks = p.parameter("attn.sinks.weight", "a", tp="S(a)")
    p.apply("mixed", "query", *seen, sinks, along="q", drop=dropped)
    p.split("by_group", p.apply("rotated_back", "mixed", "angles", along="q"), "a", "z each")
    p.merge("of_group", "by_group", "each q", "i")
    p.multiply("compressed", "of_group", p.parameter("attn.groups.weight", "z i lo", tp="S(z)"), over="i")
    p.merge("attention", "compressed", "z lo", "g")
    p.multiply("attn.addends", "attention", p.parameter("attn.out.weight", "g h", tp="S(g)"), over="g")
    return leave(p, "attn.out", "attn.addends")


def _entries(p: ProgramBuilder, gathered: str, name: str, dims: _EntryDims, size: str, *, trained: bool = True) -> str:
    """The entries [w, size] from the products of all tokens. They mix windows: neighbours overlap."""
    windows, tokens, used, width, products = dims
    p.split(f"{name}.windows", p.select(f"{name}.used", gathered, "s", used), used, f"{windows} {tokens}")
    bias = p.parameter(f"{name}.positions.weight", f"{tokens} {width}", trained=trained)
    p.apply(f"{name}.sums", f"{name}.windows", bias, along=windows, drop=f"{tokens} {products}")
    weight = p.parameter(f"{name}.norm.weight", size, trained=trained)
    return p.apply(f"{name}.entries", p.select(f"{name}.plain", f"{name}.sums", width, size), weight, along=size)


def _joined(p: ProgramBuilder, name: str, parts: Mapping[str, str], x: str, into: str, *, trained: bool = True) -> str:
    """Products of ``x`` with a weight each, next to each other: the sum of the products, each with its own columns."""
    for part, width in parts.items():
        own = p.multiply(
            f"{name}.{part}", x, p.parameter(f"{name}.{part}.weight", f"h {width}", trained=trained), over="h"
        )
        p.multiply(f"{name}.{part}.placed", own, p.constant(f"{name}.{part}.columns", f"{width} {into}"), over=width)
    return p.add(f"{name}.products", *(f"{name}.{part}.placed" for part in parts))


def _choice(p: ProgramBuilder, x: str, low: str, enter: Change) -> str:
    """The indexer's choice of entries for each token, a constant [s, w]."""
    name, dims = "attn.indexer", _dims("sparse", "index")
    parts = {"kv": "k_index", "gate": "k_index", "heads": "ai"}
    own = _joined(p, name, parts, p.detach(f"{name}.x", x), "c_index", trained=False)
    gathered = enter(p, f"{name}.in", own)
    keys = _entries(p, gathered, name, dims, "ki", trained=False)
    p.multiply(
        f"{name}.plain_q",
        p.detach(f"{name}.low", low),
        p.parameter(f"{name}.q.weight", "lq oi", trained=False),
        over="lq",
    )
    queries = p.apply(
        f"{name}.queries", p.split(f"{name}.split", f"{name}.plain_q", "oi", "ai ki"), "angles", along="ki"
    )
    weights = p.select(f"{name}.of_heads", gathered, "c_index", "ai")
    scores = p.apply(f"{name}.products_of_heads", queries, keys, along="ki", drop="ki")
    return p.apply(f"{name}.choice", p.multiply(f"{name}.scores", weights, scores, over="ai"), along=dims.windows)
