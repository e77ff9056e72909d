"""The section ``model`` of a GPT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeproof.diagnostics.problems import Problem, problems_error
from pipeproof.specs.compressed_attention import AttentionType, CompressedAttentionSpec
from pipeproof.specs.section import Section, divisors, multiples, shorthand_schema


class HashTablesSpec(Section):
    """Tables of experts by token id in a file, such as a file of released weights."""

    path: str = Field(
        min_length=1,
        description="A safetensors file, or a directory of some, relative to the plan file, with "
        "`layers.N.ffn.gate.tid2eid` [token ids, top_k] of each such block.",
    )
    sha256: str = Field(
        pattern="^[0-9a-f]{64}$",
        description="SHA-256 of the tables in the order of the blocks, as int64; an error message shows the right one.",
    )


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
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = Field(
        default="softmax",
        description="Scores from the router's outputs: softmax over all experts, sigmoid of each (arXiv:2412.19437, "
        "section 2.1.2), or the square root of softplus of each, as in DeepSeek-V4. The experts with the largest "
        "scores are chosen; at equal scores, the lower numbers.",
    )
    hash_layers: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Number of first blocks with experts whose experts a fixed table chooses by token id, as in "
        "DeepSeek-V4. Their routers have scores only for the weights of the chosen experts, and neither losses nor "
        "biases. The table is drawn from run.seed, or from hash_tables.",
    )
    hash_tables: HashTablesSpec | None = Field(
        default=None, description="The tables of experts by token id; without it, they are drawn."
    )
    normalize: bool = Field(
        default=True, description="Whether the chosen scores are divided by their sum to give a token's weights."
    )
    routed_scale: float = Field(
        default=1.0, gt=0, le=1e6, description="Factor of a token's weights, after they have been normalized."
    )
    combine: Literal["choice", "expert"] = Field(
        default="choice",
        description="Order in which the outputs of a token's experts are added, and their gradients. `choice`: best "
        "first, on PyTorch in one kernel with an order of its own. `expert`: in the order of the experts' numbers, as "
        "programs that sort rows by expert; 16-bit outputs are added in float32.",
    )
    router_dtype: Literal["float32", "float64"] | None = Field(
        default=None,
        description="Type of the router's product, its gradients, the scores and weights, and experts' outputs times "
        "weights, if wider than the run's type. Gradients, and the sums of outputs, are rounded to the usual types. "
        "Megatron-LM's `--moe-router-dtype`.",
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
        description="How tokens come to the experts of other EP ranks, and results back. `all_to_all`: each token is "
        "sent to the ranks of its experts, once for each expert. `all_gather`: every rank gets the tokens and router "
        "outputs of all ranks, and a reduce-scatter adds the ranks' results. This moves fewer bytes if a token has "
        "more experts than there are ranks, and no rank needs the number of tokens in advance.",
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
    j + 1 positions ahead, and predicts the token after that one. The modules
    share the head of the main model.
    """

    num_modules: int = Field(ge=1, le=64, description="Number of modules, one after the other.")
    loss_weight: float = Field(default=0.3, gt=0, le=1e6, description="Factor of the mean of the modules' losses.")
    magic_send: bool = Field(
        default=False,
        description="Paddle's own name. True: a stage with a module has a copy of the embedding, and only hidden "
        "states cross between stages. False: the first stage embeds for all, and the tensor between stages is "
        "(num_modules + 1) times as large.",
    )
    embedding: Literal["shared", "own"] = Field(
        default="shared",
        description="The embedding of a module: shared with the main model, or its own weight, with which the module "
        "looks up its tokens itself.",
    )
    reads: Literal["before_norm", "after_norm", "streams"] = Field(
        default="before_norm",
        description="Input of the first module. before_norm: the hidden states before the last norm, which then also "
        "norms the outputs of modules. after_norm, as in Megatron-LM and PaddleFleet: the hidden states after the last "
        "norm; each module ends with a norm of its own, which the next module and the head read. streams, as in the "
        "released DeepSeek-V4: all streams of model.hyper_connections; the module ends with a contraction and a norm.",
    )

    @property
    def embeds_again(self) -> bool:
        """True if modules look up tokens themselves."""
        return self.magic_send or self.embedding == "own"


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
        "sums. With `sinkhorn: softmax` the first time has only columns, and the later ones begin with rows.",
    )
    sinkhorn: Literal["exp", "softmax"] = Field(
        default="exp",
        description="First function of the mixing matrix: the exponential of each element, or softmax over each row, "
        "as in DeepSeek-V4.",
    )
    epsilon: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Number that is added to the factors with which streams are read and, with `sinkhorn: softmax`, to "
        "each element of the softmax and to each sum that divides.",
    )
    transposed: bool = Field(
        default=False,
        description="Whether the transpose of the mixing matrix mixes the streams, as in DeepSeek-V4 (a sum over the "
        "first index).",
    )
    contraction: Literal["sum", "learned"] = Field(
        default="sum",
        description="How the streams become one after the last block: their sum or, as in DeepSeek-V4, a sum with "
        "factors that a learned gate gives for each token.",
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
    compressed_attention: CompressedAttentionSpec | None = Field(
        default=None,
        description="Attention to near tokens and to compressed far ones, by block, in place of attention to all; "
        "heads have head_size elements.",
    )
    mtp: MtpSpec | None = Field(default=None, description="Modules that predict tokens further ahead.")
    dropout: DropoutSpec | None = Field(
        default=None, description="Dropout; without it, none. A number sets all three shares."
    )
    swiglu_limit: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Clamp of the SwiGLU of every MLP and expert: the gate is at most this, the other factor between "
        "minus this and this. Without it, no clamp.",
    )
    swiglu_formula: Literal["gpt_oss", "silu"] = Field(
        default="gpt_oss",
        description="The SwiGLU of a clamped gate g and a clamped factor u: `gpt_oss`, g sigmoid(1.702 g) (u + 1), or "
        "`silu`, g sigmoid(g) u, as in DeepSeek-V4. Needs swiglu_limit.",
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

    def _problems(self) -> Iterator[Problem]:
        """Heads fit the hidden size and are even (PP108); parts fit the model and each other (PP106, PP108)."""
        heads = (_check_head_size, _check_groups) if self.mla is None else (_check_latent,)
        for check in (*heads, _check_vocabulary, _check_experts, _check_parts, _check_compressed_attention):
            yield from check(self)

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

    def attention_type(self, block: int) -> AttentionType | None:
        """The compressed attention of the block of that number, -1 for MTP modules; None if the model has another."""
        spec = self.compressed_attention
        if spec is None:
            return None
        has_own = len(spec.layer_types) > self.num_layers
        return spec.type_of(block if block >= 0 else self.num_layers - (not has_own))

    @property
    def modules_read_streams(self) -> bool:
        """True if the MTP module reads all residual streams, and contracts them for the main model, too."""
        return self.mtp is not None and self.mtp.reads == "streams"

    @property
    def num_streams(self) -> int:
        """Number of residual streams between blocks."""
        return 1 if self.hyper_connections is None else self.hyper_connections.streams

    def has_experts(self, block: int) -> bool:
        """Return True if the block of that number has experts in place of the MLP."""
        return self.moe is not None and block >= self.moe.dense_layers

    @property
    def num_blocks_of_each_kind(self) -> int:
        """Number of first blocks that include every kind of attention, and of MLP or experts."""
        if self.mtp is not None and self.compressed_attention is not None:  # a module has the last block's attention
            return self.num_layers
        numbers = range(self.num_layers)
        kinds = [(self.has_experts(n), self.routes_by_token(n), self.attention_type(n)) for n in numbers]
        return 1 + max(map(kinds.index, set(kinds)))

    def routes_by_token(self, block: int) -> bool:
        """Return True if a table chooses the experts of the block of that number by token id."""
        return self.moe is not None and 0 <= block - self.moe.dense_layers < self.moe.hash_layers


PART_KEYS = ("norm", "qk_norm", "positions", "mlp", "biases")
"""Keys of the parts of a block, and of positions."""


def model_content(model: Section, exclude: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The keys of a model as JSON values, for digests and saved states.

    Keys of later releases are left out at their default: a plan without them keeps its digest, and its states can be
    resumed.
    """
    content = model.model_dump(mode="json", exclude=None if exclude is None else dict(exclude))
    later: tuple[tuple[dict[str, Any] | None, type[Section], Sequence[str]], ...] = (
        (content, type(model), (*PART_KEYS, "swiglu_formula", "compressed_attention")),
        (content.get("compressed_attention"), CompressedAttentionSpec, ("rope_scaling", "documents")),
        (
            content.get("moe"),
            MoeSpec,
            ("dispatcher", "hash_layers", "hash_tables", "routed_scale", "combine", "router_dtype"),
        ),
        (content.get("mtp"), MtpSpec, ("embedding", "reads")),
        (content.get("hyper_connections"), HyperConnectionsSpec, _LATER_OF_STREAMS),
    )
    for values, section, keys in later:
        for key in keys:
            if values and key in values and values[key] == section.model_fields[key].default:
                del values[key]
    return content


_LATER_OF_STREAMS = ("sinkhorn", "epsilon", "transposed", "contraction")


def _check_parts(model: ModelSpec) -> Iterator[Problem]:
    """PP106: keys that have no meaning together."""
    latent = "`model.mla` has its own projections and norms"
    refused = [
        (model.qk_norm and model.mla is not None, "qk_norm", latent),
        (model.biases != "none" and model.mla is not None, "biases", latent),
        (model.biases == "all" and model.moe is not None, "biases", "experts have no biases"),
        (model.mlp != "swiglu" and model.moe is not None, "mlp", "experts are SwiGLU"),
        (model.mlp != "swiglu" and model.swiglu_limit is not None, "mlp", "`model.swiglu_limit` clamps a SwiGLU"),
        (
            model.swiglu_formula != "gpt_oss" and model.swiglu_limit is None,
            "swiglu_formula",
            "`swiglu_limit` is not given",
        ),
        (model.positions == "learned" and model.mtp is not None, "positions", "`model.mtp` embeds without positions"),
        (model.positions == "learned" and model.mla is not None, "positions", "`model.mla` has rotary keys"),
    ]
    for is_refused, key, why in refused:
        if is_refused:
            message = f"`model.{key}` is {getattr(model, key)!r}, and {why}"
            yield Problem("PP106", (key,), message, help=f"remove {key}")


def _check_head_size(model: ModelSpec) -> Iterator[Problem]:
    """Rotary embedding rotates pairs of elements, so the size of a head is even."""
    hidden, heads = model.hidden_size, model.num_heads
    if model.head_size is not None:
        if model.head_size % 2:
            message = f"model.head_size {model.head_size} is odd, and rotary attention needs an even number"
            yield Problem("PP108", ("head_size",), message, help=f"set it to {multiples(model.head_size, 2)}")
        return
    if hidden % heads:
        message = f"model.hidden_size {hidden} does not divide into model.num_heads {heads} heads"
    elif hidden // heads % 2:
        message = (
            f"a head has model.hidden_size {hidden} / model.num_heads {heads} = {hidden // heads} elements, "
            "and rotary attention needs an even number"
        )
    else:
        return
    fix = f"set model.hidden_size to {multiples(hidden, 2 * heads)}"
    if hidden % 2 == 0:  # heads of an even size: their number divides half the hidden size
        fix += f", or model.num_heads to {divisors(hidden // 2, heads)}"
    yield Problem("PP108", ("hidden_size",), message, help=fix)


def _check_groups(model: ModelSpec) -> Iterator[Problem]:
    heads, kv_heads = model.num_heads, model.kv_heads
    if heads % kv_heads:
        message = f"model.num_heads {heads} does not divide into groups for model.num_kv_heads {kv_heads}"
        fix = f"set model.num_kv_heads to {divisors(heads, kv_heads)}"
        yield Problem("PP108", ("num_kv_heads",), message, help=fix)


def _check_latent(model: ModelSpec) -> Iterator[Problem]:
    assert model.mla is not None
    for name in ("num_kv_heads", "head_size"):
        if getattr(model, name) is not None:
            message = f"`model.{name}` is given together with `model.mla`, which has its own head sizes"
            yield Problem("PP106", (name,), message, help=f"remove {name}", at_key=True)
    size = model.mla.rope_head_size
    if size % 2:
        message = f"model.mla.rope_head_size {size} is odd, and rotary attention needs an even number"
        yield Problem("PP108", ("mla", "rope_head_size"), message, help=f"set it to {multiples(size, 2)}")


def _check_vocabulary(model: ModelSpec) -> Iterator[Problem]:
    """Padding makes a vocabulary larger, never smaller."""
    size = model.num_token_ids
    if size > model.vocab_size:
        message = f"model.unpadded_vocab_size {size} is more than model.vocab_size {model.vocab_size}, padding included"
        fix = f"set model.vocab_size to a multiple of topology.tp that is at least {size}"
        yield Problem("PP106", ("unpadded_vocab_size",), message, help=fix)


def _check_experts(model: ModelSpec) -> Iterator[Problem]:
    moe = model.moe
    if moe is None:
        return
    if moe.top_k > moe.num_experts:
        message = f"a token is sent to model.moe.top_k {moe.top_k} experts, and there are {moe.num_experts}"
        fix = f"set model.moe.top_k to at most {moe.num_experts}"
        yield Problem("PP106", ("moe", "top_k"), message, help=fix)
    if moe.dense_layers >= model.num_layers:
        message = f"model.moe.dense_layers {moe.dense_layers} leaves none of {model.num_layers} blocks for experts"
        fix = f"set it to at most {model.num_layers - 1}, or remove model.moe"
        yield Problem("PP106", ("moe", "dense_layers"), message, help=fix)
    elif moe.hash_layers > model.num_layers - moe.dense_layers:
        message = f"model.moe.hash_layers {moe.hash_layers} is more than the number of blocks with experts"
        fix = f"set it to at most {model.num_layers - moe.dense_layers}"
        yield Problem("PP106", ("moe", "hash_layers"), message, help=fix)


def _check_compressed_attention(model: ModelSpec) -> Iterator[Problem]:
    """PP106: keys that have no meaning with it; PP108: heads that do not divide into parts and groups."""
    spec = model.compressed_attention
    if spec is None:
        return
    dropped = model.dropout is not None and model.dropout.attention > 0
    refused = [
        (model.mla is not None, "mla", "both are the attention of all blocks"),
        (model.num_kv_heads is not None, "num_kv_heads", "it has one head of keys for all queries"),
        (model.qk_norm, "qk_norm", "it has its own norms"),
        (model.norm != "rms", "norm", "its norms are RMSNorm"),
        (model.positions != "rotary", "positions", "its positions are rotary"),
        (model.biases != "none", "biases", "its products have no biases"),
        (dropped, "dropout", "no dropout is defined for probabilities with a sink"),
    ]
    for is_refused, key, why in refused:
        if is_refused:
            message = f"`model.{key}` is given together with `model.compressed_attention`: {why}"
            fix = f"remove {key}" + (", or set its `attention` to 0" if key == "dropout" else "")
            yield Problem("PP106", (key,), message, help=fix, at_key=True)
    section, rope = "compressed_attention", spec.qk_rope_head_dim
    most = model.num_layers + (model.mtp is not None)
    if not 0 < len(spec.layer_types) <= most:
        message = f"`model.{section}.layer_types` has {len(spec.layer_types)} entries for {model.num_layers} blocks"
        yield Problem("PP106", (section, "layer_types"), message, help=f"give 1 to {most}")
    smallest = min(model.size_of_head, spec.index_head_dim)
    if rope % 2 or rope > smallest:
        message = f"model.{section}.qk_rope_head_dim {rope} is not an even part of a head, whose size is {smallest}"
        fix = f"set it to an even number up to {smallest}"
        yield Problem("PP108", (section, "qk_rope_head_dim"), message, help=fix)
    if spec.rope_scaling is not None and spec.rope_scaling.beta_fast <= spec.rope_scaling.beta_slow:
        message = f"beta_fast {spec.rope_scaling.beta_fast} is not larger than beta_slow {spec.rope_scaling.beta_slow}"
        yield Problem("PP106", (section, "rope_scaling", "beta_fast"), message, help="exchange the two")
    if model.num_heads % spec.o_groups:
        message = f"model.num_heads {model.num_heads} does not divide into model.{section}.o_groups {spec.o_groups}"
        fix = f"set o_groups to {divisors(model.num_heads, spec.o_groups)}"
        yield Problem("PP108", (section, "o_groups"), message, help=fix)
