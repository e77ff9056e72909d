"""Parts of a model that not every GPT has: experts in place of the MLP, and attention through compressed vectors."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class MoeSpec(_Part):
    """Experts in place of the MLP (arXiv:2101.03961, arXiv:2401.06066), in all blocks but the first few.

    A router sends each token to ``top_k`` of the experts, each a SwiGLU MLP.
    Experts are shared out over ``topology.ep``, in ranges of their numbers.
    """

    num_experts: int = Field(ge=2, le=2**16, description="Number of routed experts; divides by ep.")
    top_k: int = Field(ge=1, le=2**16, description="Experts that each token is sent to.")
    ffn_size: int = Field(ge=1, le=2**24, description="Inner size of one expert; divides by tp.")
    num_shared_experts: int = Field(
        default=0, ge=0, le=2**16, description="Experts of the same size that every token goes through, as one MLP."
    )
    dense_layers: int = Field(
        default=0, ge=0, le=100_000, description="First blocks that keep the MLP of model.ffn_size."
    )
    score: Literal["softmax", "sigmoid"] = Field(
        default="softmax",
        description="What the router's outputs go through: a softmax over all experts, or each by itself a sigmoid "
        "(arXiv:2412.19437, section 2.1.2). The largest scores choose; of equal ones, the lower experts.",
    )
    normalize: bool = Field(
        default=True, description="Whether the chosen scores are divided by their sum to be a token's weights."
    )
    aux_loss: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Factor of the loss that asks for even loads (arXiv:2101.03961, equation 4), of each micro-batch "
        "and layer with experts.",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Factor of the loss that keeps the router's outputs small: the mean square of their logsumexp "
        "(arXiv:2202.08906, equation 5).",
    )
    expert_bias_rate: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="By how much a bias of each expert, which is added to its scores for the choice alone, moves after "
        "each step towards the mean load (arXiv:2408.15664). Without it there are no biases.",
    )
    nodes_per_token: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="A token goes to at most as many nodes, once to each, and from there to its experts; it comes back "
        "likewise, summed on each node (arXiv:2412.19437, sections 2.1.2 and 3.2.2). Without it, each visit crosses "
        "the network by itself.",
    )
    dispatch_dtype: Literal["float8"] | None = Field(
        default=None,
        description="Type in which tokens, and the gradients of what experts make, go to experts; without it, and on "
        "the way back, as other activations.",
    )


class MlaSpec(_Part):
    """Multi-head latent attention (arXiv:2405.04434): queries, keys and values through compressed vectors.

    A key has a part of its own for each head, and one with the rotary
    positions that all heads share.
    """

    q_rank: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="Size of the compressed query; without it, queries are not compressed.",
    )
    kv_rank: int = Field(ge=1, le=2**20, description="Size of the compressed key and value.")
    nope_head_size: int = Field(ge=1, le=2**16, description="Of a head's query and key, the part without positions.")
    rope_head_size: int = Field(ge=2, le=2**16, description="The part with rotary positions; even.")
    value_head_size: int = Field(ge=1, le=2**16, description="Size of a head's value.")
