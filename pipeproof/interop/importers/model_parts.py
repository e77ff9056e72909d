"""Parts of the model: norms, positions, activation, biases.

They come from a model's configuration, by its ``model_type``, or from the flags of Megatron-LM. Its defaults are as in
GPT-3: LayerNorm, learned positions, an MLP with GELU, and a bias in every product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pipeproof.diagnostics.finding import Location
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.specs.model import ModelSpec

_GPT = {"norm": "layer", "positions": "learned", "biases": "all"}
_PARTS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "gpt": _GPT,  # PaddleNLP's GPT-3
        "gpt2": _GPT,
        "qwen2": {"biases": "qkv"},
        "qwen2_moe": {"biases": "qkv"},
        "qwen3": {"qk_norm": True},
        "qwen3_moe": {"qk_norm": True},
        "stablelm": {"norm": "layer"},
        "starcoder2": {"norm": "layer"},
    }
)
"""Values that follow from the type alone, in Hugging Face's and Paddle's libraries; other types have a Llama's."""

_TIED = frozenset({"gpt", "gpt2", "ernie4_5", "ernie4_5_moe"})
"""Types whose head is tied by default."""

_TANH = frozenset({"gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast"})

PART_NAMES = (
    "model_type", "activation_function", "hidden_act", "use_qk_norm", "use_bias", "attention_bias", "use_qkv_bias",
    "mlp_bias", "mlp_only_layers",
)  # fmt: skip
"""Names of parts in configurations."""

POSITIONS, NORM, QK_NORM = "--position-embedding-type", "--normalization", "--qk-layernorm"
NO_BIAS, QKV_BIAS = "--disable-bias-linear", "--add-qkv-bias"
"""Flags of Megatron-LM for parts that have several values, or are left out."""
PART_NEGATED: Mapping[str, str] = MappingProxyType(
    {
        "add_bias_linear": NO_BIAS,
        "bias_gelu_fusion": "--no-bias-gelu-fusion",
        "add_position_embedding": "--no-position-embedding",
    }
)
"""Arguments of Megatron-LM for parts that are true by default, and the flags that make them false."""
PART_SWITCHES = (
    "--swiglu", "--quick-geglu", "--squared-relu", "--openai-gelu", "--no-bias-gelu-fusion", QK_NORM,
    "--use-rotary-position-embeddings", "--no-position-embedding", NO_BIAS, QKV_BIAS,
)  # fmt: skip
"""Flags of Megatron-LM for parts that have no value."""
PART_FLAGS = (*PART_SWITCHES, NORM, POSITIONS, "--max-position-embeddings")
"""Flags of Megatron-LM for parts."""

LLAMA: Mapping[str, str] = MappingProxyType({"norm": "rms", "positions": "rotary", "mlp": "swiglu", "biases": "none"})
"""Parts of a Llama."""


def flags_of_parts(model: ModelSpec) -> Iterator[Sequence[str]]:
    """Yield the arguments of Megatron-LM for the parts of a model."""
    yield NORM, {"rms": "RMSNorm", "layer": "LayerNorm"}[model.norm]
    if model.qk_norm:
        yield (QK_NORM,)
    yield POSITIONS, {"rotary": "rope", "learned": "learned_absolute"}[model.positions]
    yield from {"swiglu": [("--swiglu",)], "gelu_tanh": [("--openai-gelu",)], "gelu": [("--no-bias-gelu-fusion",)]}[
        model.mlp
    ]
    if model.biases != "all":
        yield (NO_BIAS,)
    if model.biases == "qkv":
        yield (QKV_BIAS,)


def type_of_parts(model: ModelSpec) -> str:
    """Return a ``model_type`` whose models have these norms, positions and biases; "llama" without one."""
    has_experts = model.moe is not None
    if model.norm == "layer":
        return "gpt" if model.positions == "learned" else "stablelm"
    if model.qk_norm:
        return "qwen3_moe" if has_experts else "qwen3"
    if model.biases == "qkv":
        return "qwen2_moe" if has_experts else "qwen2"
    return "deepseek_v3" if model.mla is not None else "llama"


def take_parts(plan: PlanBuilder, values: Mapping[str, tuple[Any, Location | None]]) -> None:
    """Set the parts that a configuration's type and switches name; the sizes are set before."""
    kind, location = values.get("model_type", ("", None))
    take_parts_of_type(plan, str(kind), f"model_type {kind}", location)
    if kind in _TIED and "tie_word_embeddings" not in values:
        plan.set(("model", "tied_embedding"), value=True, setting=f"model_type {kind}", location=location)
    if kind == "gpt2" and ("model", "hidden_size") in plan:
        plan.set(("model", "ffn_size"), 4 * plan.number("model", "hidden_size"), f"model_type {kind}", location)
    if kind in ("gpt", "gpt2", "starcoder2"):
        name = "activation_function" if "activation_function" in values else "hidden_act"
        _take_activation(plan, str(kind), name, *values.get(name, ("gelu_new", location)))
    dense, location = values.get("mlp_only_layers", (None, None))
    if dense and isinstance(dense, list) and dense == list(range(len(dense))):
        plan.set(("model", "moe", "dense_layers"), len(dense), "mlp_only_layers", location)
    elif dense:
        plan.ignore("mlp_only_layers", "all blocks after the first few have experts here", location)
    _take_switches(plan, str(kind), {name: location for name, (value, location) in values.items() if value is True})
    _name_other_positions(plan, values)


def _name_other_positions(plan: PlanBuilder, values: Mapping[str, tuple[Any, Location | None]]) -> None:
    """List the positions, the window and the order of blocks that a plan does not have; no size depends on them."""
    settings = {name: value for name, (value, _) in values.items()}
    scalings = {
        name: each for name in ("rope_scaling", "rope_parameters") if isinstance(each := settings.get(name), dict)
    }
    kinds = {name: [each, *(one for one in each.values() if isinstance(one, dict))] for name, each in scalings.items()}
    every = [settings, *(one for each in kinds.values() for one in each)]
    window, length = settings.get("sliding_window"), settings.get("max_position_embeddings")
    is_whole = not window or settings.get("use_sliding_window") is False
    last = (None, -1, plan.number("model", "num_layers") - 1)
    reasons = {
        name: "positions are not scaled here"
        for name, each in kinds.items()
        if any(one.get("rope_type", one.get("type", "default")) != "default" for one in each)
    }
    if any(one.get("partial_rotary_factor") not in (None, 1) for one in every):
        reasons["partial_rotary_factor"] = "positions turn all elements of a head here"
    if any(one.get("rope_theta") not in (None, 10000) for one in every):
        reasons["rope_theta"] = "it is 10000 here"
    if not is_whole and not (type(window) is type(length) is int and window >= length):
        reasons["sliding_window"] = "a token attends to all tokens before it here"
    if settings.get("moe_layer_interval", 1) != 1:
        reasons["moe_layer_interval"] = "all blocks after the first few have experts here"
    if settings.get("moe_layer_end_index") not in last:
        reasons["moe_layer_end_index"] = "the last block has experts here"
    for name, why in reasons.items():
        plan.ignore(name, f"{why}; this changes no size", values.get(name, (None, None))[1])


def take_parts_of_type(plan: PlanBuilder, kind: str, setting: str, location: Location | None) -> None:
    """Set the parts that a ``setting`` with the type of the model implies."""
    for key, value in _PARTS.get(kind, {}).items():
        plan.set(("model", key), value, setting, location)


def _take_activation(plan: PlanBuilder, kind: str, name: str, activation: object, location: Location | None) -> None:
    exact = activation == "gelu" and kind != "gpt"  # PaddleNLP's `gelu` is the approximation
    plan.set(("model", "mlp"), "gelu" if exact else "gelu_tanh", name, location)
    if activation != "gelu" and str(activation) not in _TANH:
        plan.ignore(name, f"MLPs without a gate have GELU here, and not {activation}", location)


def _take_switches(plan: PlanBuilder, kind: str, switches: Mapping[str, Location | None]) -> None:
    is_latent = ("model", "mla") in plan
    if "use_qk_norm" in switches and is_latent:
        plan.ignore("use_qk_norm", "latent attention has norms of its own", switches["use_qk_norm"])
    elif "use_qk_norm" in switches:
        plan.set(("model", "qk_norm"), value=True, setting="use_qk_norm", location=switches["use_qk_norm"])
    name = next((name for name in ("use_bias", "attention_bias", "use_qkv_bias", "mlp_bias") if name in switches), "")
    biases: str | None = "all" if name == "use_bias" or {"attention_bias", "mlp_bias"} <= switches.keys() else "qkv"
    if is_latent or name == "mlp_bias":
        biases = None
    elif ("model", "moe") in plan:
        biases = "qkv"
    if name and biases is not None:
        plan.set(("model", "biases"), biases, name, switches[name])
    if name and biases != "all" and name != "use_qkv_bias" and kind != "glm4_moe":
        described = "only queries, keys and values" if biases == "qkv" else "none"
        plan.ignore(name, f"biases that can be described here: {described}", switches[name])
