"""FLOPs and bytes of the GPT's layers on one rank, for F, I and W, of each operation in ``layers``.

A matrix product of [r, i] and [i, c] has 2 r i c FLOPs in each of F, I and W (every product has two gradients, and each
of them is a product of the same size). Bytes count each operand and each result once: repeated reads come from caches.
Weight gradients are read, added to and written in the plan's ``gradient_dtype``. Every expert of a rank is read once
for all its tokens.

Attention over one (query, key) pair has 4 FLOPs per element of a head: a multiplication and an addition in each of two
products. ``flash`` (arXiv:2205.14135) computes the pairs up to the diagonal. Its backward has five such products where
forward has two, because it recomputes the scores; it includes dropout. ``unfused`` computes all pairs, masks half of
them, and stores scores and probabilities.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from itertools import chain, islice
from types import MappingProxyType
from typing import NamedTuple

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.memory import CrossEntropy
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.layer import layer_kind
from pipeproof.stages.describe.layers import operations as ops
from pipeproof.stages.describe.layers.layer_operations import layer_operations
from pipeproof.stages.describe.layers.operations import RankSizes
from pipeproof.stages.describe.synthetic import MASK_BYTES, DropoutSite, dropout_sites

ROUTING_LAUNCHES = 5
"""Operations that a framework starts for one of a router's: a softmax, a choice of experts, a mask, a sort, a copy."""

CONTEXT_LAUNCHES = 4
"""Operations of a step of attention over a ring of cp: the attention, an exchange, two corrections of the softmax."""

RING_STEP_SHARE = Fraction(3, 4)
"""Share of a rank's tokens that a step of attention over a ring of cp computes, but for the first: a rank has an early
and a late part of the sequence, and half of the steps have all of its queries to half of the keys, the others half of
its queries to all of the keys."""

LOSS_LAUNCHES = 3
"""Further operations of a cross-entropy over tp, in F and in I, that no kernel fuses: maximum, mask, choice, sums."""

_LOSS_PASSES: Mapping[CrossEntropy, tuple[int, int]] = MappingProxyType(
    {"separate": (4, 4), "in_place": (8, 2), "compiled": (5, 0), "fused": (0, 0)}
)
"""Reads and writes of float32 logits in a cross-entropy, in F and in I, besides casts to float32 and back. Separate:
PyTorch's log-softmax reads three times and writes; I fills the loss's gradient with zeros, reads it and the log-softmax
and writes. In place (Megatron-LM's ``vocab_parallel_cross_entropy``): a maximum, a difference, an exponential, a sum, a
quotient; in I a product. Compiled: these in three kernels. Fused: one kernel with three reads or writes in the logits'
own type, and a product in I. On one H200 the first two take the time of these bytes at 0.69 and 0.70, 0.63 and 0.69 of
bandwidth (``benchmarks/gpu/shape_kernels.py``)."""

_CHUNK_COSTS: tuple[ops.Cost, ops.Cost] = (0, 2), (0, 2)
"""Costs, forward and backward, of moving visits that came from all ranks into the order of a rank's experts."""

_BIAS_COSTS: tuple[ops.Cost, ops.Cost] = (2, 6), (4, 8)
"""Costs, forward and backward, of biases b of experts' outputs t with routing weights p (Megatron-LM's
``TEGroupedMLP._apply_bias``, commit d98e8a6). b p is written; t and b p are read and t + b p is written; the experts'
parts are read and written as one. Backward copies the gradient g; g p and g b are computed from g, written, and read
for their sums, the gradients of b and p."""

_ROTARY_COSTS: tuple[ops.Cost, ops.Cost] = (3, 12), (6, 14)
"""Costs, forward and backward, of rotary positions step by step (Megatron-LM's ``_apply_rotary_pos_emb_bshd``, commit
d98e8a6). Forward: two products, the negation of a half, two concatenations, a sum. Backward: two products, the negation
of a half, a concatenation, a sum; and the elements behind the rotated ones (there are none) have a gradient of
zeros that is filled and added."""

_ROTARY_LAUNCHES = 24, 14
"""Operations of both calls, for queries and for keys: six of the above and six for cosines and sines forward; seven
backward."""


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


_LOGIT_BYTES = 4
"""Smallest size of a logit in a cross-entropy but a fused one."""

_CAUSAL_SHARES: Mapping[Phase, Fraction] = MappingProxyType(
    {Phase.FORWARD: Fraction(3, 4), Phase.INPUT: Fraction(2, 3)}
)
"""Shares of the bytes of a softmax that reads half of its operands, up to the diagonal, and writes a whole result:
``scaled_upper_triang_masked_softmax`` of Megatron-LM. Forward has one operand, backward two."""


class ProductShape(NamedTuple):
    """``number`` products of [rows, inner] and [inner, columns].

    ``ragged`` products (of experts) have unequal rows with the mean ``rows``. For attention, ``inner`` is the size of a
    head and ``columns`` the number of keys.
    """

    rows: Fraction
    inner: Fraction
    columns: Fraction
    number: Fraction = Fraction(1)
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """One operation of one rank: FLOPs, and bytes between memory and chip.

    ``narrow`` marks products that mixed-precision training computes in eight bits: those with weights of blocks, except
    routers (arXiv:2412.19437, section 3.3.1). ``cast`` are the elements of activations or of their gradients that are
    cast for it. ``accumulated`` are the bytes of a weight gradient that the product reads and writes at its end.
    ``launches`` are the operations that a framework starts for it, one by one: none for a bias, which is part of the
    product before it or of the addition behind it.
    """

    name: str
    phase: Phase
    unit: ComputeUnit
    flops: Fraction
    num_bytes: Fraction
    narrow: bool = False
    shape: ProductShape | None = None
    cast: Fraction = Fraction(0)
    accumulated: Fraction = Fraction(0)
    launches: int = 1


def layer_work(
    plan: PlanSpec, layer: str, size: MicroBatchSize, item_bytes: int, *, flash: bool = True
) -> tuple[Work, ...]:
    """The operations of ``layer`` on one rank for one work item of ``size``. Sequence splits have mean costs.

    ``layer`` is a name as in ``stages``, ``item_bytes`` the size of an element of weights and activations.
    """
    return tuple(chain.from_iterable(operation_works(plan, layer, size, item_bytes, flash=flash)))


def operation_works(
    plan: PlanSpec, layer: str, size: MicroBatchSize, item_bytes: int, *, flash: bool
) -> tuple[tuple[Work, ...], ...]:
    """``layer_work`` by operation of ``layer_operations``, each with its F, I and W."""
    rank = _RankWork(plan, RankSizes(plan, layer, size), item_bytes, flash=flash)
    return tuple(tuple(rank.works(operation)) for operation in layer_operations(plan.gpt, layer))


def product_flops(plan: PlanSpec, layers: Sequence[str], size: MicroBatchSize) -> Mapping[Phase, Fraction]:
    """FLOPs of the products and of flash attention of a stage's ``layers``, for one work item, by phase."""
    names = {layer_kind(plan.gpt, name): name for name in layers}
    flops = dict.fromkeys(Phase, Fraction(0))
    counts = Counter(layer_kind(plan.gpt, name) for name in layers)
    for kind, number in counts.items():
        for work in layer_work(plan, names[kind], size, item_bytes=1):
            if work.unit is not ComputeUnit.VECTOR:
                flops[work.phase] += number * work.flops
    return flops


def _routes(operation: ops.Elementwise) -> bool:
    """True for the scores of a router, and for moving tokens into the order of experts and back."""
    return operation.is_float32 or _moves_visits(operation)


def _moves_visits(operation: ops.Elementwise) -> bool:
    """True for moving tokens into the order of experts, and back."""
    return operation.rows == ops.VISITS and operation.whole > 0


def _regroups(plan: PlanSpec) -> bool:
    """True if a rank groups the tokens that it receives by its experts, and back before they return.

    An all-to-all puts together the tokens of each rank that sends them. Kernels that send a token once to each rank, or
    node, write tokens into the order of experts themselves.
    """
    moe, analytic, ep = plan.gpt.moe, plan.cost.analytic, plan.topology.ep
    if moe is None or not 1 < ep < moe.num_experts or moe.dispatcher != "all_to_all":
        return False
    return moe.nodes_per_token is None and (analytic is None or analytic.exchange == "direct")


def _is_bias(operation: ops.Elementwise) -> bool:
    """True for the bias of a sum over tp, which is added with the residual."""
    return any(weight.name.endswith(".bias") for weight in operation.weights)


class _RankWork:
    def __init__(self, plan: PlanSpec, sizes: RankSizes, item_bytes: int, *, flash: bool) -> None:
        self._sizes, self._item, self._flash = sizes, item_bytes, flash
        self._gradient = dtype_bytes(plan.gradient_dtype)
        self._hidden, self._dropped = plan.gpt.hidden_size, dropout_sites(plan)
        self._cross_entropy = plan.memory.cross_entropy
        analytic = plan.cost.analytic
        self._fused_experts = analytic is not None and analytic.fused_experts
        self._expert_biases = analytic is not None and analytic.expert_biases
        self._fused_rotary = analytic is None or analytic.fused_rotary
        self._fused_residual = analytic is not None and analytic.fused_residual
        self._fused_softmax = analytic is not None and analytic.fused_softmax
        self._regroups = _regroups(plan)
        size, num_splits = sizes.size, plan.schedule.num_sequence_splits
        whole = size.seq_length * num_splits
        keys_of_row = Fraction(size.seq_length * (num_splits + 1), 2)  # of the other splits on average half
        pairs_of_row = Fraction(whole * (whole + 1), 2 * num_splits) if flash else size.seq_length * keys_of_row
        self._keys = size.num_rows * keys_of_row
        self._pairs = size.num_rows * pairs_of_row / sizes.cp

    def works(self, operation: ops.Operation) -> Iterator[Work]:
        """The work of one operation; collectives are none."""
        sizes, name = self._sizes, operation.name
        match operation:
            case ops.Product():
                yield from self._product(operation)
            case ops.StreamProduct():
                inner, columns = operation.inner, operation.columns
                yield from self._matmul(name, sizes.between, inner, columns, 1, narrow=False, ragged=False)
            case ops.Norm():
                numel = sizes.vectors(operation) * operation.size
                back = (operation.backward, operation.weight) if operation.trained else ()
                yield from self._elementwise(name, numel, operation.forward, *back)
            case ops.Elementwise(rows=ops.VISITS, whole=0) if self._fused_experts:  # the activation
                return
            case ops.Elementwise(name="attn.rotary") if not self._fused_rotary:
                numel = sizes.rows(operation.rows) * sizes.elements(operation)
                works = self._elementwise(name, numel, *_ROTARY_COSTS)
                yield from (replace(work, launches=n) for work, n in zip(works, _ROTARY_LAUNCHES, strict=True))
            case ops.Elementwise():
                numel = sizes.rows(operation.rows) * sizes.elements(operation)
                forward = (1, 0) if self._fused_residual and _is_bias(operation) else operation.forward
                works = self._elementwise(name, numel, forward, operation.backward, operation.weight)
                launches = ROUTING_LAUNCHES if _routes(operation) else 0 if _is_bias(operation) else 1
                yield from (replace(work, launches=launches) for work in works)
                if self._regroups and _moves_visits(operation):
                    yield from self._elementwise(f"{name}.chunks", numel, *_CHUNK_COSTS)
                if self._expert_biases and operation.stored and _moves_visits(operation):  # on the way back
                    biases = self._elementwise("mlp.experts.bias", numel, *_BIAS_COSTS)
                    yield from (replace(work, launches=ROUTING_LAUNCHES) for work in biases)
            case ops.Loss():
                yield from self._loss(name, sizes.tokens * sizes.elements(operation))
            case ops.Dropout():
                numel = sizes.between * self._hidden
                for work in self._dropout(name, operation.site, numel):
                    is_fused = self._fused_residual and operation.site == "hidden" and work.phase is Phase.FORWARD
                    # The addition of the residual reads its input and writes its result; the mask remains.
                    yield replace(work, num_bytes=MASK_BYTES * numel, launches=0) if is_fused else work
            case ops.Lookup():
                rows = sizes.tokens * self._hidden
                local = rows / sizes.tp  # of the tokens whose row this rank has
                gradient = self._item * rows + 2 * self._gradient * local
                yield Work(name, Phase.FORWARD, ComputeUnit.VECTOR, Fraction(0), 2 * self._item * rows)
                yield Work(name, Phase.WEIGHT, ComputeUnit.VECTOR, local, gradient)
            case ops.AttentionCore():
                yield from self._flash_core(operation) if self._flash else self._unfused_core(operation)
            case ops.CompressedCore():
                yield from self._compressed_core(operation)
            case ops.IndexerScores():
                yield from self._indexer_scores(operation)

    def _product(self, product: ops.Product) -> Iterator[Work]:
        """A product with one weight, with several side by side, or with one for each expert or group."""
        sizes, name = self._sizes, product.name
        rows, narrow = sizes.rows(product.rows), product.narrow
        inner, columns, num_weights = sizes.product(product)
        ragged = num_weights > 1 and product.rows == ops.VISITS
        works = self._matmul(name, rows, inner, columns, num_weights, narrow=narrow, ragged=ragged)
        if not product.trained:
            works = islice(works, 1)
        if self._fused_experts and product.rows == ops.VISITS:
            phase = Phase.FORWARD if len(product.weights) == 1 else Phase.INPUT
            works = (replace(work, cast=Fraction(0)) if work.phase is phase else work for work in works)
        yield from works
        if product.biased:  # forward adds it to the product before that is written
            biases = self._elementwise(f"{name}.bias", rows * columns, (1, 0), None, (1, 1))
            yield from (replace(work, launches=0) for work in biases)

    def _matmul(
        self, name: str, rows: Fraction, inner: int, columns: int, num_weights: int, *, narrow: bool, ragged: bool
    ) -> Iterator[Work]:
        """A product of rows with one of several weights [inner, columns]."""
        flops = 2 * rows * inner * columns
        activations, weight = self._item * rows * (inner + columns), num_weights * inner * columns
        through = activations + self._item * weight
        added = Fraction(2 * self._gradient * weight)
        each, unit = rows / num_weights, ComputeUnit.MATMUL
        count, wide, high = Fraction(num_weights), Fraction(columns), Fraction(inner)
        forward = ProductShape(each, high, wide, count, ragged)
        yield Work(name, Phase.FORWARD, unit, flops, through, narrow, forward, rows * inner)
        backward = forward._replace(inner=wide, columns=high)
        yield Work(name, Phase.INPUT, unit, flops, through, narrow, backward, rows * columns)
        weights = ProductShape(high, each, wide, count)
        yield Work(name, Phase.WEIGHT, unit, flops, activations + added, narrow, weights, accumulated=added)

    def _elementwise(self, name: str, numel: Fraction, *costs: ops.Cost | None) -> Iterator[Work]:
        """Costs per element of F, I and W."""
        for phase, cost in zip(Phase, costs, strict=False):
            if cost is not None:
                flops, moved = cost
                yield Work(name, phase, ComputeUnit.VECTOR, flops * numel, self._item * moved * numel)

    def _loss(self, name: str, numel: Fraction) -> Iterator[Work]:
        """A cross-entropy: 16-bit logits are cast to float32, except by a fused one."""
        kind, tp, item = self._cross_entropy, self._sizes.tp, self._item
        wide = max(item, _LOGIT_BYTES)
        cast = 0 if item == wide else item + wide
        launches = 1 if tp == 1 or kind in ("compiled", "fused") else 1 + LOSS_LAUNCHES
        for phase, passes, flops, own in zip(Phase, _LOSS_PASSES[kind], (ops.SOFTMAX[0], 2), (3, 2), strict=False):
            num_bytes = own * item if kind == "fused" else cast + passes * wide
            yield Work(name, phase, ComputeUnit.VECTOR, flops * numel, num_bytes * numel, launches=launches)

    def _dropout(self, name: str, site: DropoutSite, numel: Fraction) -> Iterator[Work]:
        """Multiplication by the mask, forward and backward, if the plan has dropout."""
        if site in self._dropped:
            moved = (2 * self._item + MASK_BYTES) * numel
            for phase in (Phase.FORWARD, Phase.INPUT):
                yield Work(name, phase, ComputeUnit.VECTOR, numel, moved)

    def _flash_core(self, core: ops.AttentionCore) -> Iterator[Work]:
        """Reads q, k, v and writes o; in backward reads q, k, v, o, do and writes dq, dk, dv.

        Over a ring of cp each step's result is added to the result of earlier steps: two reads and a write of the
        output, and in backward of the gradients of q, k and v.
        """
        tp, name = self._sizes.tp, core.name
        scores, mix = 2 * self._pairs * core.queries / tp, 2 * self._pairs * core.mixed / tp
        moved = self._sizes.tokens * (core.queries + core.mixed) / tp + self._keys * (core.keys + core.values) / tp
        size = Fraction(core.queries, core.num_heads)
        shape = ProductShape(self._sizes.tokens, size, self._keys / self._sizes.size.num_rows)
        unit, backward = ComputeUnit.ATTENTION, 3 * scores + 2 * mix
        yield Work(name, Phase.FORWARD, unit, scores + mix, self._item * moved, shape=shape)
        yield Work(name, Phase.INPUT, unit, backward, self._item * 2 * moved, shape=shape)
        cp = self._sizes.cp
        if cp > 1:
            outputs, inputs = core.mixed, core.queries + core.keys + core.values
            for phase, elements in ((Phase.FORWARD, outputs), (Phase.INPUT, inputs)):
                numel = self._sizes.tokens * elements / tp * (1 + (cp - 1) * RING_STEP_SHARE)
                (work,) = self._elementwise("attn.merge", numel, (0, 3))
                yield replace(work, phase=phase, launches=CONTEXT_LAUNCHES * cp)

    def _compressed_core(self, core: ops.CompressedCore) -> Iterator[Work]:
        """Flash attention to what queries see, or products of all pairs, with a softmax that has a sink.

        Keys are the values: each is read once and has one gradient.
        """
        sizes, size = self._sizes, self._sizes.size
        entries, heads = sizes.rows(ops.ENTRIES), Fraction(core.num_heads, sizes.tp)
        keys, queries = sizes.tokens + entries, sizes.tokens * heads * core.size
        if self._flash:
            product = 2 * size.num_rows * core.seen(size.seq_length) * heads * core.size
            moved = self._item * (2 * queries + keys * core.size)
            shape = ProductShape(sizes.tokens, Fraction(core.size), keys / size.num_rows)
            yield Work(core.name, Phase.FORWARD, ComputeUnit.ATTENTION, 2 * product, moved, shape=shape)
            yield Work(core.name, Phase.INPUT, ComputeUnit.ATTENTION, 5 * product, 2 * moved, shape=shape)
            return
        scores = sizes.tokens * keys / size.num_rows * heads
        yield from self._elementwise("attn.softmax", scores, ops.SOFTMAX, ops.SOFTMAX_BACK)
        length, of_row = Fraction(size.seq_length), keys / size.num_rows
        moved = self._item * (queries + keys * core.size + scores)
        for name, inner, columns in (("attn.scores", core.size, of_row), ("attn.mix", of_row, core.size)):
            shape = ProductShape(length, Fraction(inner), Fraction(columns), heads * size.num_rows)
            twice = shape._replace(number=2 * shape.number)
            product = 2 * scores * core.size
            yield Work(name, Phase.FORWARD, ComputeUnit.MATMUL, product, moved, shape=shape)
            yield Work(name, Phase.INPUT, ComputeUnit.MATMUL, 2 * product, 2 * moved, shape=twice)

    def _indexer_scores(self, scorer: ops.IndexerScores) -> Iterator[Work]:
        """A product for each head; then relu, weights and their sum over heads, and the choice."""
        size, tokens = self._sizes.size, self._sizes.tokens
        entries = self._sizes.rows(ops.ENTRIES) / size.num_rows
        scores = tokens * entries * scorer.num_heads
        numel = tokens * scorer.num_heads * scorer.size
        moved = self._item * (numel + self._sizes.rows(ops.ENTRIES) * scorer.size + scores)
        number = Fraction(size.num_rows)
        shape = ProductShape(Fraction(size.seq_length * scorer.num_heads), Fraction(scorer.size), entries, number)
        yield Work(scorer.name, Phase.FORWARD, ComputeUnit.MATMUL, 2 * scores * scorer.size, moved, shape=shape)
        (work,) = self._elementwise(f"{scorer.name}.choice", scores, (3, 1))
        yield replace(work, launches=ROUTING_LAUNCHES)

    def _unfused_core(self, core: ops.AttentionCore) -> Iterator[Work]:
        tp = self._sizes.tp
        scores = self._pairs * core.num_heads / tp
        for work in self._elementwise("attn.softmax", scores, ops.SOFTMAX, ops.SOFTMAX_BACK):
            read = _CAUSAL_SHARES[work.phase] if self._fused_softmax else 1
            yield replace(work, num_bytes=read * work.num_bytes)
        yield from self._dropout("attn.core_dropout", "attention", scores)
        rows, keys = self._sizes.tokens / self._sizes.size.num_rows, self._keys / self._sizes.size.num_rows
        number = Fraction(self._sizes.size.num_rows * core.num_heads, tp)
        query, value = Fraction(core.queries, core.num_heads), Fraction(core.mixed, core.num_heads)
        factors = (
            ("attn.scores", core.queries, core.keys, ProductShape(rows, query, keys, number)),
            ("attn.mix", core.mixed, core.values, ProductShape(rows, keys, value, number)),
        )
        for name, of_token, of_key, shape in factors:
            product = 2 * self._pairs * of_token / tp
            moved = self._item * (self._sizes.tokens * of_token / tp + self._keys * of_key / tp + scores)
            twice = shape._replace(number=2 * number)  # the gradients of both factors
            yield Work(name, Phase.FORWARD, ComputeUnit.MATMUL, product, moved, shape=shape)
            yield Work(name, Phase.INPUT, ComputeUnit.MATMUL, 2 * product, 2 * moved, shape=twice)
