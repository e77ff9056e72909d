"""The operations of each layer of a model."""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.layer import layer_kind
from pipeproof.stages.describe.layers import operations as ops
from pipeproof.stages.describe.layers import streams as several
from pipeproof.stages.describe.layers.attention import attention
from pipeproof.stages.describe.layers.biases import with_biases
from pipeproof.stages.describe.layers.experts import experts
from pipeproof.stages.describe.layers.latent_attention import latent_attention
from pipeproof.stages.describe.layers.mlp import mlp
from pipeproof.stages.describe.layers.norm import norm
from pipeproof.stages.describe.layers.vocabulary import embedding, head
from pipeproof.stages.describe.mtp_streams import embeds_again
from pipeproof.stages.describe.residual_streams import BlockStreams, residual_streams_of


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
            return _block(model, residual_streams_of(model, name), has_experts=kind.endswith("moe_block"))


def _block(
    model: ModelSpec, streams: BlockStreams | None, *, has_experts: bool, in_module: bool = False
) -> ops.Operations:
    """A pre-norm block: attention and an MLP, each with its norm and its residual."""
    hidden, operations = model.hidden_size, list[ops.Operation]()
    first = attention(model) if model.mla is None else latent_attention(model, model.mla)
    second = experts(model, model.moe) if has_experts and model.moe is not None else mlp(model)
    for name, inner in (("attn", first), ("mlp", second)):
        reads_input = name == "attn" and not in_module
        if streams is not None:
            operations += several.read_streams(model, streams, name, is_first=reads_input)
        entry = norm(model, f"{name}_norm", is_input=reads_input and streams is None)
        operations += (entry, *with_biases(model, inner), ops.Dropout(f"{name}.dropout", "hidden"))
        if streams is not None:
            operations += several.write_streams(model, streams, name)
        else:  # in backward the sum of both gradients
            operations.append(ops.Elementwise(f"{name}.add", (1, 3), (1, 3), whole=hidden, rows=ops.BETWEEN))
    return (*operations, *(() if streams is None else several.ends_of_streams(model, streams)))


def _mtp_module(model: ModelSpec) -> ops.Operations:
    """An MTP stream and an embedding are normed, concatenated and projected (arXiv:2412.19437, section 2.2).

    A block like the last one follows. Every TP rank has the whole weight [2H, H]. The stream has another reader, so
    backward adds two gradients.
    """
    hidden, embeds = model.hidden_size, embeds_again(model)
    return (
        *(embedding(model, borrowed=True) if embeds else ()),
        norm(model, "hidden_norm", is_input=True),
        norm(model, "embed_norm", is_input=not embeds),
        ops.Elementwise("join", (0, 2), (0, 2), whole=2 * hidden, rows=ops.BETWEEN),
        ops.Product("proj", (ops.Weight("proj.weight", (2 * hidden, hidden)),), ops.BETWEEN),
        ops.Elementwise("mtp.add", None, (1, 3), whole=hidden, rows=ops.BETWEEN),
        *_block(model, None, has_experts=model.has_experts(model.num_layers - 1), in_module=True),
    )
