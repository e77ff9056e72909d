"""The section ``model.compressed_attention``: attention to near keys and to compressed far ones, as in DeepSeek-V4."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from pipeproof.specs.section import FROM_LIST, Section

AttentionType: TypeAlias = Literal["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
"""The attention of a block, with a name of Hugging Face's ``layer_types``."""

SPARSE: AttentionType = "compressed_sparse_attention"


class CompressRatesSpec(Section):
    """Numbers of tokens that make one compressed entry."""

    compressed_sparse_attention: int = Field(
        default=4,
        ge=1,
        le=2**20,
        description="Tokens of a window. An entry also has a part of the window before, and an indexer chooses the "
        "entries of each query.",
    )
    heavily_compressed_attention: int = Field(
        default=128, ge=1, le=2**20, description="Tokens of a window. Each query sees all entries before it."
    )


class YarnSpec(Section):
    """Rotary positions stretched by YaRN (arXiv:2309.00071); cosines and sines keep their length."""

    factor: float = Field(ge=1, le=1e6, description="Factor by which slow rotations are stretched.")
    original_max_position_embeddings: int = Field(
        ge=1, le=2**40, description="Tokens over which rotations are counted."
    )
    beta_fast: float = Field(
        default=32.0, gt=0, le=1e6, description="Rotations over these tokens from which on a pair is not stretched."
    )
    beta_slow: float = Field(
        default=1.0, gt=0, le=1e6, description="Rotations up to which a pair is stretched by the whole factor."
    )


class CompressedAttentionSpec(Section):
    """Attention with one head for all queries, whose keys are also its values; Hugging Face's ``DeepseekV4``.

    A query sees the last tokens, a sink without a value and, by the type of the block, compressed entries of the
    tokens before. Each sequence has its own windows; an incomplete last window makes no entry.
    """

    layer_types: Annotated[tuple[AttentionType, ...], FROM_LIST] = Field(
        description="The attention of each block, in order: `sliding_attention` without entries, "
        "`compressed_sparse_attention` with entries that an indexer chooses, `heavily_compressed_attention` with all. "
        "A list shorter than the model is repeated. An MTP module has the attention of the next block or, without a "
        "further entry, of the last block.",
    )
    q_lora_rank: int = Field(ge=1, le=2**20, description="Size of the compressed query.")
    qk_rope_head_dim: int = Field(
        ge=2,
        le=2**16,
        description="Elements at the end of a head, and of a head of the indexer, with rotary positions; even. Pairs "
        "are neighbours.",
    )
    sliding_window: int = Field(
        default=128, ge=1, le=2**26, description="Number of last tokens that a query sees, with its own."
    )
    compress_rates: CompressRatesSpec = Field(default=CompressRatesSpec(), description="Windows of the entries.")
    rope_theta: float = Field(
        default=10_000.0, ge=2, le=1e12, description="Base of the rotary positions of blocks without entries."
    )
    compress_rope_theta: float = Field(
        default=160_000.0, ge=2, le=1e12, description="Base of the rotary positions of blocks with entries."
    )
    rope_scaling: YarnSpec | None = Field(
        default=None, description="Stretches the rotary positions of blocks with entries; without it, they are plain."
    )
    documents: Annotated[tuple[Annotated[int, Field(ge=1, le=2**26)], ...], FROM_LIST] | None = Field(
        default=None,
        min_length=1,
        description="Tokens of each document that is packed in a sequence; their sum is seq_length. Row r of a "
        "micro-batch begins with the r-th document, and the order is cyclic. Queries see only their document. Each "
        "document has its own windows; an incomplete last window makes no entry. Labels are not "
        "cut.",
    )
    o_groups: int = Field(
        ge=1,
        le=2**16,
        description="Groups of heads, whose outputs one product each compresses; divides num_heads, and by tp.",
    )
    o_lora_rank: int = Field(ge=1, le=2**20, description="Size of a group's compressed output.")
    index_n_heads: int = Field(default=64, ge=1, le=2**16, description="Number of heads of an indexer.")
    index_head_dim: int = Field(default=128, ge=2, le=2**16, description="Size of a head of an indexer.")
    index_topk: int = Field(
        default=512, ge=1, le=2**26, description="Number of entries that an indexer chooses for a query, at most."
    )

    def type_of(self, block: int) -> AttentionType:
        """The attention of a block."""
        return self.layer_types[block % len(self.layer_types)]

    def rate_of(self, kind: AttentionType) -> int | None:
        """Tokens of an entry of such a block; None without entries."""
        rate: int | None = getattr(self.compress_rates, kind, None)
        return rate

    def documents_of(self, row: int, length: int) -> tuple[int, ...]:
        """Tokens of each document of a row of ``length`` tokens, in order."""
        documents = self.documents or (length,)
        first = row % len(documents)
        return documents[first:] + documents[:first]

    def num_entries(self, kind: AttentionType, length: int) -> int:
        """Entries of a row of ``length`` tokens in such a block."""
        rate = self.rate_of(kind)
        return 0 if rate is None else sum(document // rate for document in self.documents_of(0, length))


assert set(CompressRatesSpec.model_fields) < set(get_args(AttentionType))
