"""What a stage keeps of a micro-batch on one rank, in bytes.

That is what backward needs, operation by operation, named as in
``work``. A product keeps its input, until W has made the weight's gradient;
all else keeps what its own backward reads, until I. Where W runs apart from I,
it also needs the gradients of products' and norms' outputs, from I's end on.

- RMSNorm: its input, and the factor of each token in float32.
- Rotary embedding: nothing of a micro-batch, for its tables are shared.
- Flash attention (arXiv:2205.14135): q, k, v, and a float32 number for each
  query of a head; the output is the input of the next product. Unfused: the
  probabilities in place of these numbers. Under context parallelism k and v
  are those of the whole sequence, gathered.
- SwiGLU: gate and up; their product is the input of the next product.
- Experts (tokens shared out evenly): the router's probabilities in float32, and
  as many numbers for the gradient of the router's own losses (on the first TP
  rank), the tokens as they were sent to experts, and what came of each, which
  the router's gradient needs. Latent attention: queries, keys and values as
  heads see them.
- Dropout: a byte for each element of its mask. Flash attention keeps none and
  draws it again; unfused, also the probabilities that are left.
- Cross-entropy: the logits in float32, and, while I runs, their gradient.
- Residual streams, where there are several: ``stream_costs``.
- Multi-token prediction: each norm of a module its input, and the product that
  joins them both; embedding, last norm and head keep of each lane what they keep
  of one. Lanes on their way through a stage keep nothing.
- Sequence parallelism cuts the inputs of norms over TP. The gathered inputs of
  products are kept whole, for W has no collectives, unless the plan says that
  they are gathered again.

``selective`` leaves out what only the core of attention keeps, ``full`` all
of a block but its input; both hold one block's worth of it while I runs.
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
from pipeproof.stages.describe.dropout import MASK_BYTES, DropoutPlace, dropped_places
from pipeproof.stages.describe.lanes import embeds_again, lanes_at, lanes_into
from pipeproof.stages.describe.layers import Layer, layer_kind
from pipeproof.stages.describe.order import is_empty
from pipeproof.stages.describe.state import FLOAT32, memory_dtype
from pipeproof.stages.describe.stream_costs import held_around
from pipeproof.stages.describe.streams import BlockStreams, streams_of

TOKEN_ID = 8
"""Bytes of a token's id."""

_CORE = "attn.core"
_ZERO = Fraction(0)


class Life(StrEnum):
    """From when until when something of a micro-batch is held; a whole backward is I and W."""

    TO_INPUT = "from F to the end of I"
    TO_WEIGHT = "from F to the end of W"
    IN_INPUT = "while I runs"
    BETWEEN = "from the end of I to that of W"

    @property
    def is_from_forward(self) -> bool:
        """Whether it is held from F's start on."""
        return self in (Life.TO_INPUT, Life.TO_WEIGHT)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that one operation of a stage holds for one unit of work."""

    name: str
    life: Life
    num_bytes: Fraction

    @property
    def is_logits(self) -> bool:
        """Whether it belongs to the loss, rather than to the layers."""
        return self.name == "head.loss"


def is_flash(plan: PlanSpec) -> bool:
    """Whether attention is of the kind that stores no probabilities."""
    analytic = plan.cost.analytic
    return (plan.memory.attention or (analytic.attention if analytic is not None else "flash")) == "flash"


def activations_of(plan: PlanSpec, layers: Sequence[Layer], size: MicroBatchSize) -> tuple[Held, ...]:
    """What a stage of these layers holds for a unit of work of ``size``, equal operations of its blocks together."""
    total: dict[tuple[str, Life], Fraction] = {}
    again: dict[tuple[str, Life], Fraction] = {}
    for layer in layers:
        kept, once_more = _Rank(plan, size.of_lanes(lanes_at(plan.model, layer.name))).of(layer)
        for held in kept:
            total[held.name, held.life] = total.get((held.name, held.life), _ZERO) + held.num_bytes
        for held in once_more:  # one block after the other
            again[held.name, Life.IN_INPUT] = max(again.get((held.name, Life.IN_INPUT), _ZERO), held.num_bytes)
    for key, num_bytes in again.items():
        total[key] = total.get(key, _ZERO) + num_bytes
    return tuple(Held(name, life, num_bytes) for (name, life), num_bytes in total.items() if num_bytes)


def keeps_input(plan: PlanSpec, layers: Sequence[Layer]) -> bool:
    """Whether what a stage is given is itself what its first layer keeps.

    Not where that gathers or widens it, takes one lane of several, or takes ids.
    """
    if plan.own_layers is not None:
        return True
    first = next((layer.name for layer in layers if not is_empty(layer.name)), "embed")
    is_gathered = plan.topology.sequence_parallel and plan.topology.tp > 1 and plan.memory.gathered == "kept"
    streams = streams_of(plan.model, first)
    is_widened = streams is not None and streams.expands and plan.memory.recompute != "full"
    has_lanes = lanes_into(plan.model, first) > 1
    return first != "embed" and not (first == "head" and is_gathered) and not is_widened and not has_lanes


class _Rank:
    """Sizes of one rank: ``tokens`` inside of layers, ``between`` where sequence parallelism cuts them."""

    def __init__(self, plan: PlanSpec, size: MicroBatchSize) -> None:
        model, topology, num_splits = plan.model, plan.topology, plan.schedule.num_sequence_splits
        self.model, self.hidden, self.tp = model, model.hidden_size, topology.tp
        self.item, self.flash = dtype_bytes(memory_dtype(plan)), is_flash(plan)
        self.recompute, self.dropped = plan.memory.recompute, dropped_places(plan)
        self.gathers_again = plan.memory.gathered == "again"
        self.num_heads = model.num_heads // topology.tp
        self.tokens = Fraction(size.num_tokens, topology.cp)
        self.between = self.tokens / topology.tp if topology.sequence_parallel else self.tokens
        self.keys = Fraction(size.num_tokens)
        keys_of_row = Fraction(size.seq_length * (num_splits + 1), 2)  # the mean split sees half of what others leave
        self.pairs = size.num_rows * size.seq_length * keys_of_row / topology.cp

    def of(self, layer: Layer) -> tuple[list[Held], list[Held]]:
        """(what is kept from F on, or after I; what one block at a time holds while I computes it once more)."""
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
                everything = [*self._joined(), *self._block(None, has_experts=has_experts)]
                return self._of_block(everything, num_inputs=1 if embeds_again(self.model) else 2)
            case kind:
                streams = streams_of(self.model, layer.name)
                everything = [*self._block(streams, has_experts=kind.endswith("moe_block"))]
                if self.recompute == "full" and streams is not None and streams.expands:  # of one stream it makes all
                    everything.insert(0, self._given("streams.open", self.between * self.hidden))
                return self._of_block(everything)

    def _of_block(self, everything: list[Held], num_inputs: int = 1) -> tuple[list[Held], list[Held]]:
        """What is kept, and computed once more, of what a block keeps; its inputs come first."""
        if self.recompute == "none":
            return everything, []
        if self.recompute == "selective":
            core = [held for held in everything if held.name == _CORE]
            return [held for held in everything if held.name != _CORE], core
        inputs, others = everything[:num_inputs], everything[num_inputs:]
        computed = [held for held in others if held.life.is_from_forward]
        for_w = [replace(held, life=Life.BETWEEN) for held in others if held.life is not Life.TO_INPUT]
        return [*inputs, *for_w], computed

    def _joined(self) -> Iterator[Held]:
        """What a module of multi-token prediction keeps before its block; its inputs come first."""
        hidden, *of_hidden = self._norm("hidden_norm", self.hidden)
        embedding, *of_embedding = self._norm("embed_norm", self.hidden)
        yield from (hidden, embedding, *of_hidden, *of_embedding)
        if embeds_again(self.model):
            yield from self._product("embed", 1, self.hidden, item=TOKEN_ID)
        yield from self._product("proj", 2 * self.hidden, self.hidden, rows=self.between)

    def _block(self, streams: BlockStreams | None, *, has_experts: bool) -> Iterator[Held]:
        model = self.model
        yield from self._around("attn", streams)
        yield from self._norm("attn_norm", self.hidden)
        yield from self._attention() if model.mla is None else self._latent(model.mla)
        scores = self.pairs * self.num_heads
        core = FLOAT32 * self.tokens * self.num_heads if self.flash else self.item * scores
        if "attention" in self.dropped and not self.flash:
            core += (self.item + MASK_BYTES) * scores
        yield Held(_CORE, Life.TO_INPUT, core)
        value_size = model.size_of_head if model.mla is None else model.mla.value_head_size
        yield from self._product("attn.out", self.num_heads * value_size, self.hidden)
        yield from self._mask("attn.dropout", "hidden")
        yield from self._around("mlp", streams)
        yield from self._norm("mlp_norm", self.hidden)
        if has_experts and model.moe is not None:
            yield from self._experts(model.moe)
        else:
            own_ffn = model.ffn_size // self.tp
            yield from self._entered("mlp.gate_up", self.hidden, 2 * own_ffn)
            yield from self._swiglu("mlp", own_ffn, self.tokens)
        yield from self._mask("mlp.dropout", "hidden")

    def _around(self, name: str, streams: BlockStreams | None) -> Iterator[Held]:
        """What several residual streams keep for a sub-layer; one keeps nothing of its own."""
        for one in () if streams is None else held_around(streams, self.hidden, name):
            item = FLOAT32 if one.is_float32 else self.item
            yield Held(one.name, Life[one.life], item * self.between * one.numel)

    def _mask(self, name: str, place: DropoutPlace) -> Iterator[Held]:
        """Dropout of what lies between layers."""
        if place in self.dropped:
            yield Held(name, Life.TO_INPUT, MASK_BYTES * self.between * self.hidden)

    def _attention(self) -> Iterator[Held]:
        head = self.model.size_of_head
        query, key_value = self.num_heads * head, 2 * (self.model.kv_heads // self.tp) * head
        yield from self._entered("attn.qkv", self.hidden, query + key_value)
        yield self._given("attn.qkv_out", self.tokens * query + self.keys * key_value)

    def _latent(self, mla: MlaSpec) -> Iterator[Held]:
        """Queries and keys with both of their parts, head by head; both compressions read one tensor."""
        head, compressed = mla.nope_head_size + mla.rope_head_size, mla.kv_rank + mla.rope_head_size
        if mla.q_rank is None:
            yield from self._entered("attn.q", self.hidden, self.num_heads * head)
            is_gathered = self.between != self.tokens and not self.gathers_again
            inner = self.hidden if is_gathered else 0  # if not, it is what the queries keep
        else:
            yield from self._product("attn.q_down", self.hidden, mla.q_rank, rows=self.between)
            yield from self._norm("attn.q_norm", mla.q_rank)
            yield from self._entered("attn.q_up", mla.q_rank, self.num_heads * head)
            inner = 0
        yield from self._product("attn.kv_down", inner, compressed, rows=self.between)
        yield from self._norm("attn.kv_norm", mla.kv_rank)
        yield from self._entered("attn.kv_up", mla.kv_rank, self.num_heads * (mla.nope_head_size + mla.value_head_size))
        of_key = self.num_heads * (head + mla.value_head_size)
        yield self._given("attn.qkv_out", self.tokens * self.num_heads * head + self.keys * of_key)

    def _experts(self, moe: MoeSpec) -> Iterator[Held]:
        """Experts with the tokens that the mean rank gets; router and shared experts read one tensor."""
        visits, own_ffn = moe.top_k * self.tokens, moe.ffn_size // self.tp
        yield from self._entered("mlp.router", self.hidden, moe.num_experts)
        yield Held("mlp.scores", Life.TO_INPUT, FLOAT32 * self.tokens * moe.num_experts)
        if router_losses(moe):
            yield Held("mlp.balance", Life.TO_INPUT, FLOAT32 * self.tokens * moe.num_experts)
        sent = None if moe.dispatch_dtype is None else dtype_bytes(moe.dispatch_dtype)
        yield from self._product("mlp.experts.gate_up", self.hidden, 2 * own_ffn, rows=visits, item=sent)
        yield from self._swiglu("mlp.experts", own_ffn, visits)
        yield self._given("mlp.unpermute", visits * self.hidden)
        if moe.num_shared_experts:
            shared_ffn = moe.num_shared_experts * own_ffn
            yield from self._product("mlp.shared.gate_up", 0, 2 * shared_ffn)
            yield from self._swiglu("mlp.shared", shared_ffn, self.tokens)

    def _swiglu(self, name: str, own_ffn: int, rows: Fraction) -> Iterator[Held]:
        """From gate and up to the last product."""
        yield self._given(f"{name}.swiglu", 2 * rows * own_ffn)
        yield from self._product(f"{name}.down", own_ffn, self.hidden, rows=rows)

    def _head(self) -> Iterator[Held]:
        own_vocab = self.model.vocab_size // self.tp
        yield from self._entered("head", self.hidden, own_vocab)
        logits = FLOAT32 * self.tokens * own_vocab
        yield Held("head.loss", Life.TO_INPUT, logits + TOKEN_ID * self.tokens)  # with the tokens to predict
        yield Held("head.loss", Life.IN_INPUT, logits)

    def _given(self, name: str, numel: Fraction) -> Held:
        """What only I reads."""
        return Held(name, Life.TO_INPUT, self.item * numel)

    def _norm(self, name: str, size: int) -> Iterator[Held]:
        """Its input comes first: that of a block is its own."""
        yield Held(name, Life.TO_WEIGHT, self.item * self.between * size)
        yield Held(f"{name}.factor", Life.TO_WEIGHT, FLOAT32 * self.between)
        yield Held(f"{name}.grad", Life.BETWEEN, self.item * self.between * size)

    def _entered(self, name: str, inner: int, columns: int) -> Iterator[Held]:
        """A product with what sequence parallelism gathers: kept so, or as the rank's own tokens."""
        kept = self.between if self.gathers_again else self.tokens
        yield Held(name, Life.TO_WEIGHT, self.item * kept * inner)
        yield Held(f"{name}.grad", Life.BETWEEN, self.item * self.tokens * columns)

    def _product(
        self, name: str, inner: int, columns: int, *, rows: Fraction | None = None, item: int | None = None
    ) -> Iterator[Held]:
        """A product of this rank's tokens, or of ``rows``, with a weight; ``inner`` is 0 where its input is there."""
        rows = self.tokens if rows is None else rows
        yield Held(name, Life.TO_WEIGHT, (self.item if item is None else item) * rows * inner)
        yield Held(f"{name}.grad", Life.BETWEEN, self.item * rows * columns)
