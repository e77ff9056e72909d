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
  them. ``unfused`` computes all pairs, masks half of them, and stores scores
  and probabilities.
- Rank for rank, tensor parallelism cuts heads, feed-forward and vocabulary,
  context parallelism tokens, evenly in causal pairs too; sequence parallelism
  cuts norms and additions between blocks (arXiv:2205.05198).

Shape letters: S sequence, H hidden, A heads, M feed-forward size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize

WEIGHT_GRADIENT_BYTES = 4
"""Of an element of a weight's gradient."""

_NORM, _NORM_BACK, _ROTARY, _SWIGLU, _SWIGLU_BACK, _SOFTMAX, _SOFTMAX_BACK = 4, 8, 3, 5, 10, 5, 4
"""FLOPs per element of what is no product: an addition, multiplication, division or exponential counts as one."""


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
    """One operation of one rank: FLOPs, and bytes between memory and chip."""

    name: str
    phase: Phase
    unit: Unit
    flops: Fraction
    num_bytes: Fraction


def layer_work(
    plan: PlanSpec, layer: str, size: MicroBatchSize, item_bytes: int, *, flash: bool = True
) -> tuple[Work, ...]:
    """The operations of ``layer`` on one rank for one unit of work of ``size``; any split is the mean one.

    ``layer`` is a name as ``stages`` has it, ``item_bytes`` the size of an
    element of weights and activations.
    """
    rank = _Rank(plan, size, item_bytes, flash=flash)
    if layer == "embed":
        return rank.embed()
    if layer == "norm":
        return rank.norm("norm")
    return rank.head() if layer == "head" else rank.block()


class _Rank:
    """Sizes of one rank: ``tokens`` inside of layers, ``between`` where sequence parallelism cuts them."""

    def __init__(self, plan: PlanSpec, size: MicroBatchSize, item_bytes: int, *, flash: bool) -> None:
        model, topology, num_splits = plan.model, plan.topology, plan.schedule.num_sequence_splits
        tp = topology.tp
        self.item, self.flash = item_bytes, flash
        self.hidden, self.own_hidden = model.hidden_size, model.hidden_size // tp
        self.own_heads, self.own_ffn = model.num_heads // tp, model.ffn_size // tp
        self.own_vocab = model.vocab_size // tp
        self.tokens = Fraction(size.num_tokens, topology.cp)
        self.between = self.tokens / tp if topology.sequence_parallel else self.tokens
        self.tp = tp
        whole = size.seq_length * num_splits
        keys_of_row = Fraction(size.seq_length * (num_splits + 1), 2)  # the mean split sees half of what others leave
        pairs_of_row = Fraction(whole * (whole + 1), 2 * num_splits) if flash else size.seq_length * keys_of_row
        self.keys = size.num_rows * keys_of_row
        self.pairs = size.num_rows * pairs_of_row / topology.cp

    def block(self) -> tuple[Work, ...]:
        return (
            *self.norm("attn_norm"),
            *self._matmul("attn.qkv", self.hidden, 3 * self.own_hidden),
            *self._elementwise("attn.rotary", 2 * self.tokens * self.own_hidden, (_ROTARY, 2), (_ROTARY, 2)),
            *(self._flash() if self.flash else self._unfused()),
            *self._matmul("attn.out", self.own_hidden, self.hidden),
            *self._add("attn.add"),
            *self.norm("mlp_norm"),
            *self._matmul("mlp.gate_up", self.hidden, 2 * self.own_ffn),
            *self._elementwise("mlp.swiglu", self.tokens * self.own_ffn, (_SWIGLU, 3), (_SWIGLU_BACK, 5)),
            *self._matmul("mlp.down", self.own_ffn, self.hidden),
            *self._add("mlp.add"),
        )

    def embed(self) -> tuple[Work, ...]:
        rows = self.tokens * self.hidden
        own = rows / self.tp  # of the tokens whose row this rank has
        gradient = self.item * rows + 2 * WEIGHT_GRADIENT_BYTES * own
        return (
            Work("embed", Phase.FORWARD, Unit.VECTOR, Fraction(0), 2 * self.item * rows),
            Work("embed", Phase.WEIGHT, Unit.VECTOR, own, gradient),
        )

    def norm(self, name: str) -> tuple[Work, ...]:
        numel = self.between * self.hidden
        weight = Work(name, Phase.WEIGHT, Unit.VECTOR, 2 * numel, 2 * self.item * numel)
        return (*self._elementwise(name, numel, (_NORM, 2), (_NORM_BACK, 3)), weight)

    def head(self) -> tuple[Work, ...]:
        logits = self.tokens * self.own_vocab
        return (
            *self._matmul("head", self.hidden, self.own_vocab),
            *self._elementwise("head.loss", logits, (_SOFTMAX, 2), (2, 2)),  # read for the maximum, and for the sum
        )

    def _matmul(self, name: str, inner: int, columns: int) -> tuple[Work, ...]:
        """A product of this rank's tokens with a weight of [inner, columns]."""
        flops = 2 * self.tokens * inner * columns
        activations, weight = self.item * self.tokens * (inner + columns), inner * columns
        through = activations + self.item * weight
        gradient = activations + 2 * WEIGHT_GRADIENT_BYTES * weight
        return (
            Work(name, Phase.FORWARD, Unit.MATMUL, flops, through),
            Work(name, Phase.INPUT, Unit.MATMUL, flops, through),
            Work(name, Phase.WEIGHT, Unit.MATMUL, flops, gradient),
        )

    def _elementwise(
        self, name: str, numel: Fraction, forward: tuple[int, int], backward: tuple[int, int]
    ) -> tuple[Work, ...]:
        """(FLOPs, elements read or written) for each of ``numel``, forward and for the input's gradient."""
        return tuple(
            Work(name, phase, Unit.VECTOR, flops * numel, self.item * moved * numel)
            for phase, (flops, moved) in ((Phase.FORWARD, forward), (Phase.INPUT, backward))
        )

    def _add(self, name: str) -> tuple[Work, ...]:
        """The sum with what goes around the layer; going back, the sum of both gradients."""
        return self._elementwise(name, self.between * self.hidden, (1, 3), (1, 3))

    def _flash(self) -> tuple[Work, ...]:
        product = 2 * self.pairs * self.own_hidden
        query, key = self.tokens * self.own_hidden, self.keys * self.own_hidden
        return (  # reads q, k, v and writes o; reads q, k, v, o, do and writes dq, dk, dv
            Work("attn.core", Phase.FORWARD, Unit.ATTENTION, 2 * product, self.item * (2 * query + 2 * key)),
            Work("attn.core", Phase.INPUT, Unit.ATTENTION, 5 * product, self.item * (4 * query + 4 * key)),
        )

    def _unfused(self) -> tuple[Work, ...]:
        product, scores = 2 * self.pairs * self.own_hidden, self.pairs * self.own_heads
        one_side = (self.tokens + self.keys) * self.own_hidden  # q and k of the scores, o and v of the mix
        works = list(self._elementwise("attn.softmax", scores, (_SOFTMAX, 2), (_SOFTMAX_BACK, 3)))
        for name in ("attn.scores", "attn.mix"):
            forward, backward = self.item * (one_side + scores), self.item * 2 * (one_side + scores)
            works.append(Work(name, Phase.FORWARD, Unit.MATMUL, product, forward))
            works.append(Work(name, Phase.INPUT, Unit.MATMUL, 2 * product, backward))
        return tuple(works)
