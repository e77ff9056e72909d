"""The section ``model`` of a GPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from pipeproof.diagnostics.problems import Problem
from pipeproof.specs.model_parts import (
    DropoutSpec,
    EmptyLayersSpec,
    HyperConnectionsSpec,
    MlaSpec,
    MoeSpec,
    MtpSpec,
)
from pipeproof.specs.section import Section, divisors, multiples, refuse


class ModelSpec(Section):
    """The network: a GPT of pre-norm blocks with attention and an MLP, or experts in its place.

    By default norms are RMSNorm, positions rotary, MLPs SwiGLU, and nothing has a bias: a Llama.
    """

    kind: Literal["gpt"] = Field(description="The family of the model.")
    num_layers: int = Field(ge=1, le=100_000, description="Number of transformer blocks.")
    hidden_size: int = Field(ge=2, le=2**20, description="Size of a token's activation between blocks.")
    num_heads: int = Field(
        ge=1,
        le=2**16,
        description="Number of attention heads; divides hidden_size, unless head_size is given.",
    )
    num_kv_heads: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="Number of heads of keys and values, each for a group of attention heads (arXiv:2305.13245); "
        "divides num_heads. Without it, num_heads.",
    )
    head_size: int | None = Field(
        default=None, ge=2, le=2**16, description="Size of a head; without it, hidden_size / num_heads."
    )
    ffn_size: int = Field(ge=1, le=2**24, description="Inner size of the MLP.")
    vocab_size: int = Field(ge=2, le=2**26, description="Number of distinct tokens.")
    unpadded_vocab_size: int | None = Field(
        default=None,
        ge=2,
        le=2**26,
        description="Number of token ids without padding: rows of the vocabulary from this one on are padding. Without "
        "it, there is no padding.",
    )
    seq_length: int = Field(ge=1, le=2**26, description="Tokens per sequence.")
    activation_order: Literal["sbh", "bsh"] = Field(
        default="sbh",
        description="Order of the dims of the tensor between stages: s(equence), b(atch), h(idden).",
    )
    tied_embedding: bool = Field(
        default=False, description="Whether the head multiplies by the transpose of the embedding's weight."
    )
    moe: MoeSpec | None = Field(default=None, description="Experts in place of the MLP of most blocks.")
    norm: Literal["rms", "layer"] = Field(
        default="rms", description="Every norm: RMSNorm (arXiv:1910.07467), or LayerNorm with a weight and a bias."
    )
    qk_norm: bool = Field(
        default=False,
        description="Whether the query and the key of each head are normed before attention, with one weight for all "
        "heads, as in Qwen3.",
    )
    positions: Literal["rotary", "learned"] = Field(
        default="rotary",
        description="rotary: queries and keys are rotated (arXiv:2104.09864); learned: a vector for each position is "
        "added to the embedding, as in GPT-3.",
    )
    mlp: Literal["swiglu", "gelu", "gelu_tanh"] = Field(
        default="swiglu",
        description="The MLP of blocks without experts: SwiGLU with three weights (arXiv:2002.05202), or GELU with two "
        "(arXiv:1606.08415), exact or by its approximation with tanh.",
    )
    biases: Literal["none", "qkv", "all"] = Field(
        default="none",
        description="Products with a bias: none, the one that makes queries, keys and values, as in Qwen2, or all of "
        "attention and MLPs, as in GPT-3.",
    )
    mla: MlaSpec | None = Field(
        default=None, description="Latent attention; its head sizes replace num_kv_heads and head_size."
    )
    mtp: MtpSpec | None = Field(default=None, description="Modules that predict tokens further ahead.")
    dropout: DropoutSpec | None = Field(
        default=None, description="Dropout; without it, none. A number sets all three shares."
    )
    swiglu_limit: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Clamp of the SwiGLU of every MLP and expert, as in gpt-oss: the gate is at most this, the other "
        "factor between minus this and this. Without it, no clamp.",
    )

    empty_layers: EmptyLayersSpec | None = Field(
        default=None, description="Layers that return their input and only count in the partition; without it, none."
    )
    final_norm: Literal["after_tail_empty", "before_tail_empty"] = Field(
        default="after_tail_empty",
        description="Position of the last norm: after the empty layers of the tail, or before them.",
    )
    hyper_connections: HyperConnectionsSpec | None = Field(
        default=None, description="Several residual streams between blocks; without it, one."
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        refuse(_problems(self))
        return self

    @property
    def num_empty(self) -> tuple[int, int]:
        """Numbers of empty layers before and after the blocks."""
        return (0, 0) if self.empty_layers is None else (self.empty_layers.head, self.empty_layers.tail)

    @property
    def num_token_ids(self) -> int:
        """Number of token ids: the vocabulary without its padding."""
        return self.vocab_size if self.unpadded_vocab_size is None else self.unpadded_vocab_size

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def size_of_head(self) -> int:
        """Elements of a head's query, of its key and of its value, where attention is not latent."""
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def rotary_size(self) -> int:
        """Elements of a head that rotary positions rotate."""
        return self.size_of_head if self.mla is None else self.mla.rope_head_size

    @property
    def num_streams(self) -> int:
        """Number of residual streams between blocks."""
        return 1 if self.hyper_connections is None else self.hyper_connections.streams

    def has_experts(self, block: int) -> bool:
        """Return True if the block of that number has experts in place of the MLP."""
        return self.moe is not None and block >= self.moe.dense_layers


PART_KEYS = ("norm", "qk_norm", "positions", "mlp", "biases")
"""Keys of the parts of a block, and of positions."""


def model_content(model: Section, exclude: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The keys of a model as JSON values, for digests and saved states.

    Parts and the dispatcher of experts came later than other keys and are left out at their default, so that a plan
    without them keeps its digest, and states of it can be resumed.
    """
    content = model.model_dump(mode="json", exclude=None if exclude is None else dict(exclude))
    moe = content.get("moe") or {}
    if moe.get("dispatcher") == MoeSpec.model_fields["dispatcher"].default:
        del moe["dispatcher"]
    fields = type(model).model_fields
    return {key: value for key, value in content.items() if key not in PART_KEYS or value != fields[key].default}


def _problems(model: ModelSpec) -> list[Problem]:
    """Heads fit the hidden size and are even (PP108); the parts of a model fit it and each other (PP106, PP108)."""
    heads = _check_latent(model) if model.mla is not None else [*_check_head_size(model), *_check_groups(model)]
    return [*heads, *_check_vocabulary(model), *_check_experts(model), *_check_parts(model)]


def _check_parts(model: ModelSpec) -> list[Problem]:
    """PP106: keys that have no meaning together."""
    latent = "`model.mla` has its own projections and norms"
    refused = [
        (model.qk_norm and model.mla is not None, "qk_norm", latent),
        (model.biases != "none" and model.mla is not None, "biases", latent),
        (model.biases == "all" and model.moe is not None, "biases", "experts have no biases"),
        (model.mlp != "swiglu" and model.moe is not None, "mlp", "experts are SwiGLU"),
        (model.mlp != "swiglu" and model.swiglu_limit is not None, "mlp", "`model.swiglu_limit` clamps a SwiGLU"),
        (model.positions == "learned" and model.mtp is not None, "positions", "`model.mtp` embeds without positions"),
        (model.positions == "learned" and model.mla is not None, "positions", "`model.mla` has rotary keys"),
    ]
    return [
        Problem("PP106", (key,), f"`model.{key}` is {getattr(model, key)!r}, and {why}", help=f"remove {key}")
        for is_refused, key, why in refused
        if is_refused
    ]


def _check_head_size(model: ModelSpec) -> list[Problem]:
    """Rotary embedding rotates pairs of elements, so the size of a head is even."""
    hidden, heads = model.hidden_size, model.num_heads
    if model.head_size is not None:
        if model.head_size % 2 == 0:
            return []
        message = f"model.head_size {model.head_size} is odd, and rotary attention needs an even number"
        return [Problem("PP108", ("head_size",), message, help=f"set it to {multiples(model.head_size, 2)}")]
    if hidden % heads:
        message = f"model.hidden_size {hidden} does not divide into model.num_heads {heads} heads"
    elif hidden // heads % 2:
        message = (
            f"a head has model.hidden_size {hidden} / model.num_heads {heads} = {hidden // heads} elements, "
            "and rotary attention needs an even number"
        )
    else:
        return []
    fix = f"set model.hidden_size to {multiples(hidden, 2 * heads)}"
    if hidden % 2 == 0:  # heads of an even size: their number divides half the hidden size
        fix += f", or model.num_heads to {divisors(hidden // 2, heads)}"
    return [Problem("PP108", ("hidden_size",), message, help=fix)]


def _check_groups(model: ModelSpec) -> list[Problem]:
    heads, kv_heads = model.num_heads, model.kv_heads
    if heads % kv_heads == 0:
        return []
    message = f"model.num_heads {heads} does not divide into groups for model.num_kv_heads {kv_heads}"
    fix = f"set model.num_kv_heads to {divisors(heads, kv_heads)}"
    return [Problem("PP108", ("num_kv_heads",), message, help=fix)]


def _check_latent(model: ModelSpec) -> list[Problem]:
    assert model.mla is not None
    problems = [
        Problem(
            "PP106",
            (name,),
            f"`model.{name}` is given together with `model.mla`, which has its own head sizes",
            help=f"remove {name}",
            at_key=True,
        )
        for name in ("num_kv_heads", "head_size")
        if getattr(model, name) is not None
    ]
    size = model.mla.rope_head_size
    if size % 2:
        message = f"model.mla.rope_head_size {size} is odd, and rotary attention needs an even number"
        problems.append(Problem("PP108", ("mla", "rope_head_size"), message, help=f"set it to {multiples(size, 2)}"))
    return problems


def _check_vocabulary(model: ModelSpec) -> list[Problem]:
    """Padding makes a vocabulary larger, never smaller."""
    size = model.num_token_ids
    if size <= model.vocab_size:
        return []
    message = f"model.unpadded_vocab_size {size} is more than model.vocab_size {model.vocab_size}, padding included"
    fix = f"set model.vocab_size to a multiple of topology.tp that is at least {size}"
    return [Problem("PP106", ("unpadded_vocab_size",), message, help=fix)]


def _check_experts(model: ModelSpec) -> list[Problem]:
    moe, problems = model.moe, list[Problem]()
    if moe is None:
        return problems
    if moe.top_k > moe.num_experts:
        message = f"a token is sent to model.moe.top_k {moe.top_k} experts, and there are {moe.num_experts}"
        fix = f"set model.moe.top_k to at most {moe.num_experts}"
        problems.append(Problem("PP106", ("moe", "top_k"), message, help=fix))
    if moe.dense_layers >= model.num_layers:
        message = f"model.moe.dense_layers {moe.dense_layers} leaves none of {model.num_layers} blocks for experts"
        fix = f"set it to at most {model.num_layers - 1}, or remove model.moe"
        problems.append(Problem("PP106", ("moe", "dense_layers"), message, help=fix))
    return problems
