"""Conventions as tables: the tool's name for each role of a tensor in the model.

Sources: the modelling files of Hugging Face's transformers; the names that Megatron-Core's modules have with
Transformer Engine, as Megatron-Bridge lists them; the modelling files of PaddleFormers, their AOA statements and their
layers. ``part_tables`` has the tensors that only some parts of a model have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pipeproof.diagnostics.problems import listed
from pipeproof.specs.model import PART_KEYS, ModelSpec
from pipeproof.state.names.convention import OWN_NAMES, Convention
from pipeproof.state.names.deepseek_v4 import DEEPSEEK_V4, refusal_of
from pipeproof.state.names.part_tables import ERNIE, TENSORS, TRANSFORMERS, PartTensors, paddle_has, transformers_class
from pipeproof.state.state_codes import NoNamesError

_MLP = {tensor: f"mlp.{tensor}_proj.weight" for tensor in ("gate", "up", "down")}
_ROUTED = {f"expert_{tensor}": f"mlp.experts.{{expert}}.{tensor}_proj.weight" for tensor in ("gate", "up", "down")}
_SHARED = {f"shared_{tensor}": f"mlp.shared_experts.{tensor}_proj.weight" for tensor in ("gate", "up", "down")}
_LLAMA = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "experts_norm": "post_attention_layernorm.weight",
    **_MLP,
}
_DEEPSEEK = {
    **_LLAMA,
    "q_whole": "self_attn.q_proj.weight",
    "q_down": "self_attn.q_a_proj.weight",
    "q_norm": "self_attn.q_a_layernorm.weight",
    "q_up": "self_attn.q_b_proj.weight",
    "kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_norm": "self_attn.kv_a_layernorm.weight",
    "kv_up": "self_attn.kv_b_proj.weight",
    "router": "mlp.gate.weight",
    "router_bias": "mlp.gate.e_score_correction_bias",
    **_ROUTED,
    **_SHARED,
}
_MIXTRAL = {
    **_LLAMA,
    "router": "block_sparse_moe.gate.weight",
    "expert_gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "expert_up": "block_sparse_moe.experts.{expert}.w3.weight",
    "expert_down": "block_sparse_moe.experts.{expert}.w2.weight",
}
_WHOLE = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_FLEET_WHOLE = {**_WHOLE, "embed": "model.embedding.embed_tokens.weight", "head": "model.lm_head.weight"}
_MODULE = {"hidden_norm": "hnorm.weight", "embed_norm": "enorm.weight", "proj": "eh_proj.weight"}

_HUGGINGFACE = Convention(
    whole=_WHOLE,
    block=_DEEPSEEK,
    module={
        **_MODULE,
        "module_embed": "embed_tokens.weight",
        "module_norm": "shared_head.norm.weight",
        "module_head": "shared_head.head.weight",
    },
    block_name="model.layers.{number}",
    module_name="model.layers.{after}",
    module_block="",
    transposed=True,
    router_transposed=True,
)
_GPT2 = Convention(
    whole={
        "embed": "transformer.wte.weight",
        "norm": "transformer.ln_f.weight",
        "head": "lm_head.weight",
    },
    block={
        "attn_norm": "ln_1.weight",
        "qkv_by_kind": "attn.c_attn.weight",
        "out": "attn.c_proj.weight",
        "mlp_norm": "ln_2.weight",
    },
    module={},
    block_name="transformer.h.{number}",
    module_name="",
    module_block="",
    transposed=False,
    router_transposed=False,
)
_MEGATRON_BLOCK = {
    "attn_norm": "input_layernorm.weight",
    "qkv": "self_attention.linear_qkv.weight",
    "out": "self_attention.linear_proj.weight",
    "q_whole": "self_attention.linear_q_proj.weight",
    "q_down": "self_attention.linear_q_down_proj.weight",
    "q_norm": "self_attention.linear_q_up_proj.layer_norm_weight",
    "q_up": "self_attention.linear_q_up_proj.weight",
    "kv_down": "self_attention.linear_kv_down_proj.weight",
    "kv_norm": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "kv_up": "self_attention.linear_kv_up_proj.weight",
    "mlp_norm": "mlp.linear_fc1.layer_norm_weight",
    "gate_up": "mlp.linear_fc1.weight",
    "down": "mlp.linear_fc2.weight",
    "experts_norm": "pre_mlp_layernorm.weight",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.expert_bias",
    "expert_gate_up": "mlp.experts.linear_fc1.weight{expert}",
    "expert_down": "mlp.experts.linear_fc2.weight{expert}",
    "shared_gate_up": "mlp.shared_experts.linear_fc1.weight",
    "shared_down": "mlp.shared_experts.linear_fc2.weight",
}
_MEGATRON = Convention(
    whole={
        "embed": "embedding.word_embeddings.weight",
        "norm": "decoder.final_layernorm.weight",
        "head": "output_layer.weight",
    },
    block=_MEGATRON_BLOCK,
    module={**_MODULE, "module_norm": "final_layernorm.weight"},
    block_name="decoder.layers.{number}",
    module_name="mtp.layers.{number}",
    module_block=".transformer_layer",
    transposed=True,
    router_transposed=True,
    padded=True,
)
_FUSED = {
    "qkv": "self_attn.qkv_proj.weight",
    "gate_up": "mlp.up_gate_proj.weight",
    "expert_gate_up": "mlp.experts.{expert}.up_gate_proj.weight",
    "shared_gate_up": "mlp.shared_experts.up_gate_proj.weight",
}

_OWN_BLOCK = {
    "attn_norm": "attn_norm.weight",
    "qkv": "attn.qkv.weight",
    "out": "attn.out.weight",
    "mlp_norm": "mlp_norm.weight",
    "gate": "mlp.gate.weight",
    "up": "mlp.up.weight",
    "down": "mlp.down.weight",
}


def _with_parts(common: Convention, tensors: PartTensors) -> Convention:
    return replace(common, whole={**common.whole, **tensors.whole}, block={**common.block, **tensors.block})


OWN_CONVENTION = _with_parts(
    Convention(
        whole={
            "embed": "embed.weight",
            "norm": "norm.weight",
            "head": "head.weight",
        },
        block=_OWN_BLOCK,
        module={"hidden_norm": "hidden_norm.weight", "embed_norm": "embed_norm.weight", "proj": "proj.weight"},
        block_name="layer.{number}",
        module_name="mtp.{number}",
        module_block="",
        transposed=False,
        router_transposed=False,
        head_transposed=False,
        padded=True,
        hidden_first=True,
    ),
    TENSORS[OWN_NAMES],
)
"""Pipeproof's own names, as far as its tensors are matrices in other tools: without experts and latent attention."""


def convention_of(name: str, model: ModelSpec) -> Convention:
    """Return the names that a convention has for a model.

    Raises:
        NoNamesError: PP928, the convention is unknown, or has no names for a part of the model.
    """
    require_convention(name)
    reason = _refusal(name, model)
    if reason is not None:
        raise NoNamesError(
            f"`{name}` has no names for this model: {reason}",
            "leave `--names` away: under pipeproof's own names every model can be kept",
        )
    return _MAKERS[name](model)


def require_convention(name: str) -> None:
    """Raise unless a convention is known.

    Raises:
        NoNamesError: PP928, it is not.
    """
    if name not in _MAKERS:
        choices = ", ".join((OWN_NAMES, *_MAKERS))
        raise NoNamesError(f"there is no naming convention `{name}`", f"known are {choices}")


def _refusal(name: str, model: ModelSpec) -> str | None:
    if name == "huggingface" and model.compressed_attention is not None:
        return refusal_of(model)
    if model.hyper_connections is not None:
        return "`hyper_connections` have weights that only DeepSeek-V4 in `huggingface` has"
    if model.compressed_attention is not None:
        return "`compressed_attention` has weights whose names are only known in `huggingface`"
    if model.swiglu_limit is not None and name != "megatron":
        return "`swiglu_limit` is the function of gpt-oss, whose experts have biases and columns in another order"
    mtp = model.mtp
    if mtp is not None and mtp.reads == "after_norm" and name in ("huggingface", "paddleformers-unfused"):
        return "modules read hidden states before the last norm there, and `mtp.reads` is `after_norm`"
    if mtp is not None and mtp.embedding == "own" and name != "huggingface":
        return "modules have the embedding of the main model there, and `mtp.embedding` is `own`"
    moe = model.moe
    if moe is not None and moe.hash_layers:
        return "`moe.hash_layers` have a table of experts"
    if moe is not None and name != "megatron" and (moe.score == "sqrtsoftplus" or moe.routed_scale != 1.0):
        return "`moe.routed_scale` and `score: sqrtsoftplus` are settings that only Megatron-Core is known to have"
    if name != ERNIE and moe is not None and moe.score == "softmax" and moe.expert_bias_rate is not None:
        return f"routers with biases (`moe.expert_bias_rate`) are only known with `score: sigmoid`, and in `{ERNIE}`"
    if name in TRANSFORMERS and transformers_class(model, name) is None:
        if name == "huggingface":
            return f"no class of transformers has {_parts(model)}"
        experts = (
            "; its experts have `score: softmax`, `normalize: true` and `expert_bias_rate`" if name == ERNIE else ""
        )
        return f"no class of transformers with these names has {_parts(model, ())}{experts if moe else ''}"
    if name.startswith("paddle") and not paddle_has(name, model):
        return f"no model of PaddleFormers has {_parts(model)}"
    return None


def _parts(model: ModelSpec, sizes: tuple[str, ...] = ("num_kv_heads", "head_size")) -> str:
    """Return the keys of a model's parts that differ from a Llama's, for messages."""
    default = {key: ModelSpec.model_fields[key].default for key in PART_KEYS}
    parts = [f"`{key}: {str(value).lower()}`" for key in PART_KEYS if (value := getattr(model, key)) != default[key]]
    sections = [f"`{key}`" for key in (*sizes, "moe", "mla", "mtp") if getattr(model, key)]
    return listed(parts + sections, "and")


def _huggingface(model: ModelSpec, name: str = "huggingface") -> Convention:
    if model.compressed_attention is not None:
        return DEEPSEEK_V4
    model_class = transformers_class(model, name)
    assert model_class is not None, "a model without a class is refused"
    if model_class.name == "GPT2":
        common = _GPT2
    else:
        common = replace(_HUGGINGFACE, block=_MIXTRAL) if model_class.name == "Mixtral" else _HUGGINGFACE
        layout: dict[str, Any] = dict.fromkeys(model_class.layout, True)
        common = replace(common, **layout)
    return _with_parts(common, model_class.tensors)


def _megatron(model: ModelSpec) -> Convention:
    common = _with_parts(_MEGATRON, TENSORS["megatron"])
    if model.mla is not None:  # the norm is separate: two products read it
        return common
    return replace(common, block={**common.block, "attn_norm": "self_attention.linear_qkv.layer_norm_weight"})


def _paddleformers(model: ModelSpec) -> Convention:
    common = _of_paddle(model)
    by_rank = frozenset(role for role in _FUSED if role.endswith("gate_up"))
    return replace(common, block={**common.block, **_FUSED}, fused_by_rank=by_rank)


def _paddlefleet(model: ModelSpec) -> Convention:
    # Experts are whole on the rank that has them, and PaddleFormers' statements for them have `axis=1`.
    common = _paddleformers(model)
    by_rank = common.fused_by_rank - {"expert_gate_up"}
    return replace(
        _with_parts(common, TENSORS["paddlefleet"]),
        whole=_FLEET_WHOLE,
        router_transposed=True,
        has_tied_head=True,
        fused_by_rank=by_rank,
    )


def _unfused(model: ModelSpec) -> Convention:
    common = _of_paddle(model)
    if model.mla is None:
        return common
    # DeepSeek-V3's class: its router is like a Linear, and a module is a block with more tensors, and without a norm
    return replace(common, router_transposed=False, module=_MODULE, module_block="", hidden_first=True)


def _of_paddle(model: ModelSpec) -> Convention:
    common = Convention(
        whole=_WHOLE,
        block=_DEEPSEEK,
        module={**_MODULE, "module_norm": "norm.weight"},
        block_name="model.layers.{number}",
        module_name="model.layers.{after}",
        module_block=".transformer_layer",
        transposed=False,
        router_transposed=model.moe is not None and model.moe.score == "sigmoid",
    )
    return _with_parts(common, TENSORS["paddleformers"])


_MAKERS: Mapping[str, Callable[[ModelSpec], Convention]] = {
    **{name: partial(_huggingface, name=name) for name in TRANSFORMERS},
    "megatron": _megatron,
    "paddleformers": _paddleformers,
    "paddleformers-unfused": _unfused,
    "paddlefleet": _paddlefleet,
}

CONVENTIONS = (OWN_NAMES, *_MAKERS)
"""Names of the conventions."""
