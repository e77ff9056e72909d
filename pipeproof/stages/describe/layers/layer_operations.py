"""The operations of each layer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeproof.specs.compressed_attention import AttentionType
from pipeproof.specs.model import HyperConnectionsSpec, ModelSpec
from pipeproof.stages.describe.layer import attention_of, ends_normed, is_block, layer_kind
from pipeproof.stages.describe.layers import operations as ops
from pipeproof.stages.describe.layers.attention import (
    MEASURED_WITH,
    attention,
    compressed_attention,
    latent_attention,
)
from pipeproof.stages.describe.layers.mlp import experts, mlp
from pipeproof.stages.describe.layers.operations import norm
from pipeproof.stages.describe.mtp_streams import MAIN_STREAMS, embeds_again, has_own_embedding


def layer_operations(model: ModelSpec, name: str) -> ops.Operations:
    """The operations of the layer ``name``, in the order of forward. Layers of one kind have the same ones."""
    match layer_kind(model, name):
        case "embed":
            return embedding(model)
        case "empty":
            return ()
        case "norm":
            return (norm(model, "norm"),)
        case "head":
            return head(model)
        case "mtp":
            return _mtp_module(model)
        case kind:
            return _block(model, residual_streams_of(model, name), kind, attention_of(model, name))


def _attention(model: ModelSpec, attends: AttentionType | None) -> ops.Operations:
    if model.compressed_attention is not None and attends is not None:
        return compressed_attention(model, model.compressed_attention, attends)
    return attention(model) if model.mla is None else latent_attention(model, model.mla)


def _block(
    model: ModelSpec,
    streams: BlockStreams | None,
    kind: str,
    attends: AttentionType | None,
    *,
    in_module: bool = False,
) -> ops.Operations:
    """A pre-norm block: attention and an MLP, each with its norm and its residual."""
    hidden, operations = model.hidden_size, list[ops.Operation]()
    first = _attention(model, attends)
    has_experts, by_token = kind.endswith("moe_block"), "hash_" in kind
    second = experts(model, model.moe, by_token=by_token) if has_experts and model.moe is not None else mlp(model)
    for name, inner in (("attn", first), ("mlp", second)):
        reads_input = name == "attn" and not in_module
        if streams is not None:
            operations += read_streams(model, streams, name, is_first=reads_input)
        entry = norm(model, f"{name}_norm", is_input=reads_input and streams is None)
        operations += (entry, *with_biases(model, inner), ops.Dropout(f"{name}.dropout", "hidden"))
        if streams is not None:
            operations += write_streams(model, streams, name)
        else:  # in backward the sum of both gradients
            operations.append(ops.Elementwise(f"{name}.add", (1, 3), (1, 3), whole=hidden, rows=ops.BETWEEN))
    return (*operations, *(() if streams is None else ends_of_streams(model, streams)))


def _mtp_module(model: ModelSpec) -> ops.Operations:
    """An MTP stream and an embedding are normed, concatenated and projected (arXiv:2412.19437, section 2.2).

    A block like the last one follows. Every TP rank has the whole weight [2H, H]. The stream has another reader, so
    backward adds two gradients. If it reads all residual streams, each is normed and multiplied by a weight [H, H], the
    embedding by another, and it contracts the streams that it has read for the main model.
    """
    hidden, embeds, streams = model.hidden_size, embeds_again(model), residual_streams_of(model, "mtp.0")
    n = model.num_streams if model.modules_read_streams else 1
    norms = norm(model, "hidden_norm", is_input=True), norm(model, "embed_norm", is_input=not embeds)
    joined: ops.Operations = (
        *norms,
        ops.Elementwise("join", (0, 2), (0, 2), whole=2 * hidden, rows=ops.BETWEEN),
        ops.Product("proj", (ops.Weight("proj.weight", (2 * hidden, hidden)),), ops.BETWEEN),
    )
    if model.modules_read_streams:
        joined = (
            norms[0]._replace(of_streams=True),
            ops.Product("hidden_proj", (ops.Weight("hidden_proj.weight", (hidden, hidden)),), ops.STREAMS),
            norms[1],
            ops.Product("embed_proj", (ops.Weight("embed_proj.weight", (hidden, hidden)),), ops.BETWEEN),
            _pass("join", hidden, (n, 2 * n + 1), (n - 1, n + 1)),
        )
    return (
        *(embedding(model, borrowed=not has_own_embedding(model)) if embeds else ()),
        *joined,
        ops.Elementwise("mtp.add", None, (1, 3), whole=n * hidden, rows=ops.BETWEEN),
        *_block(
            model,
            streams,
            "moe_block" if model.has_experts(model.num_layers - 1) else "block",
            model.attention_type(-1),
            in_module=True,
        ),
        *((norm(model, "norm"),) if ends_normed(model) else ()),
        *(learned_contraction(model, streams, "main") if streams is not None and model.modules_read_streams else ()),
    )


# The vocabulary-parallel ends of the model: embedding, and head with its loss.
#
# A tied head (arXiv:1608.05859) multiplies by the transpose of the embedding's weight, which it borrows. Both process
# all MTP streams at once.


def embedding(model: ModelSpec, *, borrowed: bool = False) -> ops.Operations:
    """Embedded tokens; an MTP module borrows the weight."""
    hidden, lookup = model.hidden_size, ops.Lookup("embed", _embedding_weight(model, borrowed=borrowed))
    weights = (ops.Weight("embed.positions.weight", (model.seq_length, hidden)),)  # added to the sum over TP
    positions = ops.Elementwise(
        "embed.positions", (1, 3), None, (1, 3), whole=hidden, rows=ops.BETWEEN, weights=weights
    )
    learned = (positions,) if model.positions == "learned" else ()
    return lookup, ops.Leave("embed.out", hidden), *learned, ops.Dropout("embed.dropout", "embedding")


def head(model: ModelSpec) -> ops.Operations:
    """Logits and their cross-entropy."""
    hidden, tied = model.hidden_size, model.tied_embedding
    weight = ops.Weight("head.weight", (hidden, model.vocab_size), 1)
    weight = _embedding_weight(model, borrowed=True) if tied else weight
    logits = ops.Product("head", (weight,), entered=True, narrow=False, transposed=tied)
    return ops.Enter("head.in", hidden), logits, ops.Loss("head.loss", model.vocab_size)


def _embedding_weight(model: ModelSpec, *, borrowed: bool) -> ops.Weight:
    return ops.Weight("embed.weight", (model.vocab_size, model.hidden_size), 0, borrowed=borrowed)


def with_biases(model: ModelSpec, operations: ops.Operations) -> ops.Operations:
    """The operations of a sub-layer with the biases that the model has.

    A column-parallel product adds its biases to its own columns. The bias of a row-parallel product is added once,
    after the sum over TP.
    """
    biased, row_parallel = list[ops.Operation](), ""
    for operation in operations:
        if isinstance(operation, ops.Product) and _has_bias(model, operation):
            if operation.entered:
                biased.append(operation._replace(biased=True))
                continue
            row_parallel = operation.name
        biased.append(operation)
        if isinstance(operation, ops.Leave) and row_parallel:
            bias = ops.Weight(f"{row_parallel}.bias", (operation.size,), init_std=None, init_value=0.0)
            costs, rows = ((1, 2), None, (1, 1)), ops.BETWEEN
            biased.append(ops.Elementwise(bias.name, *costs, whole=operation.size, rows=rows, weights=(bias,)))
    return tuple(biased)


def _has_bias(model: ModelSpec, product: ops.Product) -> bool:
    return model.biases == "all" or (model.biases == "qkv" and product.name == "attn.qkv")


# Several residual streams around the sub-layers of a block (``residual_streams``).
#
# Costs per token between layers, with fused kernels (arXiv:2512.24880, section 4.3.1): one pass reads the streams for a
# sub-layer; one mixes them and adds the sub-layer's output; Sinkhorn-Knopp stays on the chip and backward recomputes
# it. Each operand and each result counts once. Shape letters of the costs: n streams, H hidden, g = n^2 + 2 n numbers
# that gate and mix them, t iterations.


INITIAL_SCALE = 0.01
"""Initial value of the scales a (arXiv:2512.24880, table 5)."""

_SIGMOID, _SIGMOID_BACK = 4, 3
_SINKHORN = {"exp": (1, 3, 4), "softmax": (6, 2, 4)}
"""FLOPs per element. For Sinkhorn: of the first function, of each column or row pass, of its backward. A
pass of logarithms has an exponential and two additions, else an addition and a division; backward also a product."""


def read_streams(model: ModelSpec, streams: BlockStreams, name: str, *, is_first: bool) -> ops.Operations:
    """Weights and stored activations of the sub-layer ``name``; the streams themselves come first.

    The first block is computed again from the single stream that it expands.
    """
    n, hidden, gates = streams.count, model.hidden_size, streams.spec.num_gates
    expanded = ops.Stored("streams.open", "TO_INPUT", hidden, is_input=True, if_recomputed=True)
    return (
        _stream_weights(model, streams, name, gates, 3),
        *((expanded,) if is_first and streams.expands else ()),
        ops.Stored(f"{name}.streams", "TO_INPUT", n * hidden, is_input=is_first and not streams.expands),
        *_stored_gates(f"{name}.streams", n * hidden, gates),
        ops.Stored(f"{name}.streams.sinkhorn", "TO_INPUT", n * n),
        ops.Stored(f"{name}.streams.mix", "TO_INPUT", gates + hidden),  # the gates, and the sub-layer's output
    )


def _stream_weights(
    model: ModelSpec, streams: BlockStreams, name: str, gates: int, num_scales: int
) -> ops.StreamWeights:
    weight = ops.Weight(f"{name}_streams.weight", (streams.count * model.hidden_size, gates))
    scale = ops.Weight(f"{name}_streams.scale", (num_scales,), init_std=None, init_value=INITIAL_SCALE)
    return ops.StreamWeights(
        f"{name}_streams", (weight, scale, ops.Weight(f"{name}_streams.bias", (gates,), init_std=1.0))
    )


def _stored_gates(name: str, width: int, gates: int) -> ops.Operations:
    return (
        ops.Stored(f"{name}.factor", "TO_INPUT", 1, is_float32=True),
        ops.Stored(f"{name}.gates", "TO_WEIGHT", width),  # the norm's result
        ops.Stored(f"{name}.gates.grad", "BETWEEN", gates),
        ops.Stored(f"{name}.scale", "TO_WEIGHT", gates),
        ops.Stored(f"{name}.scale.grad", "BETWEEN", gates),
    )


def _computed_gates(name: str, width: int, gates: int) -> ops.Operations:
    return (
        _pass(f"{name}.norm", width, (4, 2), (8, 3)),
        ops.StreamProduct(f"{name}.gates", width, gates),
        _pass(f"{name}.scale", gates, (2 + _SIGMOID, 2), (1 + _SIGMOID_BACK, 3), (3, 2)),
    )


def write_streams(model: ModelSpec, streams: BlockStreams, name: str) -> ops.Operations:
    """The work before and after the sub-layer ``name``, in place of a residual addition."""
    n, hidden, gates = streams.count, model.hidden_size, streams.spec.num_gates
    passes, (first, each, back) = 2 * streams.spec.sinkhorn_iterations, _SINKHORN[streams.spec.sinkhorn]
    sinkhorn, sinkhorn_back = passes * each + first, passes * (each + back) + first
    return (
        *_computed_gates(f"{name}.streams", n * hidden, gates),
        _pass(f"{name}.streams.sinkhorn", n * n, (sinkhorn, 2), (sinkhorn_back, 3)),
        # Backward: gradients of streams and gates, and the sum of the gradients of the streams' three readers.
        _pass(f"{name}.streams.read", hidden, (2 * n, n + 1), (2 * n + 3 * n, 4 * n + 1)),
        _pass(f"{name}.streams.mix", hidden, (2 * n * (n + 1), 2 * n + 1), (4 * n * (n + 1), 3 * n + 2)),
    )


def ends_of_streams(model: ModelSpec, streams: BlockStreams) -> ops.Operations:
    """The work that makes the streams, in the first block, and that adds them up, in the last block."""
    n, hidden = streams.count, model.hidden_size
    opened = (_pass("streams.open", hidden, (0, n + 1), (n - 1, n + 1)),)
    closed: ops.Operations = (_pass("streams.close", hidden, (n - 1, n + 1), (0, n + 1)),)
    if streams.has_gate_at_end:
        closed = ops.Stored("out.streams.read", "TO_INPUT", n * hidden), *learned_contraction(model, streams, "out")
    return opened * streams.expands + closed * streams.contracts


def learned_contraction(model: ModelSpec, streams: BlockStreams, name: str) -> ops.Operations:
    """Add the streams with factors of each token. Backward adds the gradients of the streams' two readers."""
    n, width, name_of_all = streams.count, streams.count * model.hidden_size, f"{name}.streams"
    return (
        _stream_weights(model, streams, name, n, 1),
        ops.Stored(name_of_all, "TO_INPUT", n),
        *_stored_gates(name_of_all, width, n),
        *_computed_gates(name_of_all, width, n),
        _pass(f"{name_of_all}.close", model.hidden_size, (2 * n, n + 1), (2 * n + 2 * n, 3 * n + 1)),
    )


def _pass(name: str, numel: int, forward: ops.Cost, back: ops.Cost, weight: ops.Cost | None = None) -> ops.Elementwise:
    return ops.Elementwise(name, forward, back, weight, whole=numel, rows=ops.BETWEEN)


def measured_with(name: str) -> tuple[str, ...]:
    """Other weights whose largest gradient element is also the unit for differences of the named gradient.

    A scale or a bias of streams has few elements. Each is a sum over all tokens of addends with both signs, which
    nearly cancel, so these elements alone are not a good unit. The gradient of the matrix that mixes streams is the
    products (stream) x (gradient of a stream); Sinkhorn-Knopp keeps only their differences between streams, and the
    streams of a token differ only by outputs of sub-layers. The smaller these are, the smaller is the gradient, but not
    its rounding errors, which come from the products. All gradients of a learned contraction cancel, because a norm
    follows: a common factor changes nothing. The weight of the last norm has sums of such products that do not cancel.
    """
    prefix, _, end = name.rpartition(".")
    if prefix.endswith("_streams"):
        others = [f"{prefix}.{other}" for other in ENDS if other != end]
        cancels = end != "weight" or prefix.endswith((".out_streams", MAIN_STREAMS))
        return (*others, *(["norm.weight"] if cancels else []))
    cancelling = [(name.removesuffix(own), others) for own, others in MEASURED_WITH.items() if name.endswith(own)]
    return tuple(layer + other for layer, others in cancelling for other in others)


# Hyper-connections: n residual streams between blocks in place of one.
#
# Manifold-constrained hyper-connections (mHC, arXiv:2512.24880, equations 3, 7, 8 and 9, after arXiv:2409.19606). For
# each sub-layer F of a block (attention and MLP with their norms) and each token with its streams x, [n, H]:
#
#     r        = vec(x) / sqrt(mean(vec(x)^2) + eps)           [n H], RMSNorm; its weight is absorbed by the next one
#     pre      = sigmoid(a_0 (r W_pre) + b_pre)                [n]
#     post     = 2 sigmoid(a_1 (r W_post) + b_post)            [n]
#     res      = Sinkhorn-Knopp(a_2 mat(r W_res) + b_res)      [n, n]
#     x'       = res x + post^T F(pre x)                       [n, H]
#
# The keys of DeepSeek-V4: with ``epsilon`` pre is that much larger. With ``transposed`` x' has res^T x. With
# ``sinkhorn: softmax`` the matrix is a softmax over each row plus epsilon, then each column is divided by its sum plus
# epsilon, and (t - 1) times each row, then each column. With ``contraction: learned`` the output of the last block is
# c x with c = sigmoid(a (r W) + b) + epsilon, [n], from weights of its own (``out_streams``).
#
# Sinkhorn-Knopp takes the exponential, then t times divides each column by its sum and each row by its sum. The rows of
# ``res`` sum to one up to rounding, and the columns nearly so: if r is the largest less the smallest of the n^2
# numbers, a column's sum differs from one by at most exp(r k^(2t-1)) - 1, k = tanh(r / 2) (from the first row sums on,
# each half of an iteration contracts Hilbert's metric by k: Birkhoff's theorem; Franklin and Lorenz, Linear Algebra
# Appl. 114/115, 1989).
#
# Each sub-layer has three weights: W = [W_pre | W_post | W_res], [n H, n^2 + 2 n] (``attn_streams.weight``), the three
# a (``.scale``), and b, [n^2 + 2 n] (``.bias``). The a start as 0.01, as in the paper; W and b are drawn like other
# weights. All TP ranks hold them whole and use them on activations between layers: without sequence parallelism every
# rank computes the same streams, with it each rank its own tokens.
#
# The first block copies its input into n equal streams, and the last block returns their sum, in the order of the
# streams, or their learned contraction. The block of an MTP module does both: it reads the contraction. So an
# activation is n times as wide only between blocks; embedding, norm and head do not change. The streams of a token are
# consecutive: [S, B, n H], or [B, S, n H]. With ``mtp.reads: streams`` the module reads them all, before the last
# block's contraction, which it then does itself (``main_streams``).


ENDS = ("weight", "scale", "bias")
"""The ends of the names of a sub-layer's stream weights."""


@dataclass(frozen=True, slots=True)
class BlockStreams:
    """The residual streams of one block.

    ``expands`` is true for the first block, ``contracts`` for the last; a module's block does both, or contracts alone
    if it reads all streams, which then the last block does not contract.
    """

    spec: HyperConnectionsSpec
    expands: bool
    contracts: bool

    @property
    def count(self) -> int:
        """The number of streams."""
        return self.spec.streams

    @property
    def has_gate_at_end(self) -> bool:
        """True if the streams are added with learned factors, by weights of the block."""
        return self.contracts and self.spec.contraction == "learned"


def residual_streams_of(model: ModelSpec, layer: str) -> BlockStreams | None:
    """The streams of a block by its name; None for a single residual, and for layers that are not blocks."""
    spec = model.hyper_connections
    if spec is None or not is_block(layer):
        return None
    in_module = not layer.startswith("layer.")
    first, last = layer == "layer.0", layer == f"layer.{model.num_layers - 1}"
    reads_streams = model.modules_read_streams
    return BlockStreams(spec, first or (in_module and not reads_streams), in_module or (last and not reads_streams))


def width_after(model: ModelSpec, names: Sequence[str]) -> int:
    """Elements per token of the activation after ``names``, the model's first layers in any order."""
    num_blocks = sum(map(is_block, names))
    last = model.num_layers + model.modules_read_streams
    between_blocks = model.hyper_connections is not None and 0 < num_blocks < last
    return model.hidden_size * (model.num_streams if between_blocks else 1)
