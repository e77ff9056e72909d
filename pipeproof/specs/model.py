"""The section ``model``: the network."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from pipeproof.specs.cut import EmptyLayersSpec
from pipeproof.specs.dropout import DropoutSpec
from pipeproof.specs.hyper_connections import HyperConnectionsSpec
from pipeproof.specs.model_checks import check_model
from pipeproof.specs.model_parts import MlaSpec, MoeSpec
from pipeproof.specs.mtp import MtpSpec
from pipeproof.specs.section import Section, refuse


class ModelSpec(Section):
    """The network: a GPT of pre-norm blocks with rotary attention and a SwiGLU MLP, or experts in its place."""

    kind: Literal["gpt"] = Field(description="The family of the model.")
    num_layers: int = Field(ge=1, le=100_000, description="Number of transformer blocks.")
    hidden_size: int = Field(ge=2, le=2**20, description="Size of a token's activation between blocks.")
    num_heads: int = Field(
        ge=1,
        le=2**16,
        description="Number of attention heads; divides hidden_size, unless the size of a head is given.",
    )
    num_kv_heads: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="Heads of keys and values, each for a group of attention heads (arXiv:2305.13245); divides "
        "num_heads. Without it, as many as num_heads.",
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
        description="Rows of the vocabulary from this one on are padding: no token has such an id. Without it, no row.",
    )
    seq_length: int = Field(ge=1, le=2**26, description="Tokens per sequence.")
    activation_order: Literal["sbh", "bsh"] = Field(
        default="sbh",
        description="Dim order of the tensor between stages: s(equence), b(atch), h(idden).",
    )
    tied_embedding: bool = Field(
        default=False, description="Whether the head multiplies by the transpose of the embedding's weight."
    )
    moe: MoeSpec | None = Field(default=None, description="Experts in place of the MLP of most blocks.")
    mla: MlaSpec | None = Field(
        default=None, description="Latent attention; its head sizes take the place of num_kv_heads and head_size."
    )
    mtp: MtpSpec | None = Field(default=None, description="Modules that predict tokens further ahead.")
    dropout: DropoutSpec | None = Field(
        default=None, description="What is set to zero at random; without it, nothing. A number sets all three shares."
    )
    swiglu_limit: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Makes every MLP and expert the clamped SwiGLU of gpt-oss: its gate is at most this, its other "
        "factor between minus this and this. Without it, SwiGLU as it is.",
    )

    empty_layers: EmptyLayersSpec | None = Field(
        default=None, description="Layers that do nothing and only take a place in the cut; without it, none."
    )
    final_norm: Literal["after_tail_empty", "before_tail_empty"] = Field(
        default="after_tail_empty",
        description="Whether the last norm stands behind the empty layers of the tail, or before them.",
    )
    hyper_connections: HyperConnectionsSpec | None = Field(
        default=None, description="Several residual streams between blocks; without it, one."
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        refuse(check_model(self))
        return self

    @property
    def num_empty(self) -> tuple[int, int]:
        """Empty layers before the blocks, and behind them."""
        return (0, 0) if self.empty_layers is None else (self.empty_layers.head, self.empty_layers.tail)

    @property
    def num_token_ids(self) -> int:
        """How many ids tokens have: the vocabulary without its padding."""
        return self.vocab_size if self.unpadded_vocab_size is None else self.unpadded_vocab_size

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def size_of_head(self) -> int:
        """Elements of a head's query, of its key and of its value, where attention is not latent."""
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def rotary_size(self) -> int:
        """Elements of a head that rotary positions turn."""
        return self.size_of_head if self.mla is None else self.mla.rope_head_size

    @property
    def num_streams(self) -> int:
        """Residual streams between blocks."""
        return 1 if self.hyper_connections is None else self.hyper_connections.streams

    def has_experts(self, block: int) -> bool:
        """Whether the block of that number has experts in place of the MLP."""
        return self.moe is not None and block >= self.moe.dense_layers
