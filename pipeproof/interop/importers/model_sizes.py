"""Sizes of the model: from a ``config.json`` next to the training file, from its own keys, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath, describe_value
from pipeproof.diagnostics.source import SourceMap, read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.interop.importers.import_codes import unreadable
from pipeproof.interop.importers.model_parts import PART_NAMES, take_parts
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.specs.compressed_attention import YarnSpec
from pipeproof.state.names.config_names import MODEL_NAMES

CONFIG_NAMES = (*MODEL_NAMES, *PART_NAMES)
"""All names that are read from a model configuration."""

_LATENT = ("num_kv_heads", "head_size")


def take_model(plan: PlanBuilder, values: Mapping[str, tuple[Any, Location | None]]) -> None:
    """Set the sizes and parts that a model configuration names; null and zero are left out.

    Raises:
        PlanFileError: PP170, a size is not an integer.
    """
    if values.get("model_type", ("", None))[0] == "deepseek_v4":
        _take_deepseek_v4(plan, values)
        return
    named = {name: values[name] for name in MODEL_NAMES if name in values and values[name][0] not in (None, "")}
    latent = "kv_lora_rank" in named
    for name, (value, location) in named.items():
        path = MODEL_NAMES[name]
        if value == 0 or (latent and path[0] in _LATENT):
            continue
        expected_type = bool if name == "tie_word_embeddings" else int
        if isinstance(value, list):
            plan.ignore(name, "a list with one number for each kind of layer; a plan has one number for all", location)
            continue
        if type(value) is not expected_type:
            message = f"`{name}` must be {'true or false' if expected_type is bool else 'an integer'}, found "
            raise unreadable(message + describe_value(value), location)
        plan.set(("model", *path), value, name, location)
    take_parts(plan, values)


def read_model_config(plan: PlanBuilder, file: Path) -> None:
    """Set the sizes of a ``config.json``; for a multimodal model, of its text part.

    Raises:
        PlanFileError: the file cannot be read, or is not a mapping.
    """
    data, source = read_mapping(str(file), "no model configuration: ")
    text = data.get("text_config")
    below: KeyPath = ("text_config",) if isinstance(text, dict) else ()
    sizes = text if isinstance(text, dict) else data
    take_model(plan, {name: (value, source.locate((*below, name))) for name, value in sizes.items()})


def read_mapping(name: str, prefix: str = "") -> tuple[dict[str, Any], SourceMap]:
    """Return the keys of a JSON or YAML file; messages begin with ``prefix``.

    Raises:
        PlanFileError: PP100 or PP170, the file cannot be read, or is not a mapping.
    """
    tree = parse_text(read_text(name), name)
    if tree.problems:
        message, location = tree.problems[0].message, tree.problems[0].location
    elif isinstance(tree.data, dict):
        return tree.data, tree.source
    else:
        message, location = f"a mapping of keys is expected, found {describe_value(tree.data)}", Location(name)
    raise unreadable(prefix + message, location, source=tree.source)


def assume_model(plan: PlanBuilder, num_stages: int) -> None:
    """Read the model configuration, if given, and assume small sizes that fill the stages and divide."""
    if plan.flags.model_config is not None:
        read_model_config(plan, plan.flags.model_config)
    why = "not in the files (`--model-config`); small, and divides over the ranks"
    tp, cp, ep = (plan.number("topology", axis) for axis in ("tp", "cp", "ep"))
    num_empty = sum(plan.number("model", "empty_layers", end, default=0) for end in ("head", "tail"))
    heads = plan.number("model", "num_heads", default=4 if 4 % tp == 0 else tp)
    plan.set(("model", "kind"), "gpt", "the family of the model")
    assumed: list[tuple[KeyPath, object]] = [
        (("num_layers",), _num_layers(num_stages, num_empty)),
        (("num_heads",), heads),
        (("hidden_size",), 64 * heads),
        (("ffn_size",), 128 * heads),
        (("vocab_size",), 512 * tp),
        (("seq_length",), 128 * tp * cp),
    ]
    experts = [(("moe", "num_experts"), 2 * ep), (("moe", "top_k"), 2), (("moe", "ffn_size"), 32 * tp)]
    if ep > 1 or ("model", "moe") in plan:
        assumed += experts
    if ("model", "mla") in plan:
        rank = (("kv_rank", 64), ("nope_head_size", 32), ("rope_head_size", 16), ("value_head_size", 32))
        assumed += [(("mla", key), value) for key, value in rank]
    for path, value in assumed:
        plan.assume(("model", *path), value, why)


def _num_layers(num_stages: int, num_empty: int) -> int:
    """Return the number of blocks for the same number of layers in each stage: two, or more with empty layers."""
    per_stage = 2
    while per_stage * num_stages <= num_empty:
        per_stage += 1
    return per_stage * num_stages - num_empty


# --- DeepSeek-V4, with the names of Hugging Face's ``DeepseekV4Config`` and of the release ---


_Values = Mapping[str, tuple[Any, Location | None]]
_V4_SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "vocab_size", "tie_word_embeddings",
    "num_nextn_predict_layers",
)  # fmt: skip
_V4_FORMULAS: Mapping[KeyPath, object] = MappingProxyType(
    {
        ("swiglu_formula",): "silu",
        ("hyper_connections", "sinkhorn"): "softmax",
        ("hyper_connections", "transposed"): True,
        ("hyper_connections", "contraction"): "learned",
    }
)
_V4_FLOATS = ("rope_theta", "compress_rope_theta")
_V4_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""The attention of a block by its entry in ``compress_ratios``."""
_V4_NAMES_OF_PADDLE = {
    "csa_compress_ratios": "compress_ratios", "csa_compress_rotary_base": "compress_rope_theta",
    "csa_window_size": "sliding_window", "moe_n_hash_layers": "num_hash_layers", "num_residual_streams": "hc_mult",
    "mhc_sinkhorn_iterations": "hc_sinkhorn_iters", "v_head_dim": "head_dim", "dsa_index_n_heads": "index_n_heads",
    "dsa_index_head_dim": "index_head_dim", "dsa_index_topk": "index_topk",
    "mtp_num_layers": "num_nextn_predict_layers", "activation_func_clamp_value": "swiglu_limit",
}  # fmt: skip
"""Names of PaddleFormers' ``DeepseekV4Config``, and of the release for the same settings."""
_V4_NOT_OF_PADDLE = {
    "csa_dense_mode": "an indexer chooses the entries of sparse attention here",
    "use_moh": "all heads of an indexer are active here",
    "use_dense_mtp": "a module has experts here, as the last block",
}
"""Switches of PaddleFormers that a plan does not have, and the reason; switched off, they change nothing."""


def _take_deepseek_v4(plan: PlanBuilder, values: _Values) -> None:
    """Set the model; null is left out."""
    from pipeproof.state.names.deepseek_v4 import SETTINGS

    _, of_type = values["model_type"]
    values = {_V4_NAMES_OF_PADDLE.get(name, name): value for name, value in values.items()} | dict(values)
    for name, why in _V4_NOT_OF_PADDLE.items():
        if values.get(name, (None, None))[0]:
            plan.ignore(name, why, values[name][1])
    settings = {name: value for name, value in values.items() if value[0] is not None} | _of_other_names(values)
    for name, path in ({name: MODEL_NAMES[name] for name in _V4_SIZES} | dict(SETTINGS)).items():
        value, location = settings.get(name, (None, None))
        if name in settings and not (name == "num_nextn_predict_layers" and value == 0):
            plan.set(("model", *path), float(value) if name in _V4_FLOATS else value, name, location)
    for path, formula in _V4_FORMULAS.items():
        plan.set(("model", *path), formula, "model_type deepseek_v4", of_type)
    if "moe_intermediate_size" in settings:  # no block has this MLP
        size, location = settings["moe_intermediate_size"]
        plan.set(("model", "ffn_size"), size, "moe_intermediate_size", location)
    if ("model", "mtp") in plan:
        why = "model_type deepseek_v4: the tokens of modules do not cross next to several streams"
        plan.set(("model", "mtp", "magic_send"), value=True, setting=why, location=of_type)
        plan.set(("model", "mtp", "reads"), "streams", "model_type deepseek_v4", of_type)
    if "rotary_scaling_factor" in settings and "rope_scaling" not in settings:  # PaddleFormers has no section
        factor, location = settings["rotary_scaling_factor"]
        kinds = (settings.get(name, (None, None))[0] for name in ("rope_type", "original_max_position_embeddings"))
        scaling = dict(zip(("rope_type", "original_max_position_embeddings"), kinds, strict=True))
        settings["rope_scaling"] = {**scaling, "factor": factor}, location
    for name in ("rope_scaling", "rope_parameters"):
        scaling, location = settings.get(name, ({}, None))
        if isinstance(scaling, dict):
            _take_scaling(plan, name, scaling.get("compress", scaling), location)


def _take_scaling(plan: PlanBuilder, name: str, scaling: Mapping[str, Any], location: Location | None) -> None:
    """YaRN without a factor of cosines and sines; another scaling is ignored, with the reason."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return
    factors = (scaling.get(key, 1.0) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if kind != "yarn" or any(factor not in {1.0, None} for factor in factors) or not scaling.get("truncate", True):
        why = "positions are scaled by `yarn` alone, truncated and with attention_factor 1; this changes no size"
        plan.ignore(name, why, location)
        return
    for key in YarnSpec.model_fields:
        if scaling.get(key) is not None:
            value = scaling[key] if key == "original_max_position_embeddings" else float(scaling[key])
            plan.set(("model", "compressed_attention", "rope_scaling", key), value, name, location)


def _of_other_names(values: _Values) -> dict[str, tuple[Any, Location | None]]:
    """Settings that some files have under other names: ``compress_ratios``, ``mlp_layer_types`` and a rotary factor."""
    settings: dict[str, tuple[Any, Location | None]] = {}
    ratios, location = values.get("compress_ratios", (None, None))
    types, of_types = values.get("layer_types", (None, None))
    has_module = bool(values.get("num_nextn_predict_layers", (0, None))[0])
    if isinstance(ratios, list) and all(ratio in _V4_TYPES for ratio in ratios):
        number = values.get("num_hidden_layers", (len(ratios), None))[0] + has_module
        settings["layer_types"] = [_V4_TYPES[ratio] for ratio in ratios[:number]], location
    elif isinstance(types, list):  # transformers' list does not have the module, which sees near tokens alone
        settings["layer_types"] = [*types, *["sliding_attention"] * has_module], of_types
    kinds, location = values.get("mlp_layer_types", (None, None))
    if isinstance(kinds, list):
        settings["num_hash_layers"] = kinds.count("hash_moe"), location
    factor, location = values.get("partial_rotary_factor", (None, None))
    if factor is not None and "qk_rope_head_dim" not in values and "head_dim" in values:
        settings["qk_rope_head_dim"] = int(values["head_dim"][0] * factor), location
    return settings
