"""The sizes of the model: from a ``config.json`` beside the training file, from its own keys, or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.interop.codes import UNREADABLE
from pipeproof.interop.draft import Draft
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.load import PlanFileError, read_text
from pipeproof.specs.problems import KeyPath, describe_value
from pipeproof.specs.source import SourceMap
from pipeproof.specs.yaml_tree import parse_text

MODEL_NAMES: Mapping[str, KeyPath] = MappingProxyType(
    {
        "num_hidden_layers": ("num_layers",),
        "hidden_size": ("hidden_size",),
        "num_attention_heads": ("num_heads",),
        "num_key_value_heads": ("num_kv_heads",),
        "intermediate_size": ("ffn_size",),
        "vocab_size": ("vocab_size",),
        "head_dim": ("head_size",),
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
        "q_lora_rank": ("mla", "q_rank"),
        "kv_lora_rank": ("mla", "kv_rank"),
        "qk_nope_head_dim": ("mla", "nope_head_size"),
        "qk_rope_head_dim": ("mla", "rope_head_size"),
        "v_head_dim": ("mla", "value_head_size"),
    }
)
"""Names in Hugging Face's and Paddle's model configurations, and where a plan has them below ``model``."""

_LATENT = ("num_kv_heads", "head_size")


@dataclass(frozen=True, slots=True)
class Needs:
    """What assumed sizes have to fit: stages to fill."""

    num_stages: int


def take_model(draft: Draft, values: Mapping[str, tuple[Any, Location | None]]) -> None:
    """Take the sizes that a model's own names give; null, and zero for what a model has none of, are left out.

    Raises:
        PlanFileError: PP170, a size is no whole number.
    """
    found = {name: values[name] for name in MODEL_NAMES if name in values and values[name][0] not in (None, "")}
    latent = "kv_lora_rank" in found
    for name, (value, location) in found.items():
        path = MODEL_NAMES[name]
        if value == 0 or (latent and path[0] in _LATENT):
            continue
        wanted = bool if name == "tie_word_embeddings" else int
        if isinstance(value, list):
            draft.ignore(name, "a list, one number for each kind of layer, and a plan has one for all", location)
            continue
        if type(value) is not wanted:
            message = f"`{name}` must be {'true or false' if wanted is bool else 'an integer'}, found "
            raise PlanFileError(Finding(UNREADABLE.code, Severity.ERROR, message + describe_value(value), location))
        draft.set(("model", *path), value, name, location)


def read_model_config(draft: Draft, file: Path) -> None:
    """Take the sizes of a ``config.json``; the text part of a model with several.

    Raises:
        PlanFileError: the file cannot be read, or is no mapping.
    """
    name = str(file)
    tree = parse_text(read_text(name), name)
    data: Any = tree.data
    if tree.problems or not isinstance(data, dict):
        place = tree.source.at(tree.problems[0].span) if tree.problems else Location(name, 1, 1)
        why = (
            tree.problems[0].message
            if tree.problems
            else f"a mapping of keys is expected, found {describe_value(data)}"
        )
        raise PlanFileError(Finding(UNREADABLE.code, Severity.ERROR, f"no model configuration: {why}", place))
    text = data.get("text_config")
    below: KeyPath = ("text_config",) if isinstance(text, dict) else ()
    take_model(draft, _placed(text if isinstance(text, dict) else data, tree.source, below))


def _placed(data: Mapping[str, Any], source: SourceMap, below: KeyPath) -> dict[str, tuple[Any, Location | None]]:
    return {name: (value, source.locate((*below, name))) for name, value in data.items()}


def assume_model(draft: Draft, needs: Needs) -> None:
    """Take a model configuration, if one is given, and fill in what is lacking still with small sizes that divide."""
    if draft.flags.model_config is not None:
        read_model_config(draft, draft.flags.model_config)
    why = "the files do not say it (`--model-config`); small, and divides over the ranks"
    tp, cp, ep = (draft.number("topology", axis, default=1) for axis in ("tp", "cp", "ep"))
    num_empty = sum(draft.number("model", "empty_layers", end, default=0) for end in ("head", "tail"))
    heads = draft.number("model", "num_heads", default=4 if 4 % tp == 0 else tp)
    assumed: list[tuple[KeyPath, object]] = [
        (("kind",), "gpt"),
        (("num_layers",), _num_layers(needs, num_empty)),
        (("num_heads",), heads),
        (("hidden_size",), 64 * heads),
        (("ffn_size",), 128 * heads),
        (("vocab_size",), 512 * tp),
        (("seq_length",), 128 * tp * cp),
    ]
    experts = [(("moe", "num_experts"), 2 * ep), (("moe", "top_k"), 2), (("moe", "ffn_size"), 32 * tp)]
    if ep > 1 or ("model", "moe") in draft:
        assumed += experts
    if ("model", "mla") in draft:
        rank = (("kv_rank", 64), ("nope_head_size", 32), ("rope_head_size", 16), ("value_head_size", 32))
        assumed += [(("mla", key), value) for key, value in rank]
    for path, value in assumed:
        if path == ("kind",):
            draft.set(("model", "kind"), value, "the family of the model")
        else:
            draft.assume(("model", *path), value, why)


def _num_layers(needs: Needs, num_empty: int) -> int:
    """Blocks with which every stage gets equally many layers: two, or as few as the empty layers leave."""
    per_stage = 2
    while per_stage * needs.num_stages <= num_empty:
        per_stage += 1
    return per_stage * needs.num_stages - num_empty
