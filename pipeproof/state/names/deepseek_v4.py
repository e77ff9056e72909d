"""DeepSeek-V4 as Hugging Face's files have it: names of tensors, settings, and tables of experts by token id.

The names come from the released files, which transformers, vLLM and SGLang read. ``save_pretrained`` of transformers
writes some names differently; an import reads these, too.

A plan draws its tables from ``run.seed``, or names a file with them; states do not have them. Files of Hugging Face
have them: an export adds them, and an import requires the plan's tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.specs.compressed_attention import CompressedAttentionSpec
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.synthetic import hash_tables
from pipeproof.state.checkpoint import Checkpoint, tensor_blocks
from pipeproof.state.names.convention import Convention
from pipeproof.state.state_codes import CopiesDifferError

_MLP = {"gate": "w1.weight", "up": "w3.weight", "down": "w2.weight"}
_ENTRIES = {"kv": "wkv.weight", "gate": "wgate.weight", "positions": "ape", "norm": "norm.weight"}
_STREAMS = {"": "fn", "_scale": "scale", "_bias": "base"}
_TABLE = "table"
DEEPSEEK_V4 = Convention(
    whole={
        "embed": "embed.weight",
        "norm": "norm.weight",
        "head": "head.weight",
        **{f"out_streams{end}": f"hc_head_{name}" for end, name in _STREAMS.items()},
    },
    block={
        "attn_norm": "attn_norm.weight",
        "q_down": "attn.wq_a.weight",
        "q_norm": "attn.q_norm.weight",
        "q_up": "attn.wq_b.weight",
        "kv": "attn.wkv.weight",
        "kv_norm": "attn.kv_norm.weight",
        "sinks": "attn.attn_sink",
        "groups": "attn.wo_a.weight",
        "out": "attn.wo_b.weight",
        **{f"compressor_{part}": f"attn.compressor.{name}" for part, name in _ENTRIES.items()},
        **{f"indexer_{part}": f"attn.indexer.compressor.{name}" for part, name in _ENTRIES.items()},
        "indexer_q": "attn.indexer.wq_b.weight",
        "indexer_heads": "attn.indexer.weights_proj.weight",
        **{f"attn_streams{end}": f"hc_attn_{name}" for end, name in _STREAMS.items()},
        **{f"mlp_streams{end}": f"hc_ffn_{name}" for end, name in _STREAMS.items()},
        "experts_norm": "ffn_norm.weight",
        "router": "ffn.gate.weight",
        "router_bias": "ffn.gate.bias",
        _TABLE: "ffn.gate.tid2eid",
        **{f"expert_{part}": f"ffn.experts.{{expert}}.{name}" for part, name in _MLP.items()},
        **{f"shared_{part}": f"ffn.shared_experts.{name}" for part, name in _MLP.items()},
    },
    module={
        "hidden_norm": "hnorm.weight",
        "hidden_proj": "h_proj.weight",
        "embed_norm": "enorm.weight",
        "embed_proj": "e_proj.weight",
        "module_norm": "norm.weight",
        **{f"out_streams{end}": f"hc_head_{name}" for end, name in _STREAMS.items()},
    },
    block_name="layers.{number}",
    module_name="mtp.{number}",
    module_block="",
    transposed=True,
    router_transposed=True,
)


def refusal_of(model: ModelSpec) -> str | None:
    """Return why a model with ``compressed_attention`` is not DeepSeek-V4; None if it is."""
    mtp, moe, streams = model.mtp, model.moe, model.hyper_connections
    if mtp is not None and (
        mtp.reads != "streams" or mtp.embedding == "own" or model.attention_type(-1) != "sliding_attention"
    ):
        return (
            "the module of DeepSeek-V4 has the main model's embedding, reads all residual streams (`mtp.reads: "
            "streams`), and has `sliding_attention` (an entry of `layer_types` after the last block's)"
        )
    if streams is None or (streams.sinkhorn, streams.transposed, streams.contraction) != ("softmax", True, "learned"):
        wanted = "`sinkhorn: softmax`, `transposed: true` and `contraction: learned`"
        return f"DeepSeek-V4 has `hyper_connections` with {wanted}"
    if model.swiglu_limit is None or model.swiglu_formula != "silu":
        return "DeepSeek-V4 has a `swiglu_limit` with `swiglu_formula: silu`"
    if moe is None or moe.dense_layers or moe.num_shared_experts != 1 or not moe.normalize:
        wanted = "without `dense_layers`, with `num_shared_experts: 1` and `normalize: true`"
        return f"DeepSeek-V4 has experts in all blocks (`moe`), {wanted}"
    if moe.expert_bias_rate is None and moe.hash_layers < model.num_layers:
        return "routers of DeepSeek-V4 have biases (`moe.expert_bias_rate`)"
    return None


SETTINGS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "n_routed_experts": ("moe", "num_experts"),
        "num_experts_per_tok": ("moe", "top_k"),
        "moe_intermediate_size": ("moe", "ffn_size"),
        "n_shared_experts": ("moe", "num_shared_experts"),
        "num_hash_layers": ("moe", "hash_layers"),
        "scoring_func": ("moe", "score"),
        "norm_topk_prob": ("moe", "normalize"),
        "routed_scaling_factor": ("moe", "routed_scale"),
        "swiglu_limit": ("swiglu_limit",),
        "hc_mult": ("hyper_connections", "streams"),
        "hc_sinkhorn_iters": ("hyper_connections", "sinkhorn_iterations"),
        "hc_eps": ("hyper_connections", "epsilon"),
        **{
            name: ("compressed_attention", name)
            for name in CompressedAttentionSpec.model_fields
            if name not in ("documents", "rope_scaling")  # of a plan alone, and with a type
        },
    }
)
"""Settings that only DeepSeek-V4 has, and their keys below ``model``; names of the release where there are several."""


def settings_of(model: ModelSpec) -> dict[str, Any]:
    """Return the settings that only DeepSeek-V4 has, with those that follow from them."""
    spec, values = model.compressed_attention, model.model_dump(mode="json")
    assert spec is not None, "the model is of this class"
    part = spec.qk_rope_head_dim / model.size_of_head
    named: dict[str, Any] = {name: reduce(getitem, path, values) for name, path in SETTINGS.items()}
    scaling = None if spec.rope_scaling is None else {"rope_type": "yarn", **spec.rope_scaling.model_dump()}
    return {
        **named,
        "rope_scaling": scaling,
        "layer_types": [spec.type_of(block) for block in range(model.num_layers)],
        # transformers rounds the product with the head's size down
        "partial_rotary_factor": math.nextafter(part, math.inf) if int(model.size_of_head * part) != part else part,
        "num_key_value_heads": 1,
        "intermediate_size": named["moe_intermediate_size"],
        "num_nextn_predict_layers": 0 if model.mtp is None else model.mtp.num_modules,
    }


def tables_of(plan: PlanSpec) -> dict[str, npt.NDArray[np.int64]]:
    """Return the tables of experts by token id that files of Hugging Face have, [token ids, top_k], by their names."""
    model = plan.gpt
    return {
        DEEPSEEK_V4.name_of(_TABLE, name.removesuffix(".mlp"), model.num_layers): table[: model.num_token_ids]
        for name, table in hash_tables(plan).items()
    }


_SAVED = (("embed_tokens.", "embed."), (".attn.norm.", ".attn.kv_norm."), ("hc_head.hc_", "hc_head_"))
"""Parts of names as ``save_pretrained`` writes them, and as they were released."""


def names_as_saved(stored: Iterable[str]) -> dict[str, str]:
    """Return the stored names that ``save_pretrained`` wrote, by the released ones that they stand for."""

    def released(name: str) -> str:
        return reduce(lambda text, parts: text.replace(*parts), _SAVED, name.removeprefix("model."))

    return {of_release: name for name in stored if (of_release := released(name)) != name}


def require_tables(checkpoint: Checkpoint, tables: Mapping[str, npt.NDArray[np.int64]]) -> None:
    """Refuse a checkpoint whose tables of experts are not the plan's.

    Raises:
        CopiesDifferError: PP929, a table is missing, or sends a token id to other experts.
        StateError: PP920, a file cannot be read.
    """
    for name, table in tables.items():
        entry = checkpoint.tensors.get(name)
        if entry is None:
            difference = "the checkpoint has none"
        elif entry.dtype not in ("int32", "int64") or entry.shape != table.shape:
            difference = f"it is {entry.dtype} {list(entry.shape)}, and the plan's is int64 {list(table.shape)}"
        else:
            content = b"".join(block.tobytes() for block in tensor_blocks(checkpoint, name))
            stored = np.frombuffer(content, entry.dtype).reshape(entry.shape)
            rows = np.flatnonzero((stored != table).any(axis=1))
            if not len(rows):
                continue
            row = int(rows[0])
            difference = f"token id {row} is sent to {stored[row].tolist()}, and by the plan to {table[row].tolist()}"
        raise CopiesDifferError(
            f"{checkpoint.path}: {name} must be the table of the plan: {difference}",
            "give the plan this checkpoint as `model.moe.hash_tables`, or the `run.seed` of the plan that wrote it",
        )
