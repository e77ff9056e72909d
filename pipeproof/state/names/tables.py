"""Conventions of names as tables: by the role of a tensor in the model, what it is called.

Sources: the modelling files of Hugging Face's transformers (Llama, Mixtral,
DeepSeek-V3, Glm4Moe); the names that Megatron-Core's modules have with
Transformer Engine, as Megatron-Bridge lists them; the modelling files of
PaddleFormers, their AOA statements and their layers. Roles are those of
``parts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeproof.specs.model import ModelSpec
from pipeproof.state.names.codes import NoNamesError

OURS = "pipeproof"


@dataclass(frozen=True, slots=True)
class Convention:
    """How one tool names the tensors of one model, and which way it lays them out.

    ``whole`` has the names of what stands once; ``block`` what follows
    ``block_name`` in a block, ``module`` what follows ``module_name`` in a
    module of multi-token prediction beside its block, whose own names follow
    ``module_block``. In names, ``{number}`` counts blocks or modules,
    ``{after}`` modules behind the last block, ``{expert}`` experts of the whole
    model. Matrices are [out, in] where ``turned``, else [in, out]; the embedding
    is [vocabulary, hidden size] everywhere, and the head but for pipeproof.
    ``padded`` says that the vocabulary has its padding, ``hidden_first`` that
    modules join hidden state and embedding in this order, and not the other way,
    ``has_tied_head`` that a head that is tied is written all the same, as a copy.
    ``fused_by_rank`` has the roles that each tensor-parallel rank fuses of its
    own part of gate and up; others are fused of the whole ones.
    """

    whole: Mapping[str, str]
    block: Mapping[str, str]
    module: Mapping[str, str]
    block_name: str
    module_name: str
    module_block: str
    turned: bool
    router_turned: bool
    head_turned: bool = True
    padded: bool = False
    hidden_first: bool = False
    has_tied_head: bool = False
    fused_by_rank: frozenset[str] = frozenset()

    def name_of(self, role: str, block: str, num_layers: int, expert: int | str | None = None) -> str:
        """The name of a tensor of pipeproof's layer ``block`` (``layer.3``, ``mtp.0``, empty for what stands once)."""
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

    def turns(self, role: str) -> bool:
        """Whether a matrix that pipeproof has as [in, out] is [out, in] here."""
        if role in ("head", "module_head"):
            return self.head_turned
        return self.router_turned if role == "router" else self.turned


_MLP = {part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
_ROUTED = {f"expert_{part}": f"mlp.experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down")}
_SHARED = {f"shared_{part}": f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}
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
    turned=True,
    router_turned=True,
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
    turned=True,
    router_turned=True,
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
OWN = Convention(
    whole={"embed": "embed.weight", "norm": "norm.weight", "head": "head.weight"},
    block=_OWN_BLOCK,
    module={"hidden_norm": "hidden_norm.weight", "embed_norm": "embed_norm.weight", "proj": "proj.weight"},
    block_name="layer.{number}",
    module_name="mtp.{number}",
    module_block="",
    turned=False,
    router_turned=False,
    head_turned=False,
    padded=True,
    hidden_first=True,
)
"""Pipeproof's own names, as far as matrices of others are matrices here, too: without experts and latent attention."""


def convention_of(name: str, model: ModelSpec) -> Convention:
    """The names that a convention has for a model.

    Raises:
        NoNamesError: PP928, there is no such convention, or it has no names for what the model has.
    """
    if name not in _MAKERS:
        known = ", ".join((OURS, *_MAKERS))
        raise NoNamesError(f"there is no convention of names `{name}`", f"known are {known}")
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
    return None


def is_mixtral(model: ModelSpec) -> bool:
    """Whether a model with experts is just what Mixtral is: no more, no less."""
    moe = model.moe
    assert moe is not None
    more = (moe.num_shared_experts, moe.dense_layers, moe.score == "sigmoid", not moe.normalize, model.mla, model.mtp)
    return not any(more)


def _huggingface(model: ModelSpec) -> Convention:
    if model.moe is not None and is_mixtral(model):
        return replace(_HUGGINGFACE, block=_MIXTRAL)
    return _HUGGINGFACE


def _megatron(model: ModelSpec) -> Convention:
    if model.mla is not None:  # the norm stands alone: two products read it
        return _MEGATRON
    return replace(_MEGATRON, block={**_MEGATRON_BLOCK, "attn_norm": "self_attention.linear_qkv.layer_norm_weight"})


def _paddleformers(model: ModelSpec) -> Convention:
    common = _of_paddle(model)
    by_rank = frozenset(role for role in _FUSED if role.endswith("gate_up"))
    return replace(common, block={**common.block, **_FUSED}, fused_by_rank=by_rank)


def _paddlefleet(model: ModelSpec) -> Convention:
    # Experts are whole on the rank that has them, and PaddleFormers' statements for them say `axis=1`.
    common = _paddleformers(model)
    by_rank = common.fused_by_rank - {"expert_gate_up"}
    return replace(common, whole=_FLEET_WHOLE, router_turned=True, has_tied_head=True, fused_by_rank=by_rank)


def _unfused(model: ModelSpec) -> Convention:
    common = _of_paddle(model)
    if model.mla is None:
        return common
    # DeepSeek-V3's class: its router is as a Linear, and a module is a block with more in it, and without a norm
    return replace(common, router_turned=False, module=_MODULE, module_block="", hidden_first=True)


def _of_paddle(model: ModelSpec) -> Convention:
    return Convention(
        whole=_WHOLE,
        block=_DEEPSEEK,
        module={**_MODULE, "module_norm": "norm.weight"},
        block_name="model.layers.{number}",
        module_name="model.layers.{after}",
        module_block=".transformer_layer",
        turned=False,
        router_turned=model.moe is not None and model.moe.score == "sigmoid",
    )


_MAKERS = {
    "huggingface": _huggingface,
    "megatron": _megatron,
    "paddleformers": _paddleformers,
    "paddleformers-unfused": _unfused,
    "paddlefleet": _paddlefleet,
}

CONVENTIONS = (OURS, *_MAKERS)
"""The names of the conventions."""
