"""Names of sizes in the configurations of models, which importers read and exporters write."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

from pipeproof.diagnostics.problems import KeyPath
from pipeproof.specs.model import ModelSpec

MODEL_NAMES: Mapping[str, KeyPath] = MappingProxyType(
    {
        "num_hidden_layers": ("num_layers",),
        "hidden_size": ("hidden_size",),
        "num_attention_heads": ("num_heads",),
        "num_key_value_heads": ("num_kv_heads",),
        "intermediate_size": ("ffn_size",),
        "vocab_size": ("vocab_size",),
        "head_dim": ("head_size",),
        "n_layer": ("num_layers",),
        "n_embd": ("hidden_size",),
        "n_head": ("num_heads",),
        "n_inner": ("ffn_size",),
        "tie_word_embeddings": ("tied_embedding",),
        "num_nextn_predict_layers": ("mtp", "num_modules"),
        "num_experts": ("moe", "num_experts"),
        "n_routed_experts": ("moe", "num_experts"),
        "num_local_experts": ("moe", "num_experts"),
        "moe_num_experts": ("moe", "num_experts"),
        "num_experts_per_tok": ("moe", "top_k"),
        "moe_k": ("moe", "top_k"),
        "moe_intermediate_size": ("moe", "ffn_size"),
        "n_shared_experts": ("moe", "num_shared_experts"),
        "moe_num_shared_experts": ("moe", "num_shared_experts"),
        "first_k_dense_replace": ("moe", "dense_layers"),
        "moe_layer_start_index": ("moe", "dense_layers"),
        "q_lora_rank": ("mla", "q_rank"),
        "kv_lora_rank": ("mla", "kv_rank"),
        "qk_nope_head_dim": ("mla", "nope_head_size"),
        "qk_rope_head_dim": ("mla", "rope_head_size"),
        "v_head_dim": ("mla", "value_head_size"),
    }
)
"""Names in Hugging Face's and Paddle's model configurations, and their keys below ``model``."""


def named_values(model: ModelSpec, *names: str) -> dict[str, Any]:
    """Return values of a model by ``MODEL_NAMES``; None for a key of a section that it does not have."""
    values: Any = model.model_dump(mode="json")
    return {name: reduce(lambda part, key: (part or {}).get(key), MODEL_NAMES[name], values) for name in names}
