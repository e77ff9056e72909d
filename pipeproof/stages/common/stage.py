"""One pipeline stage on one rank: consecutive layers with this rank's shards of their weights.

This file defines what the layers do, in which order, with which weights and collectives. The stages of
``stages.paddle`` and ``stages.torch`` implement the abstract methods, and their ``BackendOps`` the arithmetic.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values of this rank, G query heads of each, D head
size, A heads of this rank in latent attention, N and R elements of a head's query without and with positions, Z size
of a head's value.
Activations between layers are [S, B, H] or [B, S, H], as in the plan, sharded along the sequence with sequence
parallelism. They are written [S, B, H] below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from pipeproof.specs.model import HyperConnectionsSpec, MlaSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.backend_ops import BackendOps, Tensor, Weight
from pipeproof.stages.common.compressed_attention import CompressedAttention
from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.common.embedding_and_head import EmbeddingAndHead, Positions, Vocabulary
from pipeproof.stages.common.experts import Balance, ExpertRegion, Experts
from pipeproof.stages.common.sequence_splits import ContextCollectives, EarlierSplits, GatheredKeys
from pipeproof.stages.common.tensor_parallel import TensorParallelCollectives, TensorParallelRegion
from pipeproof.stages.common.weights import SplitWeights, StageWeights, WeightGradients, WeightMaker
from pipeproof.stages.common.work_items import MtpStream, WorkItem, join_mtp_streams, split_mtp_streams, training_loss
from pipeproof.stages.describe.layer import Layer, attention_of, ends_normed, is_empty
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.layers.layer_operations import ENDS, residual_streams_of
from pipeproof.stages.describe.model_family import describe_boundary
from pipeproof.stages.describe.mtp_streams import (
    MAIN_STREAMS,
    is_mtp,
    module_of,
    mtp_stream_made,
    mtp_stream_read,
    mtp_streams_after,
    mtp_streams_at,
    mtp_streams_into,
)
from pipeproof.stages.describe.synthetic import DropoutKeys

TokenBatch = TypeVar("TokenBatch")
"""The tokens and labels of a micro-batch, as a framework's stage takes them."""
RoutedItem: TypeAlias = tuple[int, int, Tensor | None]
"""Micro-batch and split of a work item, and the ids of its tokens in the order of activations, if experts need them."""


@dataclass(frozen=True, slots=True)
class LayerOps:
    """Operations and weights of one framework for the layers of a stage."""

    ops: BackendOps
    weights: SplitWeights
    vocabulary: Vocabulary
    mlp_activation: Callable[..., Tensor]
    """The activation function of an MLP, of its gate and its other factor, or of one factor alone."""
    tables: tuple[Tensor, Tensor]
    """Cosines and sines of the rotary embedding, [S of the model, D] each, as ``BackendOps.rotate`` takes them."""
    maker: WeightMaker
    balance: Balance
    experts: type[Experts]


class Stage(ABC, Generic[TokenBatch]):
    """Layers ``layers`` of the plan's GPT on tensor-parallel rank ``tp_rank`` and expert-parallel rank ``experts``.

    ``parameters`` has this rank's shards by parameter name. Borrowed weights are included, unless they are in
    ``lent``, the weights of the rank's other stages. ``collectives`` may be None if ``topology.tp`` is 1, ``context``
    if ``topology.cp`` is 1. Collectives are issued exactly as the layers' descriptions list them, forward and
    backward. With ``memory.recompute: full`` the backward of a block issues the collectives of its forward again,
    before its own. ``balance`` has the losses and biases of the routers.

    Raises:
        ValueError: the layers are empty or repeat, or ``tp_rank`` and ``topology.tp`` do not fit.
    """

    def __init__(
        self,
        layer_ops: LayerOps,
        plan: PlanSpec,
        layers: Sequence[Layer],
        tp_rank: int,
        collectives: TensorParallelCollectives | None,
        experts: ExpertRegion,
        lent: Mapping[str, Weight] | None,
        context: ContextCollectives | None,
    ) -> None:
        names = [layer.name for layer in layers]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a stage needs one or more different layers, got {names}")
        self._plan, self._layers = plan, tuple(layers)
        self._ops, self._weights, self._mlp_activation = layer_ops.ops, layer_ops.weights, layer_ops.mlp_activation
        self._positions = Positions(self._ops, plan, self._weights, layer_ops.tables)
        self.balance, self._make_experts, self._experts = layer_ops.balance, layer_ops.experts, experts
        boundary = describe_boundary(plan)
        dim, regathers = boundary.tp.dim, plan.memory.sequence_parallel_activations == "regather"
        self._region = TensorParallelRegion(self._ops, tp_rank, plan.topology.tp, dim, collectives, regathers=regathers)
        self._batch_first = boundary.dims == "bsh"
        self._rows_dim = boundary.dims.index("b")
        self._recompute = plan.memory.recompute
        self._modules = frozenset(plan.memory.recompute_modules if self._recompute == "selective" else ())
        self._sequence_keys = self._make_sequence_keys(context)
        self._held = StageWeights(layers, layer_ops.maker, plan.run.seed, lent or {}, self._region, experts)
        self.parameters = self._held.parameters
        self._ends = EmbeddingAndHead(
            self._ops, plan, self._region, self._held.used_by, layer_ops.vocabulary, self._positions
        )
        self._compressed_attention: CompressedAttention | None = None
        if plan.gpt.compressed_attention is not None:
            self._compressed_attention = CompressedAttention(
                self._ops, plan, self._weights, self._region, self._product, self._norm, self.parameters.__getitem__,
                layer_ops.tables[0], recomputes="core_attn" in self._modules,
            )  # fmt: skip
        self.adds_by_block = False
        """True if the backward of a recomputed block also adds its weight gradients: nothing of the block is kept."""
        self.losses: Any = None
        """The scaled loss of the latest forward through the head; with MTP modules the main loss and theirs, [k]."""

    def forward(
        self,
        activation: Tensor | None,
        batch: TokenBatch,
        *,
        step: int,
        index: int,
        split: int = 0,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """Run one work item through the stage's layers. The caller keeps the result for backward.

        ``activation`` is the output of the previous stage, None for a stage that begins with ``embed``. ``step`` and
        ``index`` (over all data-parallel ranks) identify the micro-batch. If sequences are split, over time or over
        context-parallel ranks, ``split`` is the number of the split; splits run in order, and in reverse in backward.
        The result is the activation for the next stage or, from a stage that ends with ``head``, the scaled loss, a
        scalar. ``watch`` records the tensors between layers.
        """
        if (activation is None) != (self._layers[0].name == "embed"):
            raise ValueError(
                f"stage of {[layer.name for layer in self._layers]}: it takes an activation if and only if its first "
                f"layer is not 'embed', got {type(activation).__name__}"
            )
        work_item = self._work_item(batch, step, index, split)
        output = self._run_layers(self._layers, activation, work_item, step, index, split, watch)
        # A stage of empty layers returns a copy: the caller frees the output, and may reuse the input's memory.
        is_passed_through = output is activation
        return output.clone() if is_passed_through else output

    def _run_layers(
        self,
        layers: Sequence[Layer],
        activation: Tensor | None,
        work_item: WorkItem,
        step: int,
        index: int,
        split: int,
        watch: LayerWatch | None,
    ) -> Tensor:
        """Run consecutive layers of the stage, from the activation between layers to the next one."""
        num_streams = mtp_streams_into(self._plan.gpt, layers[0].name)
        streams = [] if activation is None else split_mtp_streams(self._ops, activation, num_streams, self._rows_dim)
        dropouts = Dropouts(self._ops, DropoutKeys(self._plan, step, index), split, self._region)
        for layer in layers:
            inputs = streams[mtp_stream_read(layer.name) :][:1]
            if watch is not None and is_mtp(layer.name):
                inputs = [watch.separate_reader(streams, mtp_stream_read(layer.name))]
            if watch is not None and inputs:
                watch.see(layer.name, "input", index, split, inputs)
            if layer.name == "embed":
                streams = self._ends.embed(work_item.streams[: mtp_streams_after(self._plan.gpt, ["embed"])], dropouts)
            elif is_empty(layer.name):
                pass
            elif layer.name == "norm":
                num_normed = mtp_streams_at(self._plan.gpt, "norm")
                streams = [*self._normed(streams[:num_normed]), *streams[num_normed:]]
            elif layer.name == "head":
                losses = [loss * work_item.scale for loss in self._ends.losses(streams, work_item.streams)]
                reported = losses[0].detach() if len(losses) == 1 else self._ops.stack(losses, 0).detach()
                self.losses = self._reported_losses(reported)
                streams = [training_loss(self._plan, losses)]
                if watch is not None:
                    watch.see_loss(layer.name, index, split, reported)
            else:
                routes_by_token = f"{layer.name}.mlp.hash_router.weight" in self.parameters
                block = partial(
                    self._block,
                    name=layer.name,
                    index=index,
                    split=split,
                    token_ids=work_item.tokens if routes_by_token else None,  # otherwise nothing would free them
                    dropouts=dropouts,
                )
                if is_mtp(layer.name):
                    number = module_of(layer.name) + 1
                    inputs += streams[number : number + 1]
                    stream = work_item.streams[number]
                    block = partial(self._module, block=block, name=layer.name, stream=stream, dropouts=dropouts)
                if self._recompute == "full":
                    after = self.accumulate_deferred if self.adds_by_block else None
                    output = self._ops.recompute_in_backward(block, *inputs, after=after)
                else:
                    output = block(*inputs)
                streams[mtp_stream_made(layer.name) : mtp_stream_made(layer.name) + 1] = [output]
                if is_mtp(layer.name) and self._plan.gpt.modules_read_streams:
                    streams[0] = self._contracted(streams[0], layer.name)
            if watch is not None and layer.name != "head":
                watch.see(layer.name, "output", index, split, [streams[mtp_stream_made(layer.name)]])
        return join_mtp_streams(self._ops, streams, self._rows_dim)

    def backward_input(self, output: Tensor, gradient: Tensor | None) -> WeightGradients:
        """Run one work item back to the activation that ``forward`` took, and set its ``grad``.

        ``output`` is the result of ``forward``, ``gradient`` its gradient (None for the loss). All collectives of the
        backward are issued here. The result computes and adds the weight gradients on request.
        """
        return self._weights.backward(output, gradient)

    def accumulate_deferred(self) -> None:
        """Add the weight gradients that the running backward has deferred so far."""
        self._weights.accumulate_deferred()

    def return_gradients(self) -> None:
        """Add the gradients of borrowed weights to the gradients of the weights themselves."""
        self._held.return_gradients()

    def _make_sequence_keys(self, context: ContextCollectives | None) -> EarlierSplits | GatheredKeys:
        """The keys and values of other splits of a sequence, for attention."""
        num_cp, num_splits = self._plan.topology.cp, self._plan.schedule.num_sequence_splits
        if num_cp == 1:
            return EarlierSplits(self._ops, num_splits, recomputes=self._recompute == "full")
        if context is None:
            raise ValueError(f"{num_cp} context-parallel ranks need collectives, got None")
        return GatheredKeys(self._ops, num_cp, context)

    def _module(
        self,
        hidden: Tensor,
        embedding: Tensor | None = None,
        *,
        block: Callable[[Tensor], Tensor],
        name: str,
        stream: MtpStream,
        dropouts: Dropouts,
    ) -> Tensor:
        """A module of multi-token prediction. It looks up the embedding if none is passed."""
        if embedding is None:
            embedding = self._ends.embed_for_module(name, stream, dropouts)
        model, ops = self._plan.gpt, self._ops
        rows = hidden.shape[0], -1, model.hidden_size  # with all residual streams, each is a row
        normed = self._norm(hidden.reshape(rows), f"{name}.hidden_norm"), self._norm(embedding, f"{name}.embed_norm")
        if model.modules_read_streams:
            of_hidden = self._product(normed[0], f"{name}.hidden_proj").reshape(hidden.shape)
            joined = of_hidden + expand_streams(ops, self._product(normed[1], f"{name}.embed_proj"), model.num_streams)
        else:
            joined = self._product(ops.concat(normed, -1), f"{name}.proj")
        output = block(joined)
        return self._norm(output, f"{name}.norm") if ends_normed(model) else output

    def _contracted(self, streams: Tensor, module: str) -> Tensor:
        """The main model's activation, from the residual streams that a module has read."""
        spec = self._plan.gpt.hyper_connections
        assert spec is not None
        weights = {end: self.parameters[f"{module}.{MAIN_STREAMS}.{end}"] for end in ENDS}
        contract = partial(gated_sum_of_streams, self._ops, spec=spec, weights=self._weights, parameters=weights)
        recomputes = self._recompute == "full"
        return self._ops.recompute_in_backward(contract, streams) if recomputes else contract(streams)

    def _block(
        self, activation: Tensor, name: str, index: int, split: int, token_ids: Tensor | None, dropouts: Dropouts
    ) -> Tensor:
        def attention(x: Tensor) -> Tensor:
            return self._attention(self._norm(x, f"{name}.attn_norm"), f"{name}.attn", index, split, dropouts)

        def mlp(x: Tensor) -> Tensor:
            return self._mlp(self._norm(x, f"{name}.mlp_norm"), f"{name}.mlp", (index, split, token_ids), dropouts)

        streams = residual_streams_of(self._plan.gpt, name)
        if streams is None:
            activation = activation + attention(activation)
            return activation + mlp(activation)

        def weights_of(part: str) -> dict[str, Weight]:
            return {end: self.parameters[f"{name}.{part}_streams.{end}"] for end in ENDS}

        spec = streams.spec
        if streams.expands:
            activation = expand_streams(self._ops, activation, streams.count)
        for part, sub_layer in (("attn", attention), ("mlp", mlp)):
            activation = with_streams(self._ops, activation, sub_layer, spec, self._weights, weights_of(part))
        if streams.has_gate_at_end:
            return gated_sum_of_streams(self._ops, activation, spec, self._weights, weights_of("out"))
        return contract_streams(self._ops, activation, streams.count) if streams.contracts else activation

    def _attention(self, activation: Tensor, name: str, index: int, split: int, dropouts: Dropouts) -> Tensor:
        kind, compressed = attention_of(self._plan.gpt, name.removesuffix(".attn")), self._compressed_attention
        if kind is None or compressed is None:
            mixed = self._attention_to_all(activation, name, index, split, dropouts)
        else:
            mixed = compressed.forward(activation, name, kind)
        return dropouts.between(self._row_parallel(mixed, f"{name}.out", f"{name}.out"), "hidden", name)

    def _attention_to_all(self, activation: Tensor, name: str, index: int, split: int, dropouts: Dropouts) -> Tensor:
        """This rank's heads [.., A Z]: each query sees all earlier keys."""
        heads = self._grouped_heads if self._plan.gpt.mla is None else self._latent_heads
        query, key, value = heads(activation, name, split)
        key, value = self._sequence_keys.join(key, value, micro_batch=index, layer=name, split=split)
        inputs = query, key, value
        mix = partial(self._ops.causal_attention, factors=dropouts.of_attention(name, query))
        recomputes = "core_attn" in self._modules
        mixed = self._ops.recompute_in_backward(mix, *inputs) if recomputes else mix(*inputs)  # [B, K, G, S, Z]
        return self._ops.permute(mixed, [0, 3, 1, 2, 4] if self._batch_first else [3, 0, 1, 2, 4]).flatten(2)

    def _grouped_heads(self, activation: Tensor, name: str, split: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, K, G, S, D], key and value [B, K, S, D] of a sequence split."""
        model, parts = self._plan.gpt, [self._plan.gpt.num_heads // self._plan.gpt.kv_heads, 1, 1]
        fused = self._product(self._region.enter(activation, f"{name}.in"), f"{name}.qkv")
        heads = fused.reshape([*fused.shape[:2], -1, sum(parts), model.size_of_head])  # [S, B, K, G + 2, D]
        if model.qk_norm:
            query, key, value = self._ops.split(heads, parts, 3)
            normed = self._norm(query, f"{name}.q_head_norm"), self._norm(key, f"{name}.k_head_norm")
            heads = self._ops.concat([*normed, value], 3)
        heads = self._ops.permute(heads, [0, 2, 3, 1, 4] if self._batch_first else [1, 2, 3, 0, 4])
        return self._positions.grouped_heads(heads, split)

    def _latent_heads(self, activation: Tensor, name: str, split: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, A, 1, S, D], key [B, A, S, D] and value [B, A, S, Z] of a sequence split."""
        mla = self._plan.gpt.mla
        assert mla is not None

        def product(x: Tensor, part: str) -> Tensor:
            return self._product(x, f"{name}.{part}")

        def norm(x: Tensor, part: str) -> Tensor:
            return self._norm(x, f"{name}.{part}")

        query, keys, shared = latent_heads(self._ops, activation, mla, product, norm, self._region, name)
        order = [0, 2, 1, 3] if self._batch_first else [1, 2, 0, 3]
        query, keys = (self._ops.permute(heads, order) for heads in (query, keys))
        if not self._batch_first:
            shared = self._ops.permute(shared, [1, 0, 2])
        tables = self._positions.tables(split, shared.shape[1])
        query, key, value = with_positions(self._ops, query, keys, shared, mla, *tables)
        return query.unsqueeze(2), key, value

    def _mlp(self, activation: Tensor, name: str, work_item: RoutedItem, dropouts: Dropouts) -> Tensor:
        has_experts = f"{name}.experts.gate.weight" in self.parameters
        compute = partial(self._moe, work_item=work_item) if has_experts else self._dense_mlp
        compute = partial(compute, name=name)
        recomputes = ("moe" if has_experts else "mlp") in self._modules
        output = self._ops.recompute_in_backward(compute, activation) if recomputes else compute(activation)
        return dropouts.between(output, "hidden", name)

    def _dense_mlp(self, activation: Tensor, *, name: str) -> Tensor:
        entered = self._region.enter(activation, f"{name}.in")
        factors = [f"{name}.{part}" for part in ("gate", "up") if f"{name}.{part}.weight" in self.parameters]
        inner = self._mlp_activation(*(self._product(entered, factor) for factor in factors))
        return self._row_parallel(inner, f"{name}.down", f"{name}.out")

    def _moe(self, activation: Tensor, *, name: str, work_item: RoutedItem) -> Tensor:
        entered = self._region.enter(activation, f"{name}.in")
        return self._region.leave(self._routed(entered, name, work_item), f"{name}.out")

    def _routed(self, entered: Tensor, name: str, work_item: RoutedItem) -> Tensor:
        """This rank's addend of the experts' output."""
        moe, weight_of = self._plan.model.moe, self.parameters.__getitem__
        assert moe is not None
        recomputes_shared = "shared_experts" in self._modules
        experts = self._make_experts(
            moe,
            name,
            self._weights,
            weight_of,
            self._experts,
            self._mlp_activation,
            recomputes_shared=recomputes_shared,
        )
        return experts.forward(entered, self.balance.of(name, *work_item))

    def _product(self, activation: Tensor, name: str) -> Tensor:
        """The product with the weight of that name, plus its bias, if there is one."""
        weight, *biases = self._held.of(name)
        return self._biased(self._weights.product(activation, weight), biases)

    def _row_parallel(self, activation: Tensor, name: str, label: str) -> Tensor:
        """A product whose addends on the tensor-parallel ranks are summed. The bias is added once, after the sum."""
        weight, *biases = self._held.of(name)
        return self._biased(self._region.leave(self._weights.product(activation, weight), label), biases)

    def _biased(self, activation: Tensor, biases: Sequence[Weight]) -> Tensor:
        return self._weights.added(activation, *biases) if biases else activation

    # Each framework implements these.

    @abstractmethod
    def _work_item(self, batch: TokenBatch, step: int, index: int, split: int) -> WorkItem:
        """The work item of a call of ``forward``."""

    @abstractmethod
    def _norm(self, activation: Tensor, name: str) -> Tensor:
        """The norm over the last dim, with the weights of that name."""

    @abstractmethod
    def _normed(self, streams: Sequence[Tensor]) -> list[Tensor]:
        """The final norm, of all MTP streams."""

    @abstractmethod
    def _reported_losses(self, losses: Tensor) -> Any:
        """Convert the scaled losses to the type of ``losses``."""


def latent_heads(
    ops: BackendOps,
    x: Tensor,
    mla: MlaSpec,
    product: Callable[[Tensor, str], Tensor],
    norm: Callable[[Tensor, str], Tensor],
    region: TensorParallelRegion,
    name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [.., A, N + R], key without positions and value [.., A, N + Z], key with positions [.., R].

    They come from compressed vectors (arXiv:2405.04434). ``x`` is the activation between layers, [.., H]. The
    compressed vectors enter the tensor-parallel region with one collective each, in the order query, latent, positions.
    ``product`` and ``norm`` apply the weight whose name ends in their second argument.
    """
    latent, shared = ops.split(product(x, "kv_down"), [mla.kv_rank, mla.rope_head_size], -1)
    latent = norm(latent, "kv_norm")
    if mla.q_rank is None:
        before, label, up = x, f"{name}.in", "q"
    else:
        before, label, up = norm(product(x, "q_down"), "q_norm"), f"{name}.q.in", "q_up"
    labels = [label, f"{name}.kv.in", f"{name}.rope.in"]
    before, latent, shared = region.enter_each([before, latent, shared], labels)
    query, keys = product(before, up), product(latent, "kv_up")
    query = query.reshape([*query.shape[:2], -1, mla.nope_head_size + mla.rope_head_size])
    keys = keys.reshape([*keys.shape[:2], -1, mla.nope_head_size + mla.value_head_size])
    return query, keys, shared


def with_positions(
    ops: BackendOps, query: Tensor, keys: Tensor, shared: Tensor, mla: MlaSpec, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key [B, A, S, N + R] and value [B, A, S, Z], from [B, A, S, ..] and the shared key [B, S, R]."""
    plain, rotary = ops.split(query, [mla.nope_head_size, mla.rope_head_size], -1)
    query = ops.concat([plain, ops.rotate(rotary, cos, sin)], -1)
    key, value = ops.split(keys, [mla.nope_head_size, mla.value_head_size], -1)
    shared_of_heads = ops.repeat(ops.rotate(shared, cos, sin), key.shape[1], 1)
    return query, ops.concat([key, shared_of_heads], -1), value


def expand_streams(ops: BackendOps, activation: Tensor, count: int) -> Tensor:
    """Copy one activation into ``count`` streams: [.., H] to [.., n H]. The gradient adds theirs in order."""
    return ops.concat(ops.fork(activation, count), -1)


def contract_streams(ops: BackendOps, streams: Tensor, count: int) -> Tensor:
    """Add the streams in order: [.., n H] to [.., H]."""
    total, *others = ops.chunk(streams, count, -1)
    for other in others:
        total = total + other
    return total


def gated_sum_of_streams(
    ops: BackendOps,
    streams: Tensor,
    spec: HyperConnectionsSpec,
    weights: SplitWeights,
    parameters: Mapping[str, Weight],
) -> Tensor:
    """Add the streams with learned factors for each token: [.., n H] to [.., H]."""
    to_gates, to_read = ops.fork(streams, 2)
    products = weights.product(ops.rms_norm(to_gates), parameters["weight"])
    gates = weights.scaled_and_shifted(products, parameters["scale"], parameters["bias"], [spec.streams])
    return _read_streams(gates, to_read, spec)


def _read_streams(gates: Tensor, streams: Tensor, spec: HyperConnectionsSpec) -> Tensor:
    factors = gates.sigmoid() + spec.epsilon if spec.epsilon else gates.sigmoid()
    return (factors.unsqueeze(-2) @ _unflatten_streams(streams, spec.streams)).squeeze(-2)


def with_streams(
    ops: BackendOps,
    streams: Tensor,
    sub_layer: Callable[[Tensor], Tensor],
    spec: HyperConnectionsSpec,
    weights: SplitWeights,
    parameters: Mapping[str, Weight],
) -> Tensor:
    """Run a sub-layer, [.., H] to [.., H], on hyper-connections' n streams [.., n H] and return the new streams.

    The formulas are in ``describe/layers/layer_operations.py``. The streams have three readers: the gates, the
    sub-layer and the mixture. Their gradients are added in that order. Backward recomputes Sinkhorn-Knopp, which never
    runs in 16 bits, so the results of its iterations are not kept. ``parameters`` has the ``weight``, ``scale`` and
    ``bias`` of the sub-layer's streams.
    """
    to_gates, to_read, to_mix = ops.fork(streams, 3)
    count = spec.streams
    sizes = [count, count, count * count]
    products = weights.product(ops.rms_norm(to_gates), parameters["weight"])
    gates = weights.scaled_and_shifted(products, parameters["scale"], parameters["bias"], sizes)
    pre, post, res = ops.split(gates, sizes, -1)
    balance = partial(sinkhorn, ops, iterations=spec.sinkhorn_iterations)
    if spec.sinkhorn == "softmax":
        balance = partial(sinkhorn_of_softmax, ops, iterations=spec.sinkhorn_iterations, epsilon=spec.epsilon)
    res = ops.recompute_in_backward(balance, _unflatten_streams(res, count))
    if spec.transposed:
        res = ops.permute(res, [*range(len(res.shape) - 2), len(res.shape) - 1, len(res.shape) - 2])
    mixed = (res @ _unflatten_streams(to_mix, count)).flatten(-2)
    output = sub_layer(_read_streams(pre, to_read, spec))
    written = (2.0 * post.sigmoid()).unsqueeze(-1) * output.unsqueeze(-2)
    return mixed + written.flatten(-2)


def sinkhorn(ops: BackendOps, matrix: Tensor, iterations: int) -> Tensor:
    """Sinkhorn-Knopp: exp of [.., n, n], then ``iterations`` times columns, then rows, divided by their sums.

    It works on logarithms, so no sum can vanish or overflow.
    """
    logs = ops.widened(matrix)
    for _ in range(iterations):
        logs = logs - logs.logsumexp(-2, keepdim=True)
        logs = logs - logs.logsumexp(-1, keepdim=True)
    return ops.as_type_of(logs.exp(), matrix)


def sinkhorn_of_softmax(ops: BackendOps, matrix: Tensor, iterations: int, epsilon: float) -> Tensor:
    """Softmax over rows of [.., n, n]; then columns, and ``iterations`` - 1 times rows and columns, over their sums.

    Each softmax and each sum is ``epsilon`` larger.
    """
    logs = ops.widened(matrix)
    result = (logs - logs.logsumexp(-1, keepdim=True)).exp() + epsilon
    result = result / (result.sum(-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        result = result / (result.sum(-1, keepdim=True) + epsilon)
        result = result / (result.sum(-2, keepdim=True) + epsilon)
    return ops.as_type_of(result, matrix)


def _unflatten_streams(flat: Tensor, count: int) -> Tensor:
    """[.., n K] to [.., n, K]."""
    return flat.reshape([*flat.shape[:-1], count, -1])
