"""The model of a ``config.json`` of DeepSeek-V4, with the names of Hugging Face's ``DeepseekV4Config``.

Files of the release have some keys under older names: ``compress_ratios``, ``num_hash_layers``, ``qk_rope_head_dim``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath
from pipeproof.interop.importers.draft import Draft
from pipeproof.specs.compressed_attention import YarnSpec

_ATTENTION = (
    "layer_types", "q_lora_rank", "qk_rope_head_dim", "sliding_window", "compress_rates", "o_groups", "o_lora_rank",
    "index_n_heads", "index_head_dim", "index_topk",
)  # fmt: skip
_NAMES: Mapping[str, KeyPath] = MappingProxyType(
    {
        "num_hidden_layers": ("num_layers",),
        "hidden_size": ("hidden_size",),
        "num_attention_heads": ("num_heads",),
        "head_dim": ("head_size",),
        "vocab_size": ("vocab_size",),
        "tie_word_embeddings": ("tied_embedding",),
        "n_routed_experts": ("moe", "num_experts"),
        "num_experts_per_tok": ("moe", "top_k"),
        "moe_intermediate_size": ("moe", "ffn_size"),
        "n_shared_experts": ("moe", "num_shared_experts"),
        "scoring_func": ("moe", "score"),
        "norm_topk_prob": ("moe", "normalize"),
        "routed_scaling_factor": ("moe", "routed_scale"),
        "num_hash_layers": ("moe", "hash_layers"),
        "swiglu_limit": ("swiglu_limit",),
        "hc_mult": ("hyper_connections", "streams"),
        "hc_sinkhorn_iters": ("hyper_connections", "sinkhorn_iterations"),
        "hc_eps": ("hyper_connections", "epsilon"),
        **{name: ("compressed_attention", name) for name in _ATTENTION},
        "num_nextn_predict_layers": ("mtp", "num_modules"),
    }
)
_FLOATS: Mapping[str, KeyPath] = MappingProxyType(
    {name: ("compressed_attention", name) for name in ("rope_theta", "compress_rope_theta")}
)
_FORMULAS: Mapping[KeyPath, object] = MappingProxyType(
    {
        ("swiglu_formula",): "silu",
        ("hyper_connections", "sinkhorn"): "softmax",
        ("hyper_connections", "transposed"): True,
        ("hyper_connections", "contraction"): "learned",
    }
)
_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""The attention of a block by its entry in ``compress_ratios``."""


def is_deepseek_v4(values: Mapping[str, tuple[Any, Location | None]]) -> bool:
    """Return True for the configuration of such a model."""
    return bool(values.get("model_type", ("", None))[0] == "deepseek_v4")


def take_deepseek_v4(draft: Draft, values: Mapping[str, tuple[Any, Location | None]]) -> None:
    """Set the model; null is left out."""
    _, of_type = values["model_type"]
    given = {name: value for name, value in values.items() if value[0] is not None} | _older(values)
    for name, path in _NAMES.items():
        if name in given and not (name == "num_nextn_predict_layers" and given[name][0] == 0):
            draft.set(("model", *path), *_with_setting(given, name))
    for name, path in _FLOATS.items():
        if name in given:
            value, location = given[name]
            draft.set(("model", *path), float(value), name, location)
    for path, formula in _FORMULAS.items():
        draft.set(("model", *path), formula, "model_type deepseek_v4", of_type)
    if "moe_intermediate_size" in given:  # no block has this MLP
        draft.set(("model", "ffn_size"), *_with_setting(given, "moe_intermediate_size"))
    if ("model", "mtp") in draft:
        why = "model_type deepseek_v4: the tokens of modules do not cross next to several streams"
        draft.set(("model", "mtp", "magic_send"), value=True, setting=why, location=of_type)
    for name in ("rope_scaling", "rope_parameters"):
        scaling, location = given.get(name, ({}, None))
        if isinstance(scaling, dict):
            _take_scaling(draft, name, scaling.get("compress", scaling), location)


def _take_scaling(draft: Draft, name: str, scaling: Mapping[str, Any], location: Location | None) -> None:
    """YaRN without a factor of cosines and sines; another scaling is ignored, with the reason."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return
    factors = (scaling.get(key, 1.0) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if kind != "yarn" or any(factor not in {1.0, None} for factor in factors) or not scaling.get("truncate", True):
        why = "positions are scaled by `yarn` alone, truncated and with attention_factor 1; this changes no size"
        draft.ignore(name, why, location)
        return
    for key in YarnSpec.model_fields:
        if scaling.get(key) is not None:
            value = scaling[key] if key == "original_max_position_embeddings" else float(scaling[key])
            draft.set(("model", "compressed_attention", "rope_scaling", key), value, name, location)


def _with_setting(given: Mapping[str, tuple[Any, Location | None]], name: str) -> tuple[Any, str, Location | None]:
    value, location = given[name]
    return value, name, location


def _older(values: Mapping[str, tuple[Any, Location | None]]) -> dict[str, tuple[Any, Location | None]]:
    """Values under the names of the plan that the file has under other ones."""
    found: dict[str, tuple[Any, Location | None]] = {}
    ratios, location = values.get("compress_ratios", (None, None))
    if isinstance(ratios, list) and all(ratio in _TYPES for ratio in ratios):
        number = values.get("num_hidden_layers", (len(ratios), None))[0]
        found["layer_types"] = [_TYPES[ratio] for ratio in ratios[:number]], location
    kinds, location = values.get("mlp_layer_types", (None, None))
    if isinstance(kinds, list):
        found["num_hash_layers"] = kinds.count("hash_moe"), location
    factor, location = values.get("partial_rotary_factor", (None, None))
    if factor is not None and "qk_rope_head_dim" not in values and "head_dim" in values:
        found["qk_rope_head_dim"] = int(values["head_dim"][0] * factor), location
    return found
