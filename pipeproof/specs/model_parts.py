"""Optional parts of a model: experts, latent attention, MTP, dropout, hyper-connections and empty layers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeproof.diagnostics.problems import Problem, problems_error
from pipeproof.specs.section import Section, shorthand_schema


class MoeSpec(Section):
    """Experts in place of the MLP (arXiv:2101.03961, arXiv:2401.06066), in all blocks but the first few.

    A router sends each token to ``top_k`` of the experts, each a SwiGLU MLP.
    Each rank of ``topology.ep`` holds a contiguous range of experts.
    """

    num_experts: int = Field(ge=2, le=2**16, description="Number of routed experts; divides by ep.")
    top_k: int = Field(ge=1, le=2**16, description="Number of experts that each token is sent to.")
    ffn_size: int = Field(ge=1, le=2**24, description="Inner size of one expert; divides by tp.")
    num_shared_experts: int = Field(
        default=0,
        ge=0,
        le=2**16,
        description="Number of experts of the same size that every token goes through; they are computed as one MLP.",
    )
    dense_layers: int = Field(
        default=0, ge=0, le=100_000, description="Number of first blocks that keep the MLP of model.ffn_size."
    )
    score: Literal["softmax", "sigmoid"] = Field(
        default="softmax",
        description="Scores from the router's outputs: softmax over all experts, or sigmoid of each "
        "(arXiv:2412.19437, section 2.1.2). The experts with the largest scores are chosen; at equal scores, the lower "
        "numbers.",
    )
    normalize: bool = Field(
        default=True, description="Whether the chosen scores are divided by their sum to give a token's weights."
    )
    aux_loss: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Factor of the load-balancing loss (arXiv:2101.03961, equation 4) of each micro-batch and layer "
        "with experts.",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        le=1e6,
        description="Factor of the router z-loss: the mean square of the logsumexp of the router's outputs "
        "(arXiv:2202.08906, equation 5).",
    )
    expert_bias_rate: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Step of the expert biases, which are added to the scores for the choice only: after each step, "
        "each bias moves by this towards the mean load (arXiv:2408.15664). Without it there are no biases.",
    )
    dispatcher: Literal["all_to_all", "all_gather"] = Field(
        default="all_to_all",
        description="How tokens come to the experts of other EP ranks, and results back. `all_to_all`: each token goes "
        "to the ranks of its experts, once for each expert. `all_gather`: every rank gets the tokens and router "
        "outputs of all ranks, and the ranks' results are added by a reduce-scatter. That moves less if a token has "
        "more experts than there are ranks, and no rank has to know how many tokens come.",
    )
    nodes_per_token: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="Largest number of nodes that a token is sent to. It is sent once to each node, and from there to "
        "its experts; results are summed on each node before they come back (arXiv:2412.19437, sections 2.1.2 and "
        "3.2.2). Without it, each pair of token and expert crosses the network separately.",
    )
    dispatch_dtype: Literal["float8"] | None = Field(
        default=None,
        description="Type in which tokens, and the gradients of expert outputs, are sent to experts. Without it, and "
        "on the way back, the type of other activations.",
    )


class MlaSpec(Section):
    """Multi-head latent attention (arXiv:2405.04434): queries, keys and values from compressed vectors.

    A key has one part for each head, and one part with the rotary positions
    that all heads share.
    """

    q_rank: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="Size of the compressed query; without it, queries are not compressed.",
    )
    kv_rank: int = Field(ge=1, le=2**20, description="Size of the compressed key and value.")
    nope_head_size: int = Field(
        ge=1, le=2**16, description="Size of the part of a head's query and key without positions."
    )
    rope_head_size: int = Field(ge=2, le=2**16, description="Size of the part with rotary positions; even.")
    value_head_size: int = Field(ge=1, le=2**16, description="Size of a head's value.")


class MtpSpec(Section):
    """Multi-token prediction (arXiv:2412.19437, section 2.2).

    Module j joins the hidden states before it with the embedding of the token
    j + 1 positions ahead, and predicts the token after that one. Embedding,
    last norm and head are those of the main model.
    """

    num_modules: int = Field(ge=1, le=64, description="Number of modules, one after the other.")
    loss_weight: float = Field(default=0.3, gt=0, le=1e6, description="Factor of the mean of the modules' losses.")
    magic_send: bool = Field(
        default=False,
        description="Paddle's own name. True: a stage with a module has a copy of the embedding, so that only hidden "
        "states cross between stages. False: the first stage embeds for all, and the tensor between stages is "
        "(num_modules + 1) times as large.",
    )


class DropoutSpec(Section):
    """Shares of elements that are set to zero; the others are divided by 1 - share. One number sets all three.

    The choice of elements depends only on run.seed, the step, the micro-batch, the layer and the position of the
    element in the global tensor.
    """

    embedding: float = Field(default=0.0, ge=0, lt=1, description="Share of the embedded tokens' elements.")
    attention: float = Field(default=0.0, ge=0, lt=1, description="Share of the attention probabilities.")
    hidden: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the outputs of attention, and of MLP or experts, before they are added to their input.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_one_number(cls, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        if not 0 <= value < 1:
            message = f"`model.dropout` is a share of at least 0 and less than 1, found {value}"
            raise problems_error([Problem("PP106", (), message, help="such as 0.1; 0 turns dropout off")])
        return dict.fromkeys(("embedding", "attention", "hidden"), value)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of the mapping, or of one number."""
        return shorthand_schema(schema, handler, lambda _: {"type": "number", "minimum": 0, "exclusiveMaximum": 1})


class HyperConnectionsSpec(Section):
    """Manifold-constrained hyper-connections (arXiv:2512.24880, after arXiv:2409.19606).

    Blocks pass on several residual streams in place of one. Attention and MLP
    read a mix of the streams, and their outputs are added to each; a doubly
    stochastic matrix of each token mixes the streams.
    """

    streams: int = Field(
        ge=2,
        le=64,
        description="Number of residual streams; the tensor between two blocks is this many times as wide.",
    )
    sinkhorn_iterations: int = Field(
        default=20,
        ge=1,
        le=1000,
        description="Number of times that the columns, and then the rows, of the mixing matrix are divided by their "
        "sums.",
    )

    @property
    def num_gates(self) -> int:
        """Numbers of each token that control how its streams are read, written and mixed."""
        return self.streams * (self.streams + 2)


class EmptyLayersSpec(Section):
    """Layers that return their input and only count in the partition, as PaddleFleet's ``EmptyLayer``.

    They have no weights and cost nothing. Fleet's keys for them are
    ``num_empty_layers_add_in_head`` and ``_tail``.
    """

    head: int = Field(
        default=0, ge=0, le=100_000, description="Number of empty layers between the embedding and the blocks."
    )
    tail: int = Field(
        default=0, ge=0, le=100_000, description="Number of empty layers between the blocks and the head."
    )
