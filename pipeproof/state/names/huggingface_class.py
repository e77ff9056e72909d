"""The class of Hugging Face's transformers that computes a plan's model: it decides names and ``config.json``."""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec


def huggingface_class(model: ModelSpec) -> str | None:
    """Return the class's name, without its suffix; None if no class has these parts together.

    ``Deepseek``, the first one with experts, is remote code.
    """
    if model.norm == "rms" and model.positions == "rotary" and model.mlp == "swiglu":
        return _with_experts(model) if model.moe is not None else _dense(model)
    if model.norm == "rms" or model.qk_norm or model.moe is not None or model.mla is not None or model.mtp is not None:
        return None
    if model.positions == "learned":
        own_heads = model.kv_heads == model.num_heads and not _has_other_head_size(model)
        return "GPT2" if own_heads and model.mlp != "swiglu" and model.biases == "all" else None
    if model.mlp != "swiglu":
        return None if model.biases == "qkv" else "Starcoder2"
    return None if model.biases == "all" or _has_other_head_size(model) else "StableLm"


def _dense(model: ModelSpec) -> str | None:
    """Return the class for RMSNorm, rotary positions and SwiGLU, without experts."""
    if model.mla is not None:
        return "DeepseekV3"
    if model.qk_norm:
        return "Qwen3" if model.biases == "none" else None
    return "Qwen2" if model.biases == "qkv" else "Llama"


def _with_experts(model: ModelSpec) -> str | None:
    moe = model.moe
    assert moe is not None
    if model.mla is not None:
        return "DeepseekV2" if moe.score == "softmax" else "DeepseekV3"
    if moe.score == "sigmoid":
        return "Glm4Moe"
    if model.biases != "none":
        return None
    if model.qk_norm:
        return None if moe.num_shared_experts else "Qwen3Moe"
    more = (moe.num_shared_experts, moe.dense_layers, not moe.normalize, model.mtp)
    return "Deepseek" if any(more) else "Mixtral"


def _has_other_head_size(model: ModelSpec) -> bool:
    return model.size_of_head * model.num_heads != model.hidden_size
