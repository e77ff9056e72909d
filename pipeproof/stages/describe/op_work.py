"""FLOPs and bytes of single operations on one rank, for F, I and W. ``gpt_work`` combines them to layers.

A matrix product of [r, i] and [i, c] has 2 r i c FLOPs in each of F, I and W (every product has two gradients, and each
of them is a product of the same size). Bytes count each operand and each result once: repeated reads come from caches.
Weight gradients are read, added to and written in float32.

Attention over one (query, key) pair has 4 FLOPs per element of a head: a multiplication and an addition in each of two
products. ``flash`` (arXiv:2205.14135) computes the pairs up to the diagonal. Its backward has five such products where
forward has two, because it recomputes the scores; it includes dropout. ``unfused`` computes all pairs, masks half of
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
from pipeproof.stages.describe.dropout import MASK_BYTES, DropoutSite, dropout_sites
from pipeproof.stages.describe.residual_streams import StreamPass, StreamProduct

WEIGHT_GRADIENT_BYTES = 4
"""Bytes of an element of a weight gradient."""

SOFTMAX, SOFTMAX_BACK = 5, 4
_NORM, _NORM_BACK, _ROTARY = 4, 8, 3
"""FLOPs per element of elementwise operations: an addition, multiplication, division or exponential counts as one."""

ATTENTION_CORE = frozenset({"attn.core", "attn.scores", "attn.softmax", "attn.core_dropout", "attn.mix"})
"""The operations of the core of attention, from q, k and v to the mixed values."""


class Phase(StrEnum):
    """The part of a stage's work: F, I or W. A whole backward is I and W."""

    FORWARD = "F"
    INPUT = "I"
    WEIGHT = "W"


class ComputeUnit(StrEnum):
    """The hardware unit whose peak rate limits an operation."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    VECTOR = "vector"


@dataclass(frozen=True, slots=True)
class Work:
    """One operation of one rank: FLOPs, and bytes between memory and chip.

    ``narrow`` marks products that mixed-precision training computes in eight bits: those with weights of blocks, except
    routers (arXiv:2412.19437, section 3.3.1).
    """

    name: str
    phase: Phase
    unit: ComputeUnit
    flops: Fraction
    num_bytes: Fraction
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class _Heads:
    """Elements per token of one rank's heads: queries, keys, values, and mixed values."""

    queries: int
    keys: int
    values: int
    mixed: int


def _local_heads(model: ModelSpec, tp: int) -> _Heads:
    heads, mla = model.num_heads // tp, model.mla
    if mla is not None:
        query = heads * (mla.nope_head_size + mla.rope_head_size)
        return _Heads(query, query, heads * mla.value_head_size, heads * mla.value_head_size)
    queries, keys = heads * model.size_of_head, model.kv_heads // tp * model.size_of_head
    return _Heads(queries, keys, keys, queries)


class RankOperations:
    """Operations with one rank's sizes: ``tokens`` inside of layers, ``between`` with sequences sharded over TP."""

    def __init__(self, plan: PlanSpec, size: MicroBatchSize, item_bytes: int, *, flash: bool) -> None:
        model, topology, num_splits = plan.model, plan.topology, plan.schedule.num_sequence_splits
        tp = topology.tp
        self.model, self.item, self.flash, self.dropped = model, item_bytes, flash, dropout_sites(plan)
        self.hidden = model.hidden_size
        self.heads, self.num_heads = _local_heads(model, tp), model.num_heads // tp
        self.local_vocab = model.vocab_size // tp
        self.tokens = Fraction(size.num_tokens, topology.cp)
        self.between = self.tokens / tp if topology.sequence_parallel else self.tokens
        self.tp, self.ep = tp, topology.ep
        whole = size.seq_length * num_splits
        keys_of_row = Fraction(
            size.seq_length * (num_splits + 1), 2
        )  # on average a split sees half of the other splits
        pairs_of_row = Fraction(whole * (whole + 1), 2 * num_splits) if flash else size.seq_length * keys_of_row
        self.keys = size.num_rows * keys_of_row
        self.pairs = size.num_rows * pairs_of_row / topology.cp

    def norm(self, name: str, size: int | None = None) -> tuple[Work, ...]:
        """RMSNorm of an activation between layers, or of a vector of ``size`` for each of its tokens."""
        numel = self.between * (size or self.hidden)
        weight = Work(name, Phase.WEIGHT, ComputeUnit.VECTOR, 2 * numel, 2 * self.item * numel)
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
        """A product of this rank's tokens, or of ``rows``, with one of several weights [inner, columns]."""
        rows = self.tokens if rows is None else rows
        flops = 2 * rows * inner * columns
        activations, weight = self.item * rows * (inner + columns), weights * inner * columns
        through = activations + self.item * weight
        gradient = activations + 2 * WEIGHT_GRADIENT_BYTES * weight
        return (
            Work(name, Phase.FORWARD, ComputeUnit.MATMUL, flops, through, narrow),
            Work(name, Phase.INPUT, ComputeUnit.MATMUL, flops, through, narrow),
            Work(name, Phase.WEIGHT, ComputeUnit.MATMUL, flops, gradient, narrow),
        )

    def _elementwise(
        self, name: str, numel: Fraction, forward: tuple[int, int], backward: tuple[int, int]
    ) -> tuple[Work, ...]:
        """An elementwise operation: (FLOPs, elements moved) per element, forward and for the input gradient."""
        return tuple(
            Work(name, phase, ComputeUnit.VECTOR, flops * numel, self.item * moved * numel)
            for phase, (flops, moved) in ((Phase.FORWARD, forward), (Phase.INPUT, backward))
        )

    def _rotary(self, of_token: int) -> tuple[Work, ...]:
        return self._elementwise("attn.rotary", self.tokens * of_token, (_ROTARY, 2), (_ROTARY, 2))

    def _passes(self, operations: Iterable[StreamProduct | StreamPass]) -> tuple[Work, ...]:
        works = list[Work]()
        for op in operations:
            if isinstance(op, StreamProduct):
                works += self._matmul(op.name, op.inner, op.columns, rows=self.between, narrow=False)
                continue
            numel, (flops, moved) = self.between * op.numel, op.weight
            works += self._elementwise(op.name, numel, op.forward, op.backward)
            if flops:
                works.append(Work(op.name, Phase.WEIGHT, ComputeUnit.VECTOR, flops * numel, self.item * moved * numel))
        return tuple(works)

    def _dropout(self, name: str, site: DropoutSite, numel: Fraction | None = None) -> tuple[Work, ...]:
        """Multiplication by the mask, forward and backward, between layers or of ``numel``, if the plan has dropout."""
        if site not in self.dropped:
            return ()
        numel = self.between * self.hidden if numel is None else numel
        moved = (2 * self.item + MASK_BYTES) * numel
        return tuple(Work(name, phase, ComputeUnit.VECTOR, numel, moved) for phase in (Phase.FORWARD, Phase.INPUT))

    def _flash(self) -> tuple[Work, ...]:
        heads, size = self.heads, 2 * self.pairs
        scores, mix = size * heads.queries, size * heads.mixed
        moved = self.tokens * (heads.queries + heads.mixed) + self.keys * (heads.keys + heads.values)
        return (  # reads q, k, v and writes o; reads q, k, v, o, do and writes dq, dk, dv
            Work("attn.core", Phase.FORWARD, ComputeUnit.ATTENTION, scores + mix, self.item * moved),
            Work("attn.core", Phase.INPUT, ComputeUnit.ATTENTION, 3 * scores + 2 * mix, self.item * 2 * moved),
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
            works.append(Work(name, Phase.FORWARD, ComputeUnit.MATMUL, product, moved))
            works.append(Work(name, Phase.INPUT, ComputeUnit.MATMUL, 2 * product, 2 * moved))
        return tuple(works)
