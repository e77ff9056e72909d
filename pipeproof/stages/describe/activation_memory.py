"""Bytes of activations that a stage stores for a micro-batch on one rank.

Backward needs them. Operations are named as in ``gpt_work``. A product stores its input until W has computed the
weight's gradient. Every other operation stores what its own backward reads, until I. If W runs apart from I, it also
needs the gradients of the outputs of products and norms, from the end of I on.

- RMSNorm: its input, and the factor of each token in float32.
- Rotary embedding: nothing, because its tables are shared.
- Flash attention (arXiv:2205.14135): q, k, v, and a float32 number for each query of a head; the output is the input of
  the next product. Unfused: the probabilities in place of these numbers. With context parallelism k and v are those of
  the whole sequence, gathered.
- SwiGLU: gate and up; their product is the input of the next product.
- Experts (with evenly distributed tokens): the router's probabilities in float32, as many numbers for the gradient of
  the router's losses (on the first TP rank), the tokens as sent to experts, and the output for each, which the router's
  gradient needs. Latent attention: queries, keys and values per head.
- Dropout: a byte for each element of its mask. Flash attention stores none and draws it again; unfused attention also
  stores the dropped probabilities.
- Cross-entropy: the logits in float32 and, while I runs, their gradient.
- Several residual streams: see ``residual_streams``.
- Multi-token prediction: the input of each norm of a module and of the product that joins them. Embedding, final norm
  and head store the same for each MTP stream. Streams that only pass through a stage store nothing.
- Sequence parallelism shards the inputs of norms over TP. The gathered inputs of products are stored whole, because W
  has no collectives, unless the plan gathers them again.

Recomputation: ``selective`` stores nothing for the core of attention, ``full`` only the input of a block. Both hold the
rest of one block while I runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.model_parts import MlaSpec, MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.balance import router_losses
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.dropout import MASK_BYTES, DropoutSite, dropout_sites
from pipeproof.stages.describe.layers import Layer, is_empty, layer_kind
from pipeproof.stages.describe.mtp_streams import embeds_again, mtp_streams_at, mtp_streams_into
from pipeproof.stages.describe.residual_streams import BlockStreams, residual_streams_of, stored_around
from pipeproof.stages.describe.training_state import FLOAT32, memory_dtype

TOKEN_ID = 8
"""Bytes of a token id."""

_CORE = "attn.core"
_ZERO = Fraction(0)


class Lifetime(StrEnum):
    """The time during which an activation is stored; a whole backward is I and W."""

    TO_INPUT = "from F to the end of I"
    TO_WEIGHT = "from F to the end of W"
    IN_INPUT = "while I runs"
    BETWEEN = "from the end of I to that of W"

    @property
    def is_from_forward(self) -> bool:
        """True if it is stored from the start of F on."""
        return self in (Lifetime.TO_INPUT, Lifetime.TO_WEIGHT)


@dataclass(frozen=True, slots=True)
class StoredActivation:
    """Bytes that one operation of a stage stores for one work item."""

    name: str
    lifetime: Lifetime
    num_bytes: Fraction

    @property
    def is_logits(self) -> bool:
        """True if it belongs to the loss and not to the layers."""
        return self.name == "head.loss"


def is_flash(plan: PlanSpec) -> bool:
    """True if attention stores no probabilities."""
    analytic = plan.cost.analytic
    return (plan.memory.attention or (analytic.attention if analytic is not None else "flash")) == "flash"


def stored_activations(plan: PlanSpec, layers: Sequence[Layer], size: MicroBatchSize) -> tuple[StoredActivation, ...]:
    """Activations that a stage of these layers stores for a work item of ``size``, added up per operation name."""
    total: dict[tuple[str, Lifetime], Fraction] = {}
    recomputed: dict[tuple[str, Lifetime], Fraction] = {}
    for layer in layers:
        stored, in_backward = _Rank(plan, size.with_mtp_streams(mtp_streams_at(plan.model, layer.name))).of(layer)
        for held in stored:
            total[held.name, held.lifetime] = total.get((held.name, held.lifetime), _ZERO) + held.num_bytes
        for held in in_backward:  # one block after the other
            key = held.name, Lifetime.IN_INPUT
            recomputed[key] = max(recomputed.get(key, _ZERO), held.num_bytes)
    for key, num_bytes in recomputed.items():
        total[key] = total.get(key, _ZERO) + num_bytes
    return tuple(
        StoredActivation(name, lifetime, num_bytes) for (name, lifetime), num_bytes in total.items() if num_bytes
    )


def keeps_input(plan: PlanSpec, layers: Sequence[Layer]) -> bool:
    """True if the first layer of a stage stores the stage's input itself.

    False if the layer gathers or widens it, takes one of several MTP streams, or takes token ids.
    """
    if plan.custom_layers is not None:
        return True
    first = next((layer.name for layer in layers if not is_empty(layer.name)), "embed")
    is_gathered = (
        plan.topology.sequence_parallel and plan.topology.tp > 1 and plan.memory.sequence_parallel_activations == "keep"
    )
    streams = residual_streams_of(plan.model, first)
    is_widened = streams is not None and streams.expands and plan.memory.recompute != "full"
    has_mtp_streams = mtp_streams_into(plan.model, first) > 1
    return first != "embed" and not (first == "head" and is_gathered) and not is_widened and not has_mtp_streams


class _Rank:
    """Sizes on one rank: ``tokens`` inside of layers, ``between`` where sequence parallelism shards them."""

    def __init__(self, plan: PlanSpec, size: MicroBatchSize) -> None:
        model, topology, num_splits = plan.model, plan.topology, plan.schedule.num_sequence_splits
        self.model, self.hidden, self.tp = model, model.hidden_size, topology.tp
        self.item, self.flash = dtype_bytes(memory_dtype(plan)), is_flash(plan)
        self.recompute, self.dropped = plan.memory.recompute, dropout_sites(plan)
        self.regathers = plan.memory.sequence_parallel_activations == "regather"
        self.num_heads = model.num_heads // topology.tp
        self.tokens = Fraction(size.num_tokens, topology.cp)
        self.between = self.tokens / topology.tp if topology.sequence_parallel else self.tokens
        self.keys = Fraction(size.num_tokens)
        keys_of_row = Fraction(
            size.seq_length * (num_splits + 1), 2
        )  # on average a split sees half of the other splits
        self.pairs = size.num_rows * size.seq_length * keys_of_row / topology.cp

    def of(self, layer: Layer) -> tuple[list[StoredActivation], list[StoredActivation]]:
        """(Stored from F on, or after I; stored for one block at a time while I recomputes it)."""
        match layer_kind(self.model, layer.name):
            case "embed":
                mask = self._mask("embed.dropout", "embedding")
                return [*self._product("embed", 1, self.hidden, item=TOKEN_ID), *mask], []
            case "empty":
                return [], []
            case "norm":
                return [*self._norm("norm", self.hidden)], []
            case "head":
                return [*self._head()], []
            case "mtp":
                has_experts = self.model.has_experts(self.model.num_layers - 1)
                everything = [*self._mtp_inputs(), *self._block(None, has_experts=has_experts)]
                return self._of_block(everything, num_inputs=1 if embeds_again(self.model) else 2)
            case kind:
                streams = residual_streams_of(self.model, layer.name)
                everything = [*self._block(streams, has_experts=kind.endswith("moe_block"))]
                if (
                    self.recompute == "full" and streams is not None and streams.expands
                ):  # it makes all streams from one
                    everything.insert(0, self._for_input("streams.open", self.between * self.hidden))
                return self._of_block(everything)

    def _of_block(
        self, everything: list[StoredActivation], num_inputs: int = 1
    ) -> tuple[list[StoredActivation], list[StoredActivation]]:
        """Divide the activations of a block into stored and recomputed ones; its inputs come first."""
        if self.recompute == "none":
            return everything, []
        if self.recompute == "selective":
            core = [held for held in everything if held.name == _CORE]
            return [held for held in everything if held.name != _CORE], core
        inputs, others = everything[:num_inputs], everything[num_inputs:]
        computed = [held for held in others if held.lifetime.is_from_forward]
        for_w = [replace(held, lifetime=Lifetime.BETWEEN) for held in others if held.lifetime is not Lifetime.TO_INPUT]
        return [*inputs, *for_w], computed

    def _mtp_inputs(self) -> Iterator[StoredActivation]:
        """Activations of an MTP module before its block; its inputs come first."""
        hidden, *hidden_norm = self._norm("hidden_norm", self.hidden)
        embedding, *embed_norm = self._norm("embed_norm", self.hidden)
        yield from (hidden, embedding, *hidden_norm, *embed_norm)
        if embeds_again(self.model):
            yield from self._product("embed", 1, self.hidden, item=TOKEN_ID)
        yield from self._product("proj", 2 * self.hidden, self.hidden, rows=self.between)

    def _block(self, streams: BlockStreams | None, *, has_experts: bool) -> Iterator[StoredActivation]:
        model = self.model
        yield from self._around("attn", streams)
        yield from self._norm("attn_norm", self.hidden)
        yield from self._attention() if model.mla is None else self._latent(model.mla)
        scores = self.pairs * self.num_heads
        core = FLOAT32 * self.tokens * self.num_heads if self.flash else self.item * scores
        if "attention" in self.dropped and not self.flash:
            core += (self.item + MASK_BYTES) * scores
        yield StoredActivation(_CORE, Lifetime.TO_INPUT, core)
        value_size = model.size_of_head if model.mla is None else model.mla.value_head_size
        yield from self._product("attn.out", self.num_heads * value_size, self.hidden)
        yield from self._mask("attn.dropout", "hidden")
        yield from self._around("mlp", streams)
        yield from self._norm("mlp_norm", self.hidden)
        if has_experts and model.moe is not None:
            yield from self._experts(model.moe)
        else:
            local_ffn = model.ffn_size // self.tp
            yield from self._entered("mlp.gate_up", self.hidden, 2 * local_ffn)
            yield from self._swiglu("mlp", local_ffn, self.tokens)
        yield from self._mask("mlp.dropout", "hidden")

    def _around(self, name: str, streams: BlockStreams | None) -> Iterator[StoredActivation]:
        """Activations of several residual streams for a sub-layer; a single residual stores nothing."""
        for stored in () if streams is None else stored_around(streams, self.hidden, name):
            item = FLOAT32 if stored.is_float32 else self.item
            yield StoredActivation(stored.name, Lifetime[stored.lifetime], item * self.between * stored.numel)

    def _mask(self, name: str, place: DropoutSite) -> Iterator[StoredActivation]:
        """The mask of dropout between layers."""
        if place in self.dropped:
            yield StoredActivation(name, Lifetime.TO_INPUT, MASK_BYTES * self.between * self.hidden)

    def _attention(self) -> Iterator[StoredActivation]:
        head = self.model.size_of_head
        query, key_value = self.num_heads * head, 2 * (self.model.kv_heads // self.tp) * head
        yield from self._entered("attn.qkv", self.hidden, query + key_value)
        yield self._for_input("attn.qkv_out", self.tokens * query + self.keys * key_value)

    def _latent(self, mla: MlaSpec) -> Iterator[StoredActivation]:
        """Queries and keys with both of their parts, per head; both compressions read one tensor."""
        head, compressed = mla.nope_head_size + mla.rope_head_size, mla.kv_rank + mla.rope_head_size
        if mla.q_rank is None:
            yield from self._entered("attn.q", self.hidden, self.num_heads * head)
            is_gathered = self.between != self.tokens and not self.regathers
            inner = self.hidden if is_gathered else 0  # otherwise the queries store it
        else:
            yield from self._product("attn.q_down", self.hidden, mla.q_rank, rows=self.between)
            yield from self._norm("attn.q_norm", mla.q_rank)
            yield from self._entered("attn.q_up", mla.q_rank, self.num_heads * head)
            inner = 0
        yield from self._product("attn.kv_down", inner, compressed, rows=self.between)
        yield from self._norm("attn.kv_norm", mla.kv_rank)
        yield from self._entered("attn.kv_up", mla.kv_rank, self.num_heads * (mla.nope_head_size + mla.value_head_size))
        key_value = self.num_heads * (head + mla.value_head_size)
        yield self._for_input("attn.qkv_out", self.tokens * self.num_heads * head + self.keys * key_value)

    def _experts(self, moe: MoeSpec) -> Iterator[StoredActivation]:
        """Experts with the mean number of tokens of a rank; router and shared experts read one tensor."""
        visits, local_ffn = moe.top_k * self.tokens, moe.ffn_size // self.tp
        yield from self._entered("mlp.router", self.hidden, moe.num_experts)
        yield StoredActivation("mlp.scores", Lifetime.TO_INPUT, FLOAT32 * self.tokens * moe.num_experts)
        if router_losses(moe):
            yield StoredActivation("mlp.balance", Lifetime.TO_INPUT, FLOAT32 * self.tokens * moe.num_experts)
        sent = None if moe.dispatch_dtype is None else dtype_bytes(moe.dispatch_dtype)
        yield from self._product("mlp.experts.gate_up", self.hidden, 2 * local_ffn, rows=visits, item=sent)
        yield from self._swiglu("mlp.experts", local_ffn, visits)
        yield self._for_input("mlp.unpermute", visits * self.hidden)
        if moe.num_shared_experts:
            shared_ffn = moe.num_shared_experts * local_ffn
            yield from self._product("mlp.shared.gate_up", 0, 2 * shared_ffn)
            yield from self._swiglu("mlp.shared", shared_ffn, self.tokens)

    def _swiglu(self, name: str, local_ffn: int, rows: Fraction) -> Iterator[StoredActivation]:
        """Gate and up, and the input of the last product."""
        yield self._for_input(f"{name}.swiglu", 2 * rows * local_ffn)
        yield from self._product(f"{name}.down", local_ffn, self.hidden, rows=rows)

    def _head(self) -> Iterator[StoredActivation]:
        local_vocab = self.model.vocab_size // self.tp
        yield from self._entered("head", self.hidden, local_vocab)
        logits = FLOAT32 * self.tokens * local_vocab
        yield StoredActivation("head.loss", Lifetime.TO_INPUT, logits + TOKEN_ID * self.tokens)  # with the labels
        yield StoredActivation("head.loss", Lifetime.IN_INPUT, logits)

    def _for_input(self, name: str, numel: Fraction) -> StoredActivation:
        """An activation that only I reads."""
        return StoredActivation(name, Lifetime.TO_INPUT, self.item * numel)

    def _norm(self, name: str, size: int) -> Iterator[StoredActivation]:
        """Activations of a norm, its input first: that of a block is the block's input."""
        yield StoredActivation(name, Lifetime.TO_WEIGHT, self.item * self.between * size)
        yield StoredActivation(f"{name}.factor", Lifetime.TO_WEIGHT, FLOAT32 * self.between)
        yield StoredActivation(f"{name}.grad", Lifetime.BETWEEN, self.item * self.between * size)

    def _entered(self, name: str, inner: int, columns: int) -> Iterator[StoredActivation]:
        """A product of a gathered input: stored gathered, or as the rank's own tokens."""
        stored = self.between if self.regathers else self.tokens
        yield StoredActivation(name, Lifetime.TO_WEIGHT, self.item * stored * inner)
        yield StoredActivation(f"{name}.grad", Lifetime.BETWEEN, self.item * self.tokens * columns)

    def _product(
        self, name: str, inner: int, columns: int, *, rows: Fraction | None = None, item: int | None = None
    ) -> Iterator[StoredActivation]:
        """A product of this rank's tokens, or of ``rows``, with a weight; ``inner`` is 0 for a shared input."""
        rows = self.tokens if rows is None else rows
        yield StoredActivation(name, Lifetime.TO_WEIGHT, (self.item if item is None else item) * rows * inner)
        yield StoredActivation(f"{name}.grad", Lifetime.BETWEEN, self.item * rows * columns)
