"""The model of a plan in the names of a ``config.json`` in the style of Hugging Face."""

from __future__ import annotations

from typing import Any

from pipeproof.interop.importers.model_parts import type_of_parts
from pipeproof.interop.importers.model_sizes import MODEL_NAMES
from pipeproof.specs.plan import PlanSpec

_MODERN = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "head_dim", "tie_word_embeddings", "num_nextn_predict_layers", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
"""One name for each key of a plan's model."""


def model_config(spec: PlanSpec) -> dict[str, Any]:
    """The sizes, and a type of model that has the plan's norms, positions and biases; "llama" without one."""
    data: dict[str, Any] = {"model_type": type_of_parts(spec.gpt)}
    model = spec.gpt.model_dump(mode="json")
    for name in _MODERN:
        value: Any = model
        for key in MODEL_NAMES[name]:
            value = value.get(key) if isinstance(value, dict) else None
        if value not in (None, 0):
            data[name] = value
    return data
