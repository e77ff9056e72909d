"""The ``config.json`` that Hugging Face's transformers needs next to a model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeproof.specs.model import MlaSpec, ModelSpec, MoeSpec
from pipeproof.state.names.part_tables import common_settings, transformers_class

CONFIG_FILE = "config.json"


def config_of(model: ModelSpec, dtype: str) -> dict[str, Any]:
    """Return the settings of a model whose weights have Hugging Face's names, in ``dtype``.

    The class is that of ``transformers_class``; one must exist.
    """
    found = transformers_class(model)
    assert found is not None, "a model without a class has no names either"
    name = f"{found.name}LMHeadModel" if found.name == "GPT2" else f"{found.name}ForCausalLM"
    head = {"architectures": [name], "model_type": found.model_type}
    common = {
        "vocab_size": model.num_token_ids,
        "tie_word_embeddings": model.tied_embedding,
        "initializer_range": 0.02,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
    if found.name == "GPT2":
        return head | common | _gpt2(model, found.settings(model))
    config = {
        **head,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.seq_length,
        **common_settings(model),
        "attention_dropout": 0.0,
        **common,
        **_settings(found.name, model),
        **found.settings(model),
    }
    if model.mla is None:
        config["head_dim"] = model.size_of_head
    if model.mtp is not None:
        config["num_nextn_predict_layers"] = model.mtp.num_modules
    return config


def _gpt2(model: ModelSpec, parts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_inner": model.ffn_size,
        "n_head": model.num_heads,
        "n_positions": model.seq_length,
        **parts,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _settings(family: str, model: ModelSpec) -> dict[str, Any]:
    """Return the settings of a class that others lack, or that it has under other names."""
    moe, mla = model.moe, model.mla
    if mla is not None:
        experts = {"first_k_dense_replace": model.num_layers} if moe is None else _deepseek(moe)
        return experts | _latent(mla, model.num_heads)
    if moe is None:
        return {}
    match family:
        case "Mixtral":
            sizes = {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}
            return {**sizes, "intermediate_size": moe.ffn_size, "sliding_window": None}
        case "Qwen3Moe":
            sizes = {"num_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}
            dense = {"mlp_only_layers": list(range(moe.dense_layers)), "decoder_sparse_step": 1}
            return {**sizes, "moe_intermediate_size": moe.ffn_size, "norm_topk_prob": moe.normalize, **dense}
    return _deepseek(moe)


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
