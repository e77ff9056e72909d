"""Bytes that a stage holds on one rank: activations of a micro-batch, and, below, its training state.

Backward needs them. Operations are those in ``layers``. A product stores its input until W has computed the
weight's gradient. Every other operation stores what its own backward reads, until I. If W runs apart from I, it also
needs the gradients of the outputs of products and norms, from the end of I on.

- Norms: the input, and the factor of each token (with LayerNorm also its mean), or of each head, in float32.
- Biases and learned positions: nothing. W needs the gradient of the sum over TP; without sequence parallelism it is the
  gradient of the product before.
- Flash attention (arXiv:2205.14135): q, k, v, and a float32 number for each query of a head; the output is the input of
  the next product. Unfused: the probabilities in place of these numbers. With context parallelism k and v are gathered
  for the whole sequence.
- Experts (with evenly distributed tokens): the router's probabilities in float32, as many numbers for the gradient of
  the router's losses (on the first TP rank), the tokens as sent to experts, and the output for each, which the router's
  gradient needs. Latent attention: queries, keys and values per head.
- Unfused attention with compressed keys: while its I runs also the gradients of probabilities and scores, of one block.
- Dropout: a byte for each element of its mask. Flash attention stores none and draws it again; unfused attention also
  stores the dropped probabilities.
- Cross-entropy: the logits in float32 and, while I runs, their gradient. Other implementations overwrite one with the
  other, or have a copy in the type of activations (``memory.cross_entropy``).
- Multi-token prediction: the input of each norm of a module and of the product that joins them. Embedding, final norm
  and head store the same for each MTP stream. Streams that only pass through a stage store nothing.
- Sequence parallelism shards the inputs of norms over TP. The gathered inputs of products are stored whole, because W
  has no collectives, unless the plan gathers them again.

Inputs of products may have the type in which products are computed, with its scales
(``memory.product_inputs``). Then flash attention stores its output apart from the input of the next product.

Offload: of the first ``memory.offload_blocks`` blocks of a stage nothing is on the device between F and I. While F or I
runs, two of them are: one that is computed and one that is copied.

Recomputation: ``selective`` stores nothing inside its modules, nor the outputs that a module leaves to the backward
(``recomputed_modules``), ``full`` only the input of a block. Both hold the rest of one block while I runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from math import ceil, prod
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.memory import RecomputeModule
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.layer import (
    WHOLE_MLP,
    Layer,
    Parameter,
    is_block,
    is_empty,
    is_not_stored,
    layer_kind,
    modules_of_block,
)
from pipeproof.stages.describe.layers import operations as ops
from pipeproof.stages.describe.layers.layer_operations import layer_operations, residual_streams_of
from pipeproof.stages.describe.layers.operations import RankSizes
from pipeproof.stages.describe.mtp_streams import is_mtp, mtp_streams_into
from pipeproof.stages.describe.synthetic import MASK_BYTES, dropout_sites

TOKEN_ID = 8
"""Bytes of a token id."""

INDEX = 4
"""Bytes of the number of an entry that a query sees."""

_NARROW_BYTES: Mapping[str, Fraction] = MappingProxyType(
    {
        "float8": Fraction(1),
        "float8_block": 1 + Fraction(4, 128),
        "float4": Fraction(1, 2) + Fraction(1, 16),
    }
)
"""Bytes of an element of a product's input by ``matmul_dtype``: with a float32 scale for each 128 elements, or one of
eight bits for each 16."""

_AT_ONCE = 2
"""Offloaded blocks that are on the device while a stage computes."""

_ZERO = Fraction(0)


class Lifetime(StrEnum):
    """The time during which an activation is stored; a whole backward is I and W."""

    TO_INPUT = "from F to the end of I"
    TO_WEIGHT = "from F to the end of W"
    IN_FORWARD = "while F runs"
    IN_INPUT = "while I runs"
    BETWEEN = "from the end of I to the end of W"

    @property
    def is_from_forward(self) -> bool:
        """True if it is stored from the start of F on."""
        return self in (Lifetime.TO_INPUT, Lifetime.TO_WEIGHT)


@dataclass(frozen=True, slots=True)
class StoredActivation:
    """Bytes that one operation of a stage stores for one work item; ``is_input``: from which I recomputes a block."""

    name: str
    lifetime: Lifetime
    num_bytes: Fraction
    is_input: bool = False

    @property
    def is_logits(self) -> bool:
        """True if it belongs to the loss and not to the layers."""
        return self.name == "head.loss"


def is_flash(plan: PlanSpec) -> bool:
    """True if attention stores no probabilities."""
    analytic = plan.cost.analytic
    return (plan.memory.attention or (analytic.attention if analytic is not None else "flash")) == "flash"


def product_inputs(plan: PlanSpec) -> str:
    """``memory.product_inputs`` with the type of ``cost.analytic`` in place of ``matmul_dtype``."""
    declared, analytic = plan.memory.product_inputs, plan.cost.analytic
    return declared if declared != "matmul_dtype" or analytic is None else analytic.matmul_dtype or "dtype"


def gpt_activations(plan: PlanSpec, layers: Sequence[Layer], size: MicroBatchSize) -> tuple[StoredActivation, ...]:
    """Activations that a stage of these layers stores for a work item of ``size``, added up per operation name."""
    total: dict[tuple[str, Lifetime], Fraction] = {}
    recomputed: dict[tuple[str, Lifetime], Fraction] = {}
    by_kind: dict[str, _StoredAndRecomputed] = {}
    offloaded = offloaded_blocks(plan, [layer.name for layer in layers])
    at_once: dict[tuple[str, Lifetime], Fraction] = {}
    for layer in layers:
        kind = layer_kind(plan.model, layer.name)
        if kind not in by_kind:
            by_kind[kind] = _of_layer(plan, layer.name, size)
        stored, in_backward = by_kind[kind]
        if layer.name in offloaded:
            copied = [held for held in stored if held.lifetime.is_from_forward]
            for held in copied:
                num_bytes = min(_AT_ONCE, len(offloaded)) * held.num_bytes
                for key in ((held.name, Lifetime.IN_FORWARD), (held.name, Lifetime.IN_INPUT)):
                    at_once[key] = max(at_once.get(key, _ZERO), num_bytes)
            for_w = [replace(h, lifetime=Lifetime.BETWEEN) for h in copied if h.lifetime is Lifetime.TO_WEIGHT]
            stored = [held for held in stored if not held.lifetime.is_from_forward] + for_w
        for held in stored:
            key = held.name, held.lifetime
            before = total.get(key, _ZERO)
            one_after_the_other = held.lifetime is Lifetime.IN_INPUT
            total[key] = max(before, held.num_bytes) if one_after_the_other else before + held.num_bytes
        for held in in_backward:  # one block after the other
            key = held.name, Lifetime.IN_INPUT
            recomputed[key] = max(recomputed.get(key, _ZERO), held.num_bytes)
    for key, num_bytes in (*recomputed.items(), *at_once.items()):
        total[key] = total.get(key, _ZERO) + num_bytes
    return tuple(
        StoredActivation(name, lifetime, num_bytes) for (name, lifetime), num_bytes in total.items() if num_bytes
    )


def offloaded_blocks(plan: PlanSpec, names: Sequence[str]) -> frozenset[str]:
    """Names of a stage's layers whose activations are in host memory between F and I: its first blocks."""
    return frozenset([name for name in names if is_block(name)][: plan.memory.offload_blocks])


def copied_bytes(plan: PlanSpec, name: str, size: MicroBatchSize) -> Fraction:
    """Bytes that an offloaded block copies to host memory for a work item of ``size``, and back."""
    return sum((held.num_bytes for held in _of_layer(plan, name, size)[0] if held.lifetime.is_from_forward), _ZERO)


def gpt_input_lifetime(plan: PlanSpec, layers: Sequence[Layer]) -> Lifetime | None:
    """Lifetime of a stage's input, if the first layer of the stage stores the input itself.

    None if the layer gathers or widens it, takes one of several MTP streams, or takes token ids.
    """
    first = next((layer.name for layer in layers if not is_empty(layer.name)), "embed")
    is_gathered = (
        plan.topology.sequence_parallel and plan.topology.tp > 1 and plan.memory.sequence_parallel_activations == "keep"
    )
    streams = None if is_mtp(first) else residual_streams_of(plan.gpt, first)
    is_widened = streams is not None and streams.expands and plan.memory.recompute != "full"
    has_mtp_streams = mtp_streams_into(plan.gpt, first) > 1
    if first == "embed" or (first == "head" and is_gathered) or is_widened or has_mtp_streams:
        return None
    return Lifetime.TO_WEIGHT if streams is None else Lifetime.TO_INPUT


_StoredAndRecomputed: TypeAlias = tuple[list[StoredActivation], list[StoredActivation]]


def _of_layer(plan: PlanSpec, name: str, size: MicroBatchSize) -> _StoredAndRecomputed:
    """(Stored from F on, or after I, the inputs first; stored while I recomputes a block)."""
    rank = _RankMemory(plan, RankSizes(plan, name, size))
    everything = [held for operation in layer_operations(plan.gpt, name) for held in rank.stored(operation)]
    inputs, others = [h for h in everything if h.is_input], [h for h in everything if not h.is_input]
    if plan.memory.recompute == "none" or not is_block(name):
        return inputs + others, []
    again = [held for held in others if held.lifetime.is_from_forward]
    if plan.memory.recompute == "selective":
        modules = modules_of_block(plan, name)
        inputs += rank.module_inputs(modules)
        again = [held for held in again if is_not_stored(modules, held.name)]
    for_w = [replace(held, lifetime=Lifetime.BETWEEN) for held in again if held.lifetime is Lifetime.TO_WEIGHT]
    return [*inputs, *(held for held in others if held not in again), *for_w], again


class _RankMemory:
    def __init__(self, plan: PlanSpec, sizes: RankSizes) -> None:
        self._sizes, self._hidden, self._mla = sizes, plan.gpt.hidden_size, plan.gpt.mla
        self._item, self._is_flash = dtype_bytes(memory_dtype(plan)), is_flash(plan)
        self._dropped, self._recomputes = dropout_sites(plan), plan.memory.recompute == "full"
        self._regathers = plan.memory.sequence_parallel_activations == "regather"
        self._cross_entropy = plan.memory.cross_entropy
        self._narrow = _NARROW_BYTES.get(product_inputs(plan))
        self._num_splits = plan.schedule.num_sequence_splits
        self._read = set[tuple[str, Fraction]]()

    def stored(self, operation: ops.Operation) -> Iterator[StoredActivation]:
        """The activations of one operation; collectives store none."""
        sizes, name = self._sizes, operation.name
        match operation:
            case ops.Product() | ops.Norm() if not operation.trained:
                return
            case ops.Product():
                yield from self._product(operation)
            case ops.Norm():
                vectors, numel = sizes.vectors(operation), sizes.vectors(operation) * operation.size
                yield StoredActivation(name, Lifetime.TO_WEIGHT, self._item * numel, operation.is_input)
                yield StoredActivation(f"{name}.factor", Lifetime.TO_WEIGHT, FLOAT32 * operation.factors * vectors)
                yield StoredActivation(f"{name}.grad", Lifetime.BETWEEN, self._item * numel)
            case ops.Elementwise() if operation.stored:
                numel = sizes.rows(operation.rows) * sizes.elements(operation)
                item = FLOAT32 if operation.is_float32 else self._item
                widened = FLOAT32 * operation.widened if self._item < FLOAT32 else 0
                yield StoredActivation(name, Lifetime.TO_INPUT, (item * operation.stored + widened) * numel)
            case ops.Elementwise() if operation.weights and sizes.is_sharded_between:  # or a product's gradient
                numel = sizes.rows(operation.rows) * sizes.elements(operation)
                yield StoredActivation(f"{name}.grad", Lifetime.BETWEEN, self._item * numel)
            case ops.Stored() if self._recomputes or not operation.if_recomputed:
                item = FLOAT32 if operation.is_float32 else self._item
                num_bytes = item * sizes.between * operation.numel
                yield StoredActivation(name, Lifetime[operation.lifetime], num_bytes, operation.is_input)
            case ops.Dropout() if operation.site in self._dropped:
                yield StoredActivation(name, Lifetime.TO_INPUT, MASK_BYTES * sizes.between * self._hidden)
            case ops.Lookup():
                yield StoredActivation(name, Lifetime.TO_WEIGHT, TOKEN_ID * sizes.tokens)
                yield StoredActivation(f"{name}.grad", Lifetime.BETWEEN, self._item * sizes.tokens * self._hidden)
            case ops.Loss():
                numel = sizes.tokens * sizes.elements(operation)
                kept, gradient = self._logits_bytes
                yield StoredActivation(name, Lifetime.TO_INPUT, kept * numel + TOKEN_ID * sizes.tokens)  # with labels
                yield StoredActivation(name, Lifetime.IN_INPUT, gradient * numel)
            case ops.AttentionCore():
                yield from self._core(operation)
            case ops.CompressedCore():
                yield from self._compressed_core(operation)

    @property
    def _logits_bytes(self) -> tuple[int, int]:
        """Bytes of an element of the logits from F on, and of I's addition to them: gradients, or a copy in `dtype`."""
        return {
            "separate": (FLOAT32, FLOAT32),
            "in_place": (FLOAT32, self._item),
            "compiled": (FLOAT32, FLOAT32 + self._item),
            "fused": (self._item, 0),
        }[self._cross_entropy]

    def module_inputs(self, modules: Sequence[RecomputeModule]) -> Iterator[StoredActivation]:
        """The inputs of recomputed modules that no other operation stores.

        An MLP, or a router with experts, reads the output of its norm, unless that is computed again too. The part of
        the keys with positions enters their rotation.
        """
        sizes, mla = self._sizes, self._mla
        if set(WHOLE_MLP) & set(modules) and "layernorm" not in modules:
            yield StoredActivation("mlp.input", Lifetime.TO_INPUT, self._item * sizes.between * self._hidden)
        if mla is not None and "mla_up_proj" in modules:
            yield StoredActivation("attn.rotary", Lifetime.TO_INPUT, self._item * sizes.tokens * mla.rope_head_size)

    def _product(self, product: ops.Product) -> Iterator[StoredActivation]:
        """The input, which products of one tensor store once: gathered, or as the rank's own tokens."""
        sizes, name = self._sizes, product.name
        rows, (inner, columns, _) = sizes.rows(product.rows), sizes.product(product)
        stored = sizes.between if product.entered and self._regathers else rows
        item: Fraction | int = self._item if product.dtype is None else dtype_bytes(product.dtype)
        if product.dtype is None and product.narrow and self._narrow is not None:
            item = self._narrow
        if (product.reads, stored) not in self._read:
            yield StoredActivation(name, Lifetime.TO_WEIGHT, item * stored * inner)
        if product.reads:
            self._read.add((product.reads, stored))
        yield StoredActivation(f"{name}.grad", Lifetime.BETWEEN, self._item * rows * columns)

    def _core(self, core: ops.AttentionCore) -> Iterator[StoredActivation]:
        """Queries, keys and values, and a number for each query or the probabilities of all pairs."""
        size, tp = self._sizes.size, self._sizes.tp
        numel = (self._sizes.tokens * core.queries + size.num_tokens * (core.keys + core.values)) / tp
        yield StoredActivation("attn.qkv_out", Lifetime.TO_INPUT, self._item * numel)
        # On average a split sees half of the other splits.
        pairs = Fraction(size.num_tokens * size.seq_length * (self._num_splits + 1), 2 * self._sizes.cp)
        scores, num_bytes = pairs * core.num_heads / tp, self._item
        if "attention" in self._dropped:
            num_bytes += self._item + MASK_BYTES
        factors = FLOAT32 * self._sizes.tokens * core.num_heads / tp
        yield StoredActivation(core.name, Lifetime.TO_INPUT, factors if self._is_flash else num_bytes * scores)
        if self._is_flash and self._narrow is not None:
            mixed = self._sizes.tokens * core.mixed / tp
            yield StoredActivation(f"{core.name}_out", Lifetime.TO_INPUT, self._item * mixed)

    def _compressed_core(self, core: ops.CompressedCore) -> Iterator[StoredActivation]:
        """Queries, keys that are also the values, chosen entries; a number for each query, or all probabilities."""
        sizes, tokens = self._sizes, self._sizes.tokens
        heads, entries = Fraction(core.num_heads, sizes.tp), sizes.rows(ops.ENTRIES)
        numel = tokens * heads * core.size + (tokens + entries) * core.size
        yield StoredActivation("attn.qkv_out", Lifetime.TO_INPUT, self._item * numel)
        of_row = entries / sizes.size.num_rows
        if core.top_k is not None:
            yield StoredActivation("attn.choice", Lifetime.TO_INPUT, INDEX * tokens * min(of_row, Fraction(core.top_k)))
        if not self._is_flash:
            probabilities = self._item * tokens * (sizes.size.seq_length + of_row) * heads
            yield StoredActivation(core.name, Lifetime.TO_INPUT, probabilities)
            yield StoredActivation(f"{core.name}.grad", Lifetime.IN_INPUT, 2 * probabilities)
            return
        yield StoredActivation(core.name, Lifetime.TO_INPUT, FLOAT32 * tokens * heads)
        mixed = self._item * tokens * heads * core.size  # its rotation back is another tensor
        yield StoredActivation(f"{core.name}_out", Lifetime.TO_INPUT, mixed)


# Bytes of a stage's training state on one rank (weights, gradients, optimizer state), and optimizer shards.
#
# With ``memory.shard_optimizer: dp`` (stage 1 of arXiv:1910.02054) a rank's part of a weight is flattened in C order
# and split into as many equal shards as there are dp ranks. The last shards are shorter, or empty, if the number of
# elements does not divide. Rank k has the optimizer state of shard k and updates it. For communication shards are
# padded with zeros to equal size. Fleet's ``DygraphShardingOptimizerV2`` and Megatron-LM's distributed optimizer split
# buffers of many weights in the same way; here each weight is a separate buffer. Megatron-LM's shards are over all
# ranks that hold a weight (``memory.optimizer_ranks: replicas``), which memory and times follow. Fleet's first version
# assigns whole weights to ranks.


FLOAT32 = 4
"""Bytes of a float32 element."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a stage's training state on one rank; ``updated`` are weights and gradients that its optimizer moves.

    ``parameters`` and ``gradients`` are kept for the whole step. Of sharded ones, ``whole_parameters`` exist from their
    gathers to the end of the computation, ``whole_gradients`` from a B or W to the end of its sums.
    """

    parameters: int
    gradients: int
    whole_parameters: int
    whole_gradients: int
    optimizer: int
    updated: Fraction


def memory_dtype(plan: PlanSpec) -> str:
    """The type of weights and activations: from ``memory``, else ``cost.analytic``, else ``run``."""
    analytic = plan.cost.analytic
    return plan.memory.dtype or (analytic.dtype if analytic is not None else None) or plan.run.dtype


def optimizer_bytes(plan: PlanSpec) -> float:
    """Bytes of optimizer state per parameter, before sharding."""
    if plan.memory.optimizer_bytes is not None:
        return plan.memory.optimizer_bytes
    item, main = dtype_bytes(memory_dtype(plan)), plan.run.main_grad_dtype
    state_item = max(item, FLOAT32 if main is None else dtype_bytes(main))
    copy = state_item if item < state_item else 0
    return copy + (2 * state_item if plan.run.optimizer == "adamw" else 0)


def state_of(plan: PlanSpec, layers: Iterable[Layer]) -> StateBytes:
    """Bytes on one rank for the layers' own weights."""
    return state_of_weights(plan, (weight for layer in layers for weight in layer.parameters))


def state_of_weights(plan: PlanSpec, weights: Iterable[Parameter]) -> StateBytes:
    """Bytes on one rank for some weights."""
    axes = {"tp": plan.topology.tp, "ep": plan.topology.ep}
    sizes: dict[int, list[int]] = {}  # by number of shards
    for weight in weights:
        sizes.setdefault(state_shards(plan, weight), []).append(prod(weight.local_shape(axes)))
    numel = sum(map(sum, sizes.values()))
    item, gradient_item = dtype_bytes(memory_dtype(plan)), dtype_bytes(plan.gradient_dtype)
    held = sum(shard_numel(size, shards) for shards, of_shards in sizes.items() for size in of_shards)
    is_sharded = shards_gradients(plan)
    updated = sum((Fraction(sum(of_shards), shards) for shards, of_shards in sizes.items()), Fraction(0))
    return StateBytes(
        (held if shards_weights(plan) else numel) * item,
        (held if is_sharded else numel) * gradient_item,
        numel * item if shards_weights(plan) else 0,
        numel * gradient_item if is_sharded else 0,
        ceil(held * Fraction(optimizer_bytes(plan))),
        updated * (2 * item + gradient_item),
    )


def moved_by_update(state: StateBytes) -> Fraction:
    """Bytes that an optimizer step reads and writes: it reads gradients, and reads and writes weights and its state.

    If the optimizer is sharded, each rank updates its shard of the weights.
    """
    return state.updated + 2 * state.optimizer


def state_shards(plan: PlanSpec, weight: Parameter) -> int:
    """The number of ranks that share the optimizer state of a weight, in memory and in time."""
    topology = plan.topology
    if plan.memory.shard_optimizer == "none" or plan.memory.optimizer_ranks == "dp":
        return num_shards(plan)
    return topology.dp * topology.cp * (1 if "ep" in weight.sharded_over else topology.ep)


def num_shards(plan: PlanSpec) -> int:
    """The number of optimizer shards of each weight in the graph and in a run, over dp; 1 without sharding."""
    return plan.topology.dp if plan.memory.shard_optimizer == "dp" else 1


def shards_gradients(plan: PlanSpec) -> bool:
    """Return True if dp ranks keep shards of gradients, to which they add the sum of each micro-batch."""
    return plan.memory.shard_gradients == "dp" and num_shards(plan) > 1


def shards_weights(plan: PlanSpec) -> bool:
    """Return True if dp ranks keep shards of weights, and gather whole ones for each computation."""
    return plan.memory.shard_weights == "dp" and num_shards(plan) > 1


class Kept(NamedTuple):
    """Parts that a rank with a sharded optimizer keeps whole for a step; of others it keeps its shards."""

    gradients: bool
    weights: bool

    @classmethod
    def of(cls, plan: PlanSpec) -> Kept:
        """The parts that the ranks of a plan keep whole."""
        return cls(not shards_gradients(plan), not shards_weights(plan))


def shard_numel(numel: int, shards: int) -> int:
    """Elements of the first shard, which is the padded size of all shards."""
    return -(-numel // shards)


def shard_range(numel: int, shards: int, shard: int) -> tuple[int, int]:
    """The half-open range of shard ``shard`` in the flattened weight; it may be empty."""
    size = shard_numel(numel, shards)
    return min(shard * size, numel), min((shard + 1) * size, numel)
