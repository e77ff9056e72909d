"""Conventions as tables: the tool's name for each role of a tensor in the model.

Sources: the modelling files of Hugging Face's transformers; the names that Megatron-Core's modules have with
Transformer Engine, as Megatron-Bridge lists them; the modelling files of PaddleFormers, their AOA statements and their
layers. ``convention_tensors`` lists the roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeproof.diagnostics.problems import listed
from pipeproof.specs.model import ModelSpec
from pipeproof.state.names.huggingface_class import huggingface_class
from pipeproof.state.names.name_codes import NoNamesError

OWN_NAMES = "pipeproof"
BIAS = "_bias"
"""Suffix of a weight's role, for the role of its bias."""


@dataclass(frozen=True, slots=True)
class Convention:
    """Names and layouts of one model's tensors in one tool.

    ``whole`` has the names of tensors that exist once; ``block`` what follows ``block_name`` in a block, ``module``
    what follows ``module_name`` in a module of multi-token prediction in addition to its block, whose own names follow
    ``module_block``. In names, ``{number}`` counts blocks or modules, ``{after}`` modules behind the last block,
    ``{expert}`` experts of the whole model. Matrices are [out, in] where ``transposed``, else [in, out]; the embedding
    is [vocabulary, hidden size] everywhere, and the head, too, except in pipeproof. ``padded``: the vocabulary keeps
    its padding. ``hidden_first``: modules join hidden state and embedding in this order. ``has_tied_head``: a tied head
    is written as a copy. ``fused_by_rank`` has the roles that each tensor-parallel rank fuses from its own shards of
    gate and up; other roles are fused from the whole tensors. A bias has the name of its weight, with ``bias``.
    """

    whole: Mapping[str, str]
    block: Mapping[str, str]
    module: Mapping[str, str]
    block_name: str
    module_name: str
    module_block: str
    transposed: bool
    router_transposed: bool
    head_transposed: bool = True
    padded: bool = False
    hidden_first: bool = False
    has_tied_head: bool = False
    fused_by_rank: frozenset[str] = frozenset()

    def name_of(self, role: str, block: str, num_layers: int, expert: int | str | None = None) -> str:
        """Return the name of a tensor of pipeproof's layer ``block``.

        The layer is ``layer.3``, ``mtp.0``, or empty for tensors that exist once.
        """
        weight = role.removesuffix(BIAS)
        if weight != role and role not in self.block:
            return "bias".join(self.name_of(weight, block, num_layers, expert).rsplit("weight", 1))
        if not block:
            return self.whole[role]
        kind, _, number = block.partition(".")
        if kind == "mtp":
            prefix = self.module_name.format(number=number, after=num_layers + int(number))
            if role in self.module:
                return f"{prefix}.{self.module[role]}"
            prefix += self.module_block
        else:
            prefix = self.block_name.format(number=number)
        return f"{prefix}.{self.block[role]}".format(expert=expert)

    def is_transposed(self, role: str) -> bool:
        """Return True if a matrix that pipeproof has as [in, out] is [out, in] here."""
        if role in ("head", "module_head"):
            return self.head_transposed
        return self.router_transposed if role == "router" else self.transposed


_MLP = {tensor: f"mlp.{tensor}_proj.weight" for tensor in ("gate", "up", "down")}
_ROUTED = {f"expert_{tensor}": f"mlp.experts.{{expert}}.{tensor}_proj.weight" for tensor in ("gate", "up", "down")}
_SHARED = {f"shared_{tensor}": f"mlp.shared_experts.{tensor}_proj.weight" for tensor in ("gate", "up", "down")}
_LLAMA = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_head_norm": "self_attn.q_norm.weight",
    "k_head_norm": "self_attn.k_norm.weight",
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
_STARCODER = {**_LLAMA, "up": "mlp.c_fc.weight", "down": "mlp.c_proj.weight"}
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
        "positions": "transformer.wpe.weight",
        "norm": "transformer.ln_f.weight",
        "head": "lm_head.weight",
    },
    block={
        "attn_norm": "ln_1.weight",
        "qkv_by_kind": "attn.c_attn.weight",
        "out": "attn.c_proj.weight",
        "mlp_norm": "ln_2.weight",
        "up": "mlp.c_fc.weight",
        "down": "mlp.c_proj.weight",
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
    "q_head_norm": "self_attention.q_layernorm.weight",
    "k_head_norm": "self_attention.k_layernorm.weight",
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
    "up": "mlp.linear_fc1.weight",
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
        "positions": "embedding.position_embeddings.weight",
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
    "q_head_norm": "attn.q_head_norm.weight",
    "k_head_norm": "attn.k_head_norm.weight",
    "out": "attn.out.weight",
    "mlp_norm": "mlp_norm.weight",
    "gate": "mlp.gate.weight",
    "up": "mlp.up.weight",
    "down": "mlp.down.weight",
}
OWN_CONVENTION = Convention(
    whole={
        "embed": "embed.weight",
        "positions": "embed.positions.weight",
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
)
"""Pipeproof's own names, as far as its tensors are matrices in other tools: without experts and latent attention."""


def convention_of(name: str, model: ModelSpec) -> Convention:
    """Return the names that a convention has for a model.

    Raises:
        NoNamesError: PP928, the convention is unknown, or has no names for a part of the model.
    """
    if name not in _MAKERS:
        known = ", ".join((OWN_NAMES, *_MAKERS))
        raise NoNamesError(f"there is no naming convention `{name}`", f"known are {known}")
    reason = _refusal(name, model)
    if reason is not None:
        raise NoNamesError(
            f"`{name}` has no names for this model: {reason}",
            "leave `--names` away: under pipeproof's own names every model can be kept",
        )
    return _MAKERS[name](model)


def _refusal(name: str, model: ModelSpec) -> str | None:
    if model.hyper_connections is not None:
        return "`hyper_connections` have weights that no other tool's model has"
    if model.swiglu_limit is not None and name != "megatron":
        return "`swiglu_limit` is the function of gpt-oss, whose experts have biases and columns in another order"
    if model.moe is not None and model.moe.score == "softmax" and model.moe.expert_bias_rate is not None:
        return "routers with biases (`moe.expert_bias_rate`) are only known with `score: sigmoid`"
    if name == "huggingface" and huggingface_class(model) is None:
        return f"no class of transformers has {_parts(model)}"
    if name.startswith("paddle") and not _paddle_has(name, model):
        return f"no model of PaddleFormers has {_parts(model)}"
    return None


_PART_KEYS = ("norm", "qk_norm", "positions", "mlp", "biases")


def _parts(model: ModelSpec) -> str:
    """Return the keys of a model's parts, those that differ from a Llama's, for messages."""
    default = {key: ModelSpec.model_fields[key].default for key in _PART_KEYS}
    parts = [f"`{key}: {str(value).lower()}`" for key in _PART_KEYS if (value := getattr(model, key)) != default[key]]
    sections = [f"`{key}`" for key in ("num_kv_heads", "head_size", "moe", "mla", "mtp") if getattr(model, key)]
    return listed(parts + sections, "and")


def _paddle_has(name: str, model: ModelSpec) -> bool:
    """Return True if PaddleFormers has a model with such parts.

    Qwen2 has biases of queries, keys and values, Qwen3 norms of queries and keys, GLM-4 with experts both. Llama can
    have all biases; it fuses nothing, and is not built over PaddleFleet.
    """
    if (model.norm, model.positions, model.mlp) != ("rms", "rotary", "swiglu"):
        return False
    if model.biases == "all":
        return name == "paddleformers-unfused" and not model.qk_norm
    has_sigmoids = model.moe is not None and model.moe.score == "sigmoid"
    return not model.qk_norm or model.biases == "none" or has_sigmoids


def _huggingface(model: ModelSpec) -> Convention:
    match huggingface_class(model):
        case "GPT2":
            return _GPT2
        case "Mixtral":
            return replace(_HUGGINGFACE, block=_MIXTRAL)
        case "Starcoder2":
            return replace(_HUGGINGFACE, block=_STARCODER)
        case _:
            return _HUGGINGFACE


def _megatron(model: ModelSpec) -> Convention:
    if model.mla is not None:  # the norm is separate: two products read it
        return _MEGATRON
    return replace(_MEGATRON, block={**_MEGATRON_BLOCK, "attn_norm": "self_attention.linear_qkv.layer_norm_weight"})


def _paddleformers(model: ModelSpec) -> Convention:
    common = _of_paddle(model)
    by_rank = frozenset(role for role in _FUSED if role.endswith("gate_up"))
    return replace(common, block={**common.block, **_FUSED}, fused_by_rank=by_rank)


def _paddlefleet(model: ModelSpec) -> Convention:
    # Experts are whole on the rank that has them, and PaddleFormers' statements for them have `axis=1`.
    common = _paddleformers(model)
    by_rank = common.fused_by_rank - {"expert_gate_up"}
    heads = {f"{part}_head_norm": f"self_attn.{part}_layernorm.weight" for part in "qk"}
    return replace(
        common,
        whole=_FLEET_WHOLE,
        block={**common.block, **heads},
        router_transposed=True,
        has_tied_head=True,
        fused_by_rank=by_rank,
    )


def _unfused(model: ModelSpec) -> Convention:
    common = _of_paddle(model)
    if model.mla is None:
        return common
    # DeepSeek-V3's class: its router is as a Linear, and a module is a block with more in it, and without a norm
    return replace(common, router_transposed=False, module=_MODULE, module_block="", hidden_first=True)


def _of_paddle(model: ModelSpec) -> Convention:
    return Convention(
        whole=_WHOLE,
        block=_DEEPSEEK,
        module={**_MODULE, "module_norm": "norm.weight"},
        block_name="model.layers.{number}",
        module_name="model.layers.{after}",
        module_block=".transformer_layer",
        transposed=False,
        router_transposed=model.moe is not None and model.moe.score == "sigmoid",
    )


_MAKERS = {
    "huggingface": _huggingface,
    "megatron": _megatron,
    "paddleformers": _paddleformers,
    "paddleformers-unfused": _unfused,
    "paddlefleet": _paddlefleet,
}

CONVENTIONS = (OWN_NAMES, *_MAKERS)
"""Names of the conventions."""
