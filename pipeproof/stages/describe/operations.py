"""FLOPs and bytes of single operations on one rank, for F, I and W: what layers are put together from in ``work``.

A matrix product of [r, i] and [i, c] is 2 r i c FLOPs in F, in I and in W each
(every product has two gradients, each of them a product of the same size).
Bytes count each operand and each result once: what is read again comes from
caches. Gradients of weights are read, added to and written in float32.

Attention over one (query, key) pair is 4 FLOPs per element of a head: a
multiplication and an addition in each of two products. ``flash``
(arXiv:2205.14135) computes the pairs up to the diagonal; its backward does
five such products where the forward does two, the scores once more among
them; dropout is part of it. ``unfused`` computes all pairs, masks half of
them, and stores scores and probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.dropout import MASK_BYTES, DropoutPlace, dropped_places
from pipeproof.stages.describe.stream_costs import StreamPass, StreamProduct

WEIGHT_GRADIENT_BYTES = 4
"""Of an element of a weight's gradient."""

SOFTMAX, SOFTMAX_BACK = 5, 4
_NORM, _NORM_BACK, _ROTARY = 4, 8, 3
"""FLOPs per element of what is no product: an addition, multiplication, division or exponential counts as one."""

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


class RankOperations:
    """Operations of the sizes of one rank: ``tokens`` inside of layers, ``between`` where sequences are cut over TP."""

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

    def norm(self, name: str, size: int | None = None) -> tuple[Work, ...]:
        """RMSNorm of what lies between layers, or of a vector of ``size`` for each of its tokens."""
        numel = self.between * (size or self.hidden)
        weight = Work(name, Phase.WEIGHT, Unit.VECTOR, 2 * numel, 2 * self.item * numel)
        return (*self._elementwise(name, numel, (_NORM, 2), (_NORM_BACK, 3)), weight)

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
        works = list(self._elementwise("attn.softmax", scores, (SOFTMAX, 2), (SOFTMAX_BACK, 3)))
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
