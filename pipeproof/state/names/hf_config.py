"""The ``config.json`` that Hugging Face's transformers needs next to a model's weights."""

from __future__ import annotations

from typing import Any

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.model_parts import MlaSpec, MoeSpec
from pipeproof.state.names.convention_tables import is_mixtral

CONFIG_FILE = "config.json"


def config_of(model: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return the settings of a model whose weights have Hugging Face's names, in ``dtype``.

    The class is the one that computes the same model: Llama without experts, Mixtral for plain experts, DeepSeek-V2 or
    -V3 with latent attention (by the scores of their routers), GLM-4's with sigmoids, else DeepSeek's first one, which
    transformers loads as remote code only.
    """
    family, settings = _family(model)
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": _TYPES[family],
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.num_token_ids,
        "max_position_embeddings": model.seq_length,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tied_embedding,
        "initializer_range": 0.02,
        "pad_token_id": None,
        "torch_dtype": dtype,
        **settings,
    }
    if model.mla is None:
        config["head_dim"] = model.size_of_head
    if model.mtp is not None:
        config["num_nextn_predict_layers"] = model.mtp.num_modules
    return config


_TYPES = {
    "Llama": "llama",
    "Mixtral": "mixtral",
    "DeepseekV3": "deepseek_v3",
    "DeepseekV2": "deepseek_v2",
    "Glm4Moe": "glm4_moe",
    "Deepseek": "deepseek",
}


def _family(model: ModelSpec) -> tuple[str, dict[str, Any]]:
    """Return the class's name, and the settings that other classes lack."""
    moe, mla = model.moe, model.mla
    if moe is not None and is_mixtral(model):
        settings = {
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "intermediate_size": moe.ffn_size,
        }
        return "Mixtral", {**settings, "sliding_window": None}
    if mla is not None:
        is_v2 = moe is not None and moe.score == "softmax"
        experts = {"first_k_dense_replace": model.num_layers} if moe is None else _deepseek(moe)
        return "DeepseekV2" if is_v2 else "DeepseekV3", experts | _latent(mla, model.num_heads)
    if moe is None:
        return "Llama", {"mlp_bias": False}
    if moe.score == "sigmoid":
        return "Glm4Moe", {**_deepseek(moe), "partial_rotary_factor": 1.0, "use_qk_norm": False}
    return "Deepseek", _deepseek(moe)


def _deepseek(moe: MoeSpec) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_size,
        "n_shared_experts": moe.num_shared_experts or None,
        "first_k_dense_replace": moe.dense_layers,
        "moe_layer_freq": 1,
        "norm_topk_prob": moe.normalize,
        "scoring_func": moe.score,
        "topk_method": "noaux_tc" if moe.score == "sigmoid" else "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    }


def _latent(mla: MlaSpec, num_heads: int) -> dict[str, Any]:
    return {
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_head_size,
        "qk_rope_head_dim": mla.rope_head_size,
        "v_head_dim": mla.value_head_size,
        "num_key_value_heads": num_heads,
        "rope_interleave": True,
    }
