"""Unsupported combinations: the parts of each one, as sections of a small plan."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeproof.specs.load_plan import load_plan

Sections = Mapping[str, Any]

_GPT: Sections = {
    "pipeproof": 1,
    "model": {
        "kind": "gpt", "num_layers": 4, "hidden_size": 16, "num_heads": 4, "ffn_size": 32, "vocab_size": 32,
        "seq_length": 8,
    },
    "topology": {"pp": 2},
    "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 2},
}  # fmt: skip
_MLA = {"q_rank": 12, "kv_rank": 8, "nope_head_size": 6, "rope_head_size": 4, "value_head_size": 8}
_NEAR_AND_FAR = {
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"], "q_lora_rank": 6,
    "qk_rope_head_dim": 2, "o_groups": 2, "o_lora_rank": 5,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "index_n_heads": 3, "index_head_dim": 4,
}  # fmt: skip
_MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 8}
_WITH_SENDS: dict[str, Any] = {
    "kind": "custom",
    "num_micro_batches": 1,
    "programs": [
        ["0F0", "0SEND_F0", "0RECV_B0", "WAIT(0RECV_B0)", "0B0", "WAIT(0SEND_F0)"],
        ["1RECV_F0", "WAIT(1RECV_F0)", "1F0", "1B0", "1SEND_B0", "WAIT(1SEND_B0)"],
    ],
}
_WITH_COPIES = {
    **_WITH_SENDS,
    "programs": [
        ["0F0", "0OFFLOAD0", "FREE(0OFFLOAD0)", *_WITH_SENDS["programs"][0][1:4], "0RELOAD0", "0B0", "WAIT(0SEND_F0)"],
        _WITH_SENDS["programs"][1],
    ],
}


@dataclass(frozen=True)
class Part:
    """One part of a combination: its name, and its keys; a mapping is merged into the plan's mapping."""

    name: str
    sections: Sections


def _part(name: str, **sections: Any) -> Part:
    return Part(name, sections)


def _again(module: str) -> dict[str, Any]:
    return {"recompute": "selective", "recompute_modules": [module]}


_SHARED_AGAIN = {"model": {"moe": {**_MOE, "num_shared_experts": 1}}, "memory": _again("shared_experts")}
_SPLITS = _part("sequence splits", schedule={"kind": "seq1f1b", "num_sequence_splits": 2})
_CP = _part("`cp`", topology={"cp": 2})
_TP_SP = _part("`sequence_parallel`", topology={"tp": 2, "sequence_parallel": True})
_HIDDEN = _part("`boundaries` with the activation as sbh", boundaries=[{"name": "hidden", "dims": "sbh"}])
_TOKENS = _part(
    "`boundaries` with token ids",
    boundaries=[{"name": "hidden", "dims": "sbh"}, {"name": "tokens", "dims": "bs", "dtype": "int64"}],
)
_MTP = _part("`mtp`", model={"mtp": {"num_modules": 1}})
_LATENT = _part("`mla`", model={"mla": _MLA})
_COMPRESSED = _part("`compressed_attention`", model={"compressed_attention": _NEAR_AND_FAR})
_WHEN_READY = _part("`reduce_gradients: when_ready`", schedule={"reduce_gradients": "when_ready"})
_CLIP = _part("`clip_norm`", run={"clip_norm": 1.0})
_OWN_ORDER = _part("a schedule with its own communication", schedule=_WITH_SENDS)
_MAIN = _part("`main_grad_dtype`", run={"main_grad_dtype": "float64"})

_LEARNED = _part("`positions: learned`", model={"positions": "learned"})
_GELU = _part("`mlp: gelu`, `gelu_tanh`", model={"mlp": "gelu"})
_EXPERTS = _part("`moe`", model={"moe": _MOE})

REFUSED: tuple[tuple[Part, ...], ...] = (
    (_LATENT, _part("`num_kv_heads`", model={"num_kv_heads": 2})),
    (_LATENT, _part("`head_size`", model={"head_size": 6})),
    (_LATENT, _part("`qk_norm`", model={"qk_norm": True})),
    (_LATENT, _part("`biases`", model={"biases": "qkv"})),
    (_LATENT, _LEARNED),
    (_COMPRESSED, _LATENT),
    (_COMPRESSED, _part("`num_kv_heads`", model={"num_kv_heads": 2})),
    (_COMPRESSED, _part("`qk_norm`", model={"qk_norm": True})),
    (_COMPRESSED, _part("`norm: layer`", model={"norm": "layer"})),
    (_COMPRESSED, _LEARNED),
    (_COMPRESSED, _part("`biases`", model={"biases": "qkv"})),
    (_COMPRESSED, _part("`dropout.attention`", model={"dropout": {"attention": 0.1}})),
    (_COMPRESSED, _SPLITS),
    (_COMPRESSED, _CP),
    (_MTP, _LEARNED),
    (_EXPERTS, _GELU),
    (_EXPERTS, _part("`biases: all`", model={"biases": "all"})),
    (_GELU, _part("`swiglu_limit`", model={"swiglu_limit": 0.05})),
    (_MTP, _part("`hyper_connections`", model={"hyper_connections": {"streams": 2}})),
    (_SPLITS, _CP),
    (_part("sequence splits in any kind other than `seq1f1b`", schedule={"num_sequence_splits": 2}),),
    (_WHEN_READY, _part("`dualpipe`, `chimera`, whose stages all have copies", schedule={"kind": "dualpipe"})),
    (
        _part("`stages: uniform`", stages="uniform"),
        _part("several chunks, except `dualpipe_v`", schedule={"kind": "interleaved", "num_chunks": 2}),
    ),
    (_MAIN, _part("another `memory.gradient_dtype`", memory={"gradient_dtype": "float32"})),
    (
        _part("`main_grad_dtype`", run={"main_grad_dtype": "float32"}),
        _part("a wider `dtype`", run={"dtype": "float64"}),
    ),
    (_part("`cost.analytic`", cost={"analytic": "h200"}), _part("`dtype: float64`", run={"dtype": "float64"})),
    (_part("`transport: partial`", transport="partial"), _TP_SP),
    (_HIDDEN, _TP_SP),
    (_OWN_ORDER, _CLIP),
    (_OWN_ORDER, _WHEN_READY),
    (_OWN_ORDER, _part("`recv_order`", transport={"recv_order": "prefetch_one"})),
    (_CP, _LATENT),
    (_CP, _part("`aux_loss`, `z_loss`", model={"moe": {**_MOE, "aux_loss": 0.1}})),
    (_part("`nodes_per_token`", model={"moe": {**_MOE, "nodes_per_token": 1}}),),
    (_part("`dispatch_dtype`", model={"moe": {**_MOE, "dispatch_dtype": "float8"}}),),
    (_part("`recompute_modules: [layernorm]`, `[mla_up_proj]`, `[moe_act]`", memory=_again("layernorm")),),
    (
        _part("`recompute_modules: [shared_experts]`", **_SHARED_AGAIN),
        _part("`regather`", memory={"sequence_parallel_activations": "regather"}),
    ),
    (_part("`recompute_modules` without `recompute: selective`", memory={"recompute_modules": ["mlp"]}),),
    (_part("`recompute_modules: [mla_up_proj]` without `mla`", memory=_again("mla_up_proj")),),
    (_part("`recompute_modules: [moe]`, `[moe_act]`, `[shared_experts]` without experts", memory=_again("moe")),),
    (_part("`shape_exchange: per_message`", transport={"shape_exchange": "per_message"}),),
    (_part("a schedule with `OFFLOAD` and `RELOAD`", schedule=_WITH_COPIES),),
    (_TOKENS, _MTP),
    (_HIDDEN, _part("`activation_order: bsh`", model={"activation_order": "bsh"})),
)
"""Combinations of parts of a GPT's plan. Without any one of its parts, or without all, the plan is accepted."""

_EXAMPLE = Path(__file__).parents[2] / "examples" / "declared_layers.yaml"

WITH_CUSTOM_LAYERS: tuple[Part, ...] = (
    _part("`tp`", topology={"tp": 2}),
    _part("`cp`", topology={"cp": 2}),
    _part("`ep`", topology={"ep": 2}),
    _part("sequence splits", schedule={"kind": "seq1f1b", "num_chunks": 1, "num_sequence_splits": 2}),
    _part("`last_micro_batch_size`", schedule={"last_micro_batch_size": 1}),
    _part("`normalization: global_tokens`", loss={"normalization": "global_tokens"}),
    _part("`stages: layer:REGEX`", stages="layer:Linear"),
    _part("`boundaries`", boundaries=[{"name": "hidden", "dims": "sbh"}]),
    _part("`recompute`", memory={"recompute": "full"}),
    _part("`budget_gib`", memory={"budget_gib": 1.0}),
    _part("`cost.analytic`", cost={"analytic": "h200"}),
    _part("`main_grad_dtype`", run={"main_grad_dtype": "float64"}),
)
"""Features that a plan of custom layers does not support."""


def gpt_plan(*parts: Part) -> dict[str, Any]:
    """Return the plan of the small GPT with these parts."""
    return _with(_GPT, parts)


def custom_plan(*parts: Part) -> dict[str, Any]:
    """Return the example of declared layers with these parts."""
    return _with(load_plan(_EXAMPLE).spec.model_dump(mode="json", exclude_unset=True), parts)


def _with(plan: Sections, parts: tuple[Part, ...]) -> dict[str, Any]:
    made: dict[str, Any] = dict(copy.deepcopy(plan))
    for part in parts:
        for name, value in part.sections.items():
            own = made.get(name)
            made[name] = {**own, **value} if isinstance(own, dict) and isinstance(value, dict) else value
    return made
