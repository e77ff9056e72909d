"""FLOPs and bytes of the GPT's layers on one rank, operation by operation, for F, I and W.

The layers are those of ``describe_gpt``. A matrix product of [r, i] and [i, c]
is 2 r i c FLOPs in F, in I and in W each (every product has two gradients,
each of them a product of the same size). Bytes count each operand and each
result once: what is read again comes from caches. Gradients of weights are
read, added to and written in float32.

- Attention over one (query, key) pair is 4 FLOPs per element of a head: a
  multiplication and an addition in each of two products. ``flash``
  (arXiv:2205.14135) computes the pairs up to the diagonal; its backward does
  five such products where the forward does two, the scores once more among
  them; dropout is part of it. ``unfused`` computes all pairs, masks half of them, and stores scores
  and probabilities.
- Rank for rank, tensor parallelism cuts heads, feed-forward and vocabulary,
  context parallelism tokens, evenly in causal pairs too; sequence parallelism
  cuts norms and additions between blocks (arXiv:2205.05198), and what latent
  attention compresses there.
- Of a token's visits to experts, each rank has its even share: as many as its
  own tokens make. Every expert of the rank is read once for all its tokens.
  Routing is done on every TP rank for all tokens; moving tokens into the order
  of experts, and back, reads and writes each visit.
- Several residual streams, where there are: ``stream_costs``.
- Embedding, last norm and head compute on the lanes of multi-token prediction
  as on so many times the rows.

Shape letters: S sequence, H hidden, A heads, M feed-forward size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.model_parts import MlaSpec, MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.balance import router_losses
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.dropout import MASK_BYTES, DropoutPlace, dropped_places
from pipeproof.stages.describe.lanes import embeds_again, lanes_at
from pipeproof.stages.describe.layers import layer_kind
from pipeproof.stages.describe.stream_costs import StreamPass, StreamProduct, work_around, work_at_ends
from pipeproof.stages.describe.streams import BlockStreams, streams_of

WEIGHT_GRADIENT_BYTES = 4
"""Of an element of a weight's gradient."""

_NORM, _NORM_BACK, _ROTARY, _SWIGLU, _SWIGLU_BACK, _SOFTMAX, _SOFTMAX_BACK = 4, 8, 3, 5, 10, 5, 4
"""FLOPs per element of what is no product: an addition, multiplication, division or exponential counts as one."""
_CLAMPED, _CLAMPED_BACK = 5, 7
"""What the clamped SwiGLU has besides: three comparisons, the 1.702 and the 1."""


ATTENTION_CORE = frozenset({"attn.core", "attn.scores", "attn.softmax", "attn.core_dropout", "attn.mix"})
"""The operations of the core of attention, from q, k and v to what is mixed of the values."""


class Phase(StrEnum):
    """The part of a stage's work that an operation belongs to; a whole backward is I and W."""

    FORWARD = "F"
    INPUT = "I"
    WEIGHT = "W"


class Unit(StrEnum):
    """Which peak an operation is measured against."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    VECTOR = "vector"


@dataclass(frozen=True, slots=True)
class Work:
    """One operation of one rank: FLOPs, and bytes between memory and chip.

    ``narrow`` marks products that mixed-precision training computes in eight
    bits: those with the weights of blocks, but for routers (arXiv:2412.19437,
    section 3.3.1).
    """

    name: str
    phase: Phase
    unit: Unit
    flops: Fraction
    num_bytes: Fraction
    narrow: bool = False


def layer_work(
    plan: PlanSpec, layer: str, size: MicroBatchSize, item_bytes: int, *, flash: bool = True
) -> tuple[Work, ...]:
    """The operations of ``layer`` on one rank for one unit of work of ``size``; any split is the mean one.

    ``layer`` is a name as ``stages`` has it, ``item_bytes`` the size of an
    element of weights and activations.
    """
    rank = _Rank(plan, size.of_lanes(lanes_at(plan.model, layer)), item_bytes, flash=flash)
    match layer_kind(plan.model, layer):
        case "embed":
            return rank.embed()
        case "empty":
            return ()
        case "norm":
            return rank.norm("norm")
        case "head":
            return rank.head()
        case "mtp":
            return rank.module()
        case kind:
            return rank.block(has_experts=kind.endswith("moe_block"), streams=streams_of(plan.model, layer))


@dataclass(frozen=True, slots=True)
class _Heads:
    """Elements of a token that one rank's heads have: queries, keys, values, and what is mixed of these."""

    queries: int
    keys: int
    values: int
    mixed: int


def _own_heads(model: ModelSpec, tp: int) -> _Heads:
    heads, mla = model.num_heads // tp, model.mla
    if mla is not None:
        query = heads * (mla.nope_head_size + mla.rope_head_size)
        return _Heads(query, query, heads * mla.value_head_size, heads * mla.value_head_size)
    queries, keys = heads * model.size_of_head, model.kv_heads // tp * model.size_of_head
    return _Heads(queries, keys, keys, queries)


class _Rank:
    """Sizes of one rank: ``tokens`` inside of layers, ``between`` where sequence parallelism cuts them."""

    def __init__(self, plan: PlanSpec, size: MicroBatchSize, item_bytes: int, *, flash: bool) -> None:
        model, topology, num_splits = plan.model, plan.topology, plan.schedule.num_sequence_splits
        tp = topology.tp
        self.model, self.item, self.flash, self.dropped = model, item_bytes, flash, dropped_places(plan)
        self.hidden = model.hidden_size
        self.heads, self.num_heads = _own_heads(model, tp), model.num_heads // tp
        self.own_vocab = model.vocab_size // tp
        self.tokens = Fraction(size.num_tokens, topology.cp)
        self.between = self.tokens / tp if topology.sequence_parallel else self.tokens
        self.tp, self.ep = tp, topology.ep
        whole = size.seq_length * num_splits
        keys_of_row = Fraction(size.seq_length * (num_splits + 1), 2)  # the mean split sees half of what others leave
        pairs_of_row = Fraction(whole * (whole + 1), 2 * num_splits) if flash else size.seq_length * keys_of_row
        self.keys = size.num_rows * keys_of_row
        self.pairs = size.num_rows * pairs_of_row / topology.cp

    def module(self) -> tuple[Work, ...]:
        """Multi-token prediction: a lane and an embedding normed, put side by side and joined, and a block.

        The lane has another reader: going back, two gradients are added.
        """
        model, numel = self.model, self.between * self.hidden
        return (
            *(self.embed() if embeds_again(model) else ()),
            *self.norm("hidden_norm"),
            *self.norm("embed_norm"),
            *self._elementwise("join", 2 * numel, (0, 2), (0, 2)),
            *self._matmul("proj", 2 * self.hidden, self.hidden, rows=self.between),
            Work("lane.add", Phase.INPUT, Unit.VECTOR, numel, 3 * self.item * numel),
            *self.block(has_experts=model.has_experts(model.num_layers - 1)),
        )

    def block(self, *, has_experts: bool, streams: BlockStreams | None = None) -> tuple[Work, ...]:
        model = self.model
        return (
            *self.norm("attn_norm"),
            *(self._attention() if model.mla is None else self._latent(model.mla)),
            *(self._flash() if self.flash else self._unfused()),
            *self._matmul("attn.out", self.heads.mixed, self.hidden),
            *self._dropout("attn.dropout", "hidden"),
            *self._residual("attn", streams),
            *self.norm("mlp_norm"),
            *(
                self._experts(model.moe)
                if has_experts and model.moe is not None
                else self._swiglu("mlp", model.ffn_size // self.tp)
            ),
            *self._dropout("mlp.dropout", "hidden"),
            *self._residual("mlp", streams),
            *(self._passes(work_at_ends(streams, self.hidden)) if streams is not None else ()),
        )

    def _attention(self) -> tuple[Work, ...]:
        heads = self.heads
        return (
            *self._matmul("attn.qkv", self.hidden, heads.queries + heads.keys + heads.values),
            *self._rotary(heads.queries + heads.keys),
        )

    def _latent(self, mla: MlaSpec) -> tuple[Work, ...]:
        """Queries, keys and values from compressed vectors; the key of positions once for all heads."""
        expanded = self.num_heads * (mla.nope_head_size + mla.value_head_size)
        if mla.q_rank is None:
            query = self._matmul("attn.q", self.hidden, self.heads.queries)
        else:
            query = (
                *self._matmul("attn.q_down", self.hidden, mla.q_rank, rows=self.between),
                *self.norm("attn.q_norm", mla.q_rank),
                *self._matmul("attn.q_up", mla.q_rank, self.heads.queries),
            )
        return (
            *query,
            *self._matmul("attn.kv_down", self.hidden, mla.kv_rank + mla.rope_head_size, rows=self.between),
            *self.norm("attn.kv_norm", mla.kv_rank),
            *self._matmul("attn.kv_up", mla.kv_rank, expanded),
            *self._rotary((self.num_heads + 1) * mla.rope_head_size),
        )

    def _swiglu(self, name: str, own_ffn: int, *, rows: Fraction | None = None, experts: int = 1) -> tuple[Work, ...]:
        """A SwiGLU MLP, or several of them that share out the rows."""
        rows = self.tokens if rows is None else rows
        more, more_back = (0, 0) if self.model.swiglu_limit is None else (_CLAMPED, _CLAMPED_BACK)
        return (
            *self._matmul(f"{name}.gate_up", self.hidden, 2 * own_ffn, rows=rows, weights=experts),
            *self._elementwise(f"{name}.swiglu", rows * own_ffn, (_SWIGLU + more, 3), (_SWIGLU_BACK + more_back, 5)),
            *self._matmul(f"{name}.down", own_ffn, self.hidden, rows=rows, weights=experts),
        )

    def _experts(self, moe: MoeSpec) -> tuple[Work, ...]:
        own_ffn, visits = moe.ffn_size // self.tp, moe.top_k * self.tokens
        works = [
            *self._matmul("mlp.router", self.hidden, moe.num_experts, narrow=False),
            *self._elementwise("mlp.scores", self.tokens * moe.num_experts, (_SOFTMAX, 2), (_SOFTMAX_BACK, 3)),
            *self._balance(moe),
            *self._elementwise("mlp.permute", visits * self.hidden, (0, 2), (1, 2)),
            *self._swiglu("mlp.experts", own_ffn, rows=visits, experts=moe.num_experts // self.ep),
            *self._elementwise("mlp.unpermute", visits * self.hidden, (2, 2), (2, 3)),
        ]
        if moe.num_shared_experts:
            works += self._swiglu("mlp.shared", moe.num_shared_experts * own_ffn)
            works += self._elementwise("mlp.shared.add", self.tokens * self.hidden, (1, 3), (1, 3))
        return tuple(works)

    def _balance(self, moe: MoeSpec) -> tuple[Work, ...]:
        """Losses of the router, with their gradient at once; the way back only adds it."""
        num = len(router_losses(moe))
        forward = num * (_SOFTMAX + _SOFTMAX_BACK), num * (2 + 3)
        return self._elementwise("mlp.balance", self.tokens * moe.num_experts, forward, (1, 3)) if num else ()

    def embed(self) -> tuple[Work, ...]:
        rows = self.tokens * self.hidden
        own = rows / self.tp  # of the tokens whose row this rank has
        gradient = self.item * rows + 2 * WEIGHT_GRADIENT_BYTES * own
        return (
            Work("embed", Phase.FORWARD, Unit.VECTOR, Fraction(0), 2 * self.item * rows),
            Work("embed", Phase.WEIGHT, Unit.VECTOR, own, gradient),
            *self._dropout("embed.dropout", "embedding"),
        )

    def norm(self, name: str, size: int | None = None) -> tuple[Work, ...]:
        numel = self.between * (size or self.hidden)
        weight = Work(name, Phase.WEIGHT, Unit.VECTOR, 2 * numel, 2 * self.item * numel)
        return (*self._elementwise(name, numel, (_NORM, 2), (_NORM_BACK, 3)), weight)

    def head(self) -> tuple[Work, ...]:
        logits = self.tokens * self.own_vocab
        return (
            *self._matmul("head", self.hidden, self.own_vocab, narrow=False),
            *self._elementwise("head.loss", logits, (_SOFTMAX, 2), (2, 2)),  # read for the maximum, and for the sum
        )

    def _matmul(
        self,
        name: str,
        inner: int,
        columns: int,
        *,
        rows: Fraction | None = None,
        weights: int = 1,
        narrow: bool = True,
    ) -> tuple[Work, ...]:
        """A product of this rank's tokens, or of ``rows``, with one of several weights of [inner, columns]."""
        rows = self.tokens if rows is None else rows
        flops = 2 * rows * inner * columns
        activations, weight = self.item * rows * (inner + columns), weights * inner * columns
        through = activations + self.item * weight
        gradient = activations + 2 * WEIGHT_GRADIENT_BYTES * weight
        return (
            Work(name, Phase.FORWARD, Unit.MATMUL, flops, through, narrow),
            Work(name, Phase.INPUT, Unit.MATMUL, flops, through, narrow),
            Work(name, Phase.WEIGHT, Unit.MATMUL, flops, gradient, narrow),
        )

    def _elementwise(
        self, name: str, numel: Fraction, forward: tuple[int, int], backward: tuple[int, int]
    ) -> tuple[Work, ...]:
        """(FLOPs, elements read or written) for each of ``numel``, forward and for the input's gradient."""
        return tuple(
            Work(name, phase, Unit.VECTOR, flops * numel, self.item * moved * numel)
            for phase, (flops, moved) in ((Phase.FORWARD, forward), (Phase.INPUT, backward))
        )

    def _rotary(self, of_token: int) -> tuple[Work, ...]:
        return self._elementwise("attn.rotary", self.tokens * of_token, (_ROTARY, 2), (_ROTARY, 2))

    def _residual(self, name: str, streams: BlockStreams | None) -> tuple[Work, ...]:
        """The sum with what goes around the layer; going back, the sum of both gradients. Or several streams."""
        if streams is None:
            return self._elementwise(f"{name}.add", self.between * self.hidden, (1, 3), (1, 3))
        return self._passes(work_around(streams, self.hidden, name))

    def _passes(self, operations: Iterable[StreamProduct | StreamPass]) -> tuple[Work, ...]:
        works = list[Work]()
        for one in operations:
            if isinstance(one, StreamProduct):
                works += self._matmul(one.name, one.inner, one.columns, rows=self.between, narrow=False)
                continue
            numel, (flops, moved) = self.between * one.numel, one.weight
            works += self._elementwise(one.name, numel, one.forward, one.backward)
            if flops:
                works.append(Work(one.name, Phase.WEIGHT, Unit.VECTOR, flops * numel, self.item * moved * numel))
        return tuple(works)

    def _dropout(self, name: str, place: DropoutPlace, numel: Fraction | None = None) -> tuple[Work, ...]:
        """A multiplication by the mask each way, of what lies between layers or of ``numel``, where the plan has it."""
        if place not in self.dropped:
            return ()
        numel = self.between * self.hidden if numel is None else numel
        moved = (2 * self.item + MASK_BYTES) * numel
        return tuple(Work(name, phase, Unit.VECTOR, numel, moved) for phase in (Phase.FORWARD, Phase.INPUT))

    def _flash(self) -> tuple[Work, ...]:
        heads, size = self.heads, 2 * self.pairs
        scores, mix = size * heads.queries, size * heads.mixed
        moved = self.tokens * (heads.queries + heads.mixed) + self.keys * (heads.keys + heads.values)
        return (  # reads q, k, v and writes o; reads q, k, v, o, do and writes dq, dk, dv
            Work("attn.core", Phase.FORWARD, Unit.ATTENTION, scores + mix, self.item * moved),
            Work("attn.core", Phase.INPUT, Unit.ATTENTION, 3 * scores + 2 * mix, self.item * 2 * moved),
        )

    def _unfused(self) -> tuple[Work, ...]:
        heads, scores = self.heads, self.pairs * self.num_heads
        works = list(self._elementwise("attn.softmax", scores, (_SOFTMAX, 2), (_SOFTMAX_BACK, 3)))
        works += self._dropout("attn.core_dropout", "attention", scores)
        for name, of_token, of_key in (
            ("attn.scores", heads.queries, heads.keys),
            ("attn.mix", heads.mixed, heads.values),
        ):
            product = 2 * self.pairs * of_token
            moved = self.item * (self.tokens * of_token + self.keys * of_key + scores)
            works.append(Work(name, Phase.FORWARD, Unit.MATMUL, product, moved))
            works.append(Work(name, Phase.INPUT, Unit.MATMUL, 2 * product, 2 * moved))
        return tuple(works)
