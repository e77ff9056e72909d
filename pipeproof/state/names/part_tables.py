"""Parts of a model in other tools: the tensors that only a part has, models by their parts, and ``config.json``.

A part is a key of the plan's ``model``: ``norm``, ``qk_norm``, ``positions``, ``mlp`` or ``biases``. A model that is
not listed with a value of a part has a Llama's: RMSNorm, rotary positions, SwiGLU, no norms of heads, no biases. Where
a model has biases, the tool's names for them follow from the weights' names.

Sources: as for ``convention_tables``, and the configurations of transformers' classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipeproof.specs.model import PART_KEYS, ModelSpec, MoeSpec
from pipeproof.state.names import deepseek_v4
from pipeproof.state.names.config_names import named_values
from pipeproof.state.names.convention import OWN_NAMES

_NORM_EPSILON = 1e-6
_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


class PartTensors(NamedTuple):
    """Names of tensors by role: of tensors that exist once and of tensors in a block, as in ``Convention``."""

    whole: Mapping[str, str]
    block: Mapping[str, str]


_NO_TENSORS = PartTensors({}, {})
_HEAD_NORMS = {"q_head_norm": "self_attn.q_norm.weight", "k_head_norm": "self_attn.k_norm.weight"}
TENSORS = {
    OWN_NAMES: PartTensors(
        {"positions": "embed.positions.weight"},
        {"q_head_norm": "attn.q_head_norm.weight", "k_head_norm": "attn.k_head_norm.weight"},
    ),
    "megatron": PartTensors(
        {"positions": "embedding.position_embeddings.weight"},
        {
            "q_head_norm": "self_attention.q_layernorm.weight",
            "k_head_norm": "self_attention.k_layernorm.weight",
            "up": "mlp.linear_fc1.weight",  # of GELU; a SwiGLU has gate and up in one
        },
    ),
    "paddleformers": PartTensors({}, _HEAD_NORMS),
    "paddlefleet": PartTensors(
        {}, {"q_head_norm": "self_attn.q_layernorm.weight", "k_head_norm": "self_attn.k_layernorm.weight"}
    ),
}
"""By convention, the tensors that all its models with a part have."""


def _of_any_sizes(_: ModelSpec) -> bool:
    return True


def _no_settings(_: ModelSpec) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class ToolModel:
    """A model of another tool.

    It can compute a plan's model that ``fits`` and whose parts have the values in ``parts``. ``tensors`` are the
    tensors that only its parts have, ``settings`` the keys of its configuration for parts and constants. ``convention``
    has its names, if the fields in ``layout`` are true.
    """

    name: str
    parts: Mapping[str, Sequence[object]]
    fits: Callable[[ModelSpec], bool]
    model_type: str = ""
    tensors: PartTensors = _NO_TENSORS
    settings: Callable[[ModelSpec], dict[str, Any]] = _no_settings
    convention: str = "huggingface"
    layout: tuple[str, ...] = ()

    def can_be(self, model: ModelSpec) -> bool:
        """Return True if it can compute the plan's model."""
        fields = ModelSpec.model_fields
        has_parts = all(getattr(model, key) in self.parts.get(key, (fields[key].default,)) for key in PART_KEYS)
        return has_parts and model.compressed_attention is None and self.fits(model)


def transformers_class(model: ModelSpec, convention: str = "huggingface") -> ToolModel | None:
    """Return the class of Hugging Face's transformers with the names of a convention; None if none has these parts.

    ``Deepseek``, the first one with experts, is remote code.
    """
    if model.compressed_attention is not None:
        return _DEEPSEEK_V4
    matches = (each for each in _TRANSFORMERS if each.convention == convention and each.can_be(model))
    return next(matches, None)


def paddle_has(convention: str, model: ModelSpec) -> bool:
    """Return True if PaddleFormers has a model with such parts. Its Llama with all biases fuses nothing.

    That Llama is not built over PaddleFleet either.
    """
    classes = (*_PADDLE, *([_PADDLE_LLAMA] if convention == "paddleformers-unfused" else []))
    return any(each.can_be(model) for each in classes)


def common_settings(model: ModelSpec) -> dict[str, Any]:
    """Return the settings of parts that most classes of transformers have."""
    return {
        "hidden_act": _GELUS.get(model.mlp, "silu"),
        "rms_norm_eps": _NORM_EPSILON,
        "rope_theta": 10000.0,
        "attention_bias": model.biases == "all",
    }


def _is_dense(model: ModelSpec) -> bool:
    return model.moe is None and model.mla is None


def _has_sigmoids(model: ModelSpec) -> bool:
    return model.moe is not None and model.moe.score == "sigmoid"


def _is_mixture(model: ModelSpec) -> bool:
    return model.moe is not None and model.mla is None


def _has_own_head_size(model: ModelSpec) -> bool:
    return model.size_of_head * model.num_heads != model.hidden_size


def _is_old(model: ModelSpec) -> bool:
    return _is_dense(model) and model.mtp is None


def _is_ernie_with_experts(model: ModelSpec) -> bool:
    moe = model.moe
    has_biases = moe is not None and moe.score == "softmax" and moe.expert_bias_rate is not None and moe.normalize
    return _is_mixture(model) and has_biases and model.mtp is None


def _is_mixtral(model: ModelSpec) -> bool:
    moe = model.moe
    return _is_mixture(model) and moe is not None and not (moe.num_shared_experts or moe.dense_layers) and moe.normalize


def _gpt2(model: ModelSpec) -> dict[str, Any]:
    return {"activation_function": _GELUS[model.mlp], "layer_norm_epsilon": _NORM_EPSILON}


def _glm4(model: ModelSpec) -> dict[str, Any]:
    return {"partial_rotary_factor": 1.0, "use_qk_norm": model.qk_norm, "attention_bias": model.biases == "qkv"}


def _starcoder(model: ModelSpec) -> dict[str, Any]:
    dropout = {"residual_dropout": 0.0, "embedding_dropout": 0.0}
    return {"norm_epsilon": _NORM_EPSILON, "use_bias": model.biases == "all", "sliding_window": None, **dropout}


def _stablelm(model: ModelSpec) -> dict[str, Any]:
    bias = {"use_qkv_bias": model.biases == "qkv", "use_parallel_residual": False, "hidden_dropout": 0.0}
    return {"layer_norm_eps": _NORM_EPSILON, "partial_rotary_factor": 1.0, "qk_layernorm": False, **bias}


def _phi3(model: ModelSpec) -> dict[str, Any]:
    positions = {"partial_rotary_factor": 1.0, "original_max_position_embeddings": model.seq_length}
    return {**positions, "sliding_window": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **_NO_IDS}


def _ernie(_: ModelSpec) -> dict[str, Any]:
    return {"use_bias": False, **_NO_IDS}


ERNIE = "huggingface-ernie4_5"
_NO_IDS = {"bos_token_id": None, "eos_token_id": None}
_PHI3_NAMES = {"qkv_by_kind": "self_attn.qkv_proj.weight", "gate_up": "mlp.gate_up_proj.weight"}
_QWEN3 = {"qk_norm": (True,)}
_GLM4 = {"qk_norm": (False, True), "biases": ("none", "qkv")}
_LAYER_NORM_GELU = {"norm": ("layer",), "mlp": tuple(_GELUS)}
_C_NAMES = {"up": "mlp.c_fc.weight", "down": "mlp.c_proj.weight"}
_WITH_HEAD_NORMS = PartTensors({}, _HEAD_NORMS)
_TRANSFORMERS = (
    ToolModel(
        "DeepseekV2", {}, lambda model: model.mla is not None and model.moe is not None and not _has_sigmoids(model),
        "deepseek_v2",
    ),
    ToolModel("DeepseekV3", {}, lambda model: model.mla is not None, "deepseek_v3"),
    ToolModel("Glm4Moe", _GLM4, _has_sigmoids, "glm4_moe", _WITH_HEAD_NORMS, _glm4),
    ToolModel(
        "Qwen3Moe", _QWEN3, lambda model: model.moe is not None and not model.moe.num_shared_experts, "qwen3_moe",
        _WITH_HEAD_NORMS,
    ),
    ToolModel("Mixtral", {}, lambda model: _is_mixtral(model) and model.mtp is None, "mixtral"),
    ToolModel("Deepseek", {}, _is_mixture, "deepseek"),
    ToolModel("Qwen3", _QWEN3, _is_dense, "qwen3", _WITH_HEAD_NORMS),
    ToolModel("Qwen2", {"biases": ("qkv",)}, _is_dense, "qwen2"),
    ToolModel(
        "Llama", {"biases": ("none", "all")}, _is_dense, "llama",
        settings=lambda model: {"mlp_bias": model.biases == "all"},
    ),
    ToolModel(
        "GPT2", {**_LAYER_NORM_GELU, "positions": ("learned",), "biases": ("all",)},
        lambda model: _is_old(model) and model.kv_heads == model.num_heads and not _has_own_head_size(model),
        "gpt2", PartTensors({"positions": "transformer.wpe.weight"}, _C_NAMES), _gpt2,
    ),
    ToolModel(
        "Starcoder2", {**_LAYER_NORM_GELU, "biases": ("none", "all")}, _is_old, "starcoder2",
        PartTensors({}, _C_NAMES), _starcoder,
    ),
    ToolModel(
        "StableLm", {"norm": ("layer",), "biases": ("none", "qkv")},
        lambda model: _is_old(model) and not _has_own_head_size(model), "stablelm", settings=_stablelm,
    ),
    ToolModel("Phi3", {}, _is_old, "phi3", PartTensors({}, _PHI3_NAMES), _phi3, "huggingface-phi3"),
    ToolModel("Ernie4_5", {}, _is_old, "ernie4_5", _NO_TENSORS, _ernie, ERNIE, ("rotary_pairs",)),
    ToolModel(
        "Ernie4_5_Moe", {}, _is_ernie_with_experts, "ernie4_5_moe",
        PartTensors({}, {"router_bias": "mlp.moe_statics.e_score_correction_bias"}), _ernie, ERNIE,
        ("rotary_pairs", "router_bias_is_row"),
    ),
)  # fmt: skip
_DEEPSEEK_V4 = ToolModel("DeepseekV4", {}, _of_any_sizes, "deepseek_v4", settings=deepseek_v4.settings_of)
_PADDLE = (
    ToolModel("Llama, Qwen2, DeepSeek", {"biases": ("none", "qkv")}, _of_any_sizes),
    ToolModel("Qwen3", _QWEN3, _of_any_sizes),
    ToolModel("GLM-4 with experts", _GLM4, _has_sigmoids),
)
_PADDLE_LLAMA = ToolModel("Llama", {"biases": ("all",)}, _of_any_sizes)

TRANSFORMERS = tuple(dict.fromkeys(each.convention for each in _TRANSFORMERS))
"""The conventions whose names classes of transformers have."""

CONFIG_FILE = "config.json"


def config_of(model: ModelSpec, dtype: str, convention: str = "huggingface") -> dict[str, Any]:
    """Return the settings of a model whose weights, in ``dtype``, have the names of one of ``TRANSFORMERS``.

    ``transformers_class`` gives the class, which must exist.
    """
    model_class = transformers_class(model, convention)
    assert model_class is not None, "a model without a class has no names either"
    name = f"{model_class.name}LMHeadModel" if model_class.name == "GPT2" else f"{model_class.name}ForCausalLM"
    head = {"architectures": [name], "model_type": model_class.model_type}
    common = {
        "vocab_size": model.num_token_ids,
        "tie_word_embeddings": model.tied_embedding,
        "initializer_range": 0.02,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
    if model_class.name == "GPT2":
        return head | common | _gpt2_config(model, model_class.settings(model))
    config = {
        **head,
        **named_values(model, "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.seq_length,
        **common_settings(model),
        "attention_dropout": 0.0,
        **common,
        **_settings(model_class.name, model),
        **model_class.settings(model),
    }
    if model.mla is None:
        config["head_dim"] = model.size_of_head
    if model.mtp is not None:
        config["num_nextn_predict_layers"] = model.mtp.num_modules
    return config


def _gpt2_config(model: ModelSpec, parts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **named_values(model, "n_layer", "n_embd", "n_inner", "n_head"),
        "n_positions": model.seq_length,
        **parts,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **_NO_IDS,
    }


def _settings(family: str, model: ModelSpec) -> dict[str, Any]:
    """Return the settings of a class that others lack, or that it has under other names."""
    moe, mla = model.moe, model.mla
    if mla is not None:
        experts = {"first_k_dense_replace": model.num_layers} if moe is None else _deepseek(model, moe)
        ranks = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {
            **experts,
            **named_values(model, *ranks),
            "num_key_value_heads": model.num_heads,
            "rope_interleave": True,
        }
    if moe is None or model.compressed_attention is not None:
        return {}
    match family:
        case "Mixtral":
            sizes = named_values(model, "num_local_experts", "num_experts_per_tok")
            return {**sizes, "intermediate_size": moe.ffn_size, "sliding_window": None}
        case "Ernie4_5_Moe":
            names = "moe_num_experts", "moe_k", "moe_intermediate_size", "moe_num_shared_experts"
            blocks = {"moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12}
            return {**named_values(model, *names, "moe_layer_start_index"), **blocks}
        case "Qwen3Moe":
            sizes = named_values(model, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
            dense = {"mlp_only_layers": list(range(moe.dense_layers)), "decoder_sparse_step": 1}
            return {**sizes, "norm_topk_prob": moe.normalize, **dense}
    return _deepseek(model, moe)


def _deepseek(model: ModelSpec, moe: MoeSpec) -> dict[str, Any]:
    names = "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace"
    return {
        **named_values(model, *names),
        "n_shared_experts": moe.num_shared_experts or None,
        "moe_layer_freq": 1,
        "norm_topk_prob": moe.normalize,
        "scoring_func": moe.score,
        "topk_method": "noaux_tc" if moe.score == "sigmoid" else "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    }
